"""`accumviz run` under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import accumviz as av
from tests.conftest import ROOT
from tests.light import LIGHT
from tests.test_cli import said

POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="a terminal, or a kill, as POSIX has them")


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
def test_under_torchrun_each_rank_has_its_file_and_check_judges_them_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(LIGHT + RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "accumviz", "run", "--check", "train.py"],
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
    assert "Judge all ranks together: accumviz check train.rank*.ledger\n" in done.stderr
    code, out, err = said(capsys, "check", "--format", "json", *files)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(f["rule"], f["times"]) for f in report["findings"]] == [("loss-not-divided", 6)]
    assert report["counts"]["backwards"] == 12
