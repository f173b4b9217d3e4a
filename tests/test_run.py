"""`accumviz run` at its edges: killed at any moment, under torchrun; and what TensorBoard reads."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import accumviz as av
from accumviz.checks.check import check
from accumviz.cli import main
from tests.light import LIGHT
from tests.test_cli import ledger as by_hand
from tests.test_cli import said

ROOT = Path(__file__).resolve().parent.parent
POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="a terminal, or a kill, as POSIX has them")

# Tells after each step how many it has taken, and when.
ENDLESS = """
import os, sys, time
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
told = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
parent, step = os.getppid(), 0
while os.getppid() == parent:  # where nobody is left to kill it, it ends by itself
    model(torch.ones(2, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    os.pwrite(told, f"{time.time()} {step}".encode().ljust(40), 0)
    if step % 300 == 0:
        time.sleep(0.2)
"""


@POSIX
def test_killed_at_any_moment_it_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHT + ENDLESS)
    rng = random.Random(1)
    lost = []
    kills = int(os.environ.get("ACCUMVIZ_KILLS", "4"))
    for batch in range(-(-kills // 2)):
        started = []
        for each in range(2):
            told, out = tmp_path / f"{batch}-{each}.told", tmp_path / f"{batch}-{each}.ledger"
            command = [sys.executable, "-m", "accumviz", "run", "--out", str(out), "train.py", str(told)]
            process = subprocess.Popen(
                command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
            )
            started.append((told, out, process))
        for told, out, process in started:
            while not told.exists() or not told.read_text():
                assert process.poll() is None
                time.sleep(0.01)
            readings, late = [], 0.0
            until = time.time() + rng.random() * 3
            while time.time() < until:
                readings.append(told.read_text().split())
                asleep = time.time()
                time.sleep(0.02)
                late += time.time() - asleep - 0.02
            process.kill()
            killed = time.time()
            process.wait()
            ledger = av.load(out)
            assert not ledger.complete
            assert check(ledger).verdict == "no verdict"
            # As long as this process was kept from waking, that one may have been kept from writing.
            due = max((int(steps) for when, steps in readings if float(when) < killed - 1 - late), default=0)
            lost.append(due - len(ledger.of("step")))
    assert max(lost) <= 0, lost


# --- torchrun -------------------------------------------------------------------------------------------------

RANKS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for micro in range(2):
        loss = model(torch.randn(4, 2)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@POSIX
@pytest.mark.parametrize("how", [["--no-python", sys.executable, "-m", "accumviz"], ["-m", "accumviz"]])
def test_under_torchrun_each_rank_has_its_file_and_check_judges_them_as_one(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(LIGHT + RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *how, "run", "--check", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = [tmp_path / f"train.rank{rank}.ledger" for rank in (0, 1)]
    assert [av.load(file).meta["rank"] for file in files] == [0, 1]
    assert done.stderr.count("Report: ") == 1, "what the ranks have in common is said once"
    assert "accumviz: rank 1: loss-not-divided\n" in done.stderr
    assert "all ranks are judged together by: accumviz check train.rank*.ledger\n" in done.stderr
    code, out, err = said(capsys, "check", "--json", *files)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(f["rule"], f["times"]) for f in report["findings"]] == [("loss-not-divided", 6)]
    assert report["counts"]["backwards"] == 12


# --- TensorBoard ----------------------------------------------------------------------------------------------


def test_without_tensorboard_the_error_names_what_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.ledger"
    by_hand().save(file)
    code, _, err = said(capsys, "export", file, "--to", "tensorboard")
    assert code == 2
    assert "--out" in err
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    code, _, err = said(capsys, "export", file, "--to", "tensorboard", "--out", tmp_path / "runs")
    assert code == 2
    assert err == "accumviz: export --to tensorboard needs tensorboard: pip install tensorboard\n"
    assert not (tmp_path / "runs").exists()


def test_tensorboard_reads_the_scalars_of_each_step(tmp_path: Path) -> None:
    # With what it needs it is 60 MB, and frameworks under test would write to it: no part of what tests install.
    read_by = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    by_hand().save(tmp_path / "x.ledger")
    main(["export", str(tmp_path / "x.ledger"), "--to", "tensorboard", "--out", str(tmp_path / "runs")])
    read = read_by.EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    told = {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert told.pop("learning rate/o") == [(n, pytest.approx(0.1)) for n in range(3)]
    assert told == {
        "gradient norm/o": [(n, 2.0) for n in range(3)],
        "gradient norm of o/w": [(n, 2.0) for n in range(3)],
        "sum of shares/loss": [(n, 1.0) for n in range(3)],
    }
    assert all(math.isfinite(value) for rows in told.values() for _, value in rows)
