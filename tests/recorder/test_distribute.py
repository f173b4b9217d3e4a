"""Real processes from a cell: what comes back, and what is said when one raises, hangs or dies."""

import ctypes
import linecache
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import accumviz as av
from accumviz.book.distribute import RankError, World
from accumviz.ledger.ledger import Ledger
from tests.goldens import differences, ledger_of
from tests.light import LIGHT

ROOT = Path(__file__).resolve().parents[2]


def ranks_left() -> list[psutil.Process]:
    """The Python processes below this one, and below the one that forks ranks, which stays."""
    below = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    stays = [p for p in below if any("forkserver" in part or "tracker" in part for part in p.cmdline())]
    # A test's browser is no rank.
    return [p for p in below if "python" in p.name().lower() and (p not in stays or p.parent() != psutil.Process())]


def in_notebook(source: str, name: str, **known: Any) -> Any:
    """Define something as a notebook cell does: in `__main__`, its source known to linecache alone."""
    source = textwrap.dedent(source)
    path = f"<cell {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {"__name__": "__main__", **known}
    exec(compile(source, path, "exec"), namespace)
    return namespace[name]


def train(fail: str = "") -> str:
    w = torch.tensor([1.0], requires_grad=True)
    x = torch.tensor([4.0, 2.0, 1.0])[dist.get_rank() :][:1]
    with av.record(w) as recording:
        loss = (2 * x - w * x).square().mean()
        loss.backward()
        if dist.get_rank() == 1 and fail:
            misbehave(fail)
        if dist.get_rank() == 2:  # holds the interpreter's lock, so that it does not listen
            ctypes.PyDLL(None).sleep(200)
        if fail:
            dist.all_reduce(w.grad)
    return repr([*recording.ledger])


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("rank one has had enough")
    if how == "die":
        os.kill(os.getpid(), 9)
    while how == "hang":
        time.sleep(0.01)


@pytest.fixture(scope="module")
def world() -> World:
    return av.distribute(train, ranks=2)


def test_each_rank_returns_its_value_and_its_ledger_and_the_merged_one_has_a_row_for_each(world: World) -> None:
    assert [ledger.values("w").ravel().tolist() for ledger in world.ledgers if ledger] == [[-32.0], [-8.0]]
    assert [repr([*ledger]) for ledger in world.ledgers if ledger] == list(world.returned)
    assert [ledger.meta["rank"] for ledger in world.ledgers if ledger] == [0, 1]
    assert [(p.name, p.rank) for p in world.ledger.parameters] == [("rank 0 · w", 0), ("rank 1 · w", 1)]
    assert [(e.kind, e.rank) for e in world.ledger] == [("backward", 0), ("backward", 1)]
    assert world.ledger.values("rank 1 · w").ravel()[-1] == -8.0


def test_the_ranks_have_one_thread_torchruns_variables_and_those_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> tuple[int, list[str]]:
        names = ("ACCUMVIZ_TEST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return torch.get_num_threads(), [os.environ[name] for name in names]

    for value in ("one", "two"):
        monkeypatch.setenv("ACCUMVIZ_TEST", value)
        seen = av.distribute(look, ranks=2).returned
        assert seen == tuple((1, [value, rank, rank, "2", "2"]) for rank in "01")


def test_a_function_of_a_notebook_takes_its_imports_helpers_classes_and_values_along() -> None:
    work = in_notebook(
        """
        import torch
        import torch.distributed as dist
        import accumviz as av
        from dataclasses import dataclass

        @dataclass
        class Options:
            scale: float = 2.0

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(1))
            @property
            def twice(self):
                return 2 * self.w
            def forward(self, x):
                return helper(self.twice, x / 2)

        helper = lambda a, b: a * b * options.scale
        options = Options(scale=5.0)
        x = torch.tensor([4.0])

        def work(power=1):
            net = Net()
            with av.record(net) as recording:
                loss = net(x) ** power
                loss.backward()
            return loss.item(), repr(options)
        """,
        "work",
    )
    world = av.distribute(work, ranks=2, power=2)
    assert world.returned == (((2 * 2 * 5) ** 2, "Options(scale=5.0)"),) * 2
    event = world.ledger[0]
    assert event.source == "loss.backward()"
    assert event.label == "loss"
    assert "net = Net()" in world.ledger.sources[event.file]


def test_what_cannot_be_copied_is_refused_with_the_remedy() -> None:
    lock = threading.Lock()  # a thing that no other process can have

    def work() -> Any:
        return lock

    with pytest.raises(TypeError, match=r"cannot send 'work'.*make the rest inside the function"):
        av.distribute(work)


def test_a_value_that_cannot_come_back_is_that_ranks_error() -> None:
    def work() -> Any:
        return threading.Lock() if dist.get_rank() == 1 else 1

    with pytest.raises(RankError, match=r"rank 1 raised"):
        av.distribute(work, ranks=2)


@pytest.mark.parametrize("how", ["raise", "die", "hang"])
def test_a_rank_that_raises_dies_or_hangs_is_named_and_the_others_are_kept(how: str) -> None:
    # Ranks that others on the machine slow down must not be out of time before they do what they are here for.
    timeout = 12 if how == "hang" else 100
    start = time.perf_counter()
    with pytest.raises(RankError) as caught:
        av.distribute(train, ranks=2 + (how == "hang"), timeout=timeout, fail=how)
    # Waking up the launcher may come on top. Who waited for the rank that is gone would have waited for 100.
    assert time.perf_counter() - start < 90
    error, ledgers = caught.value, caught.value.world.ledgers
    assert {
        "raise": "rank 1 raised ValueError: rank one has had enough",
        "die": "rank 1 died, killed by SIGKILL",
        "hang": "rank 1 had not ended",
    }[how] in str(error)
    assert ("in misbehave" in str(error) and Path(__file__).name in str(error)) == (how != "die")
    assert how == "hang" or error.rank == 1
    assert "The ledgers of these ranks are kept" in str(error)
    assert ledgers[0] is not None
    assert ledgers[0].values("w").ravel()[0] == -32.0
    if how == "raise":
        assert ledgers[1] is not None
        assert ledgers[1].values("w").ravel()[0] == -8.0
    assert ranks_left() == []
    assert av.distribute(dist.get_world_size, ranks=2).returned == (2, 2)
    assert ranks_left() == []


def test_the_ranks_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        LIGHT
        + textwrap.dedent(
            f"""
            import pathlib, time
            import accumviz as av
            def work():
                import os
                pathlib.Path({str(tmp_path)!r}, f"pid{{os.environ['RANK']}}").write_text(str(os.getpid()))
                time.sleep(600)
            av.distribute(work, ranks=2)
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], cwd=ROOT) as process:
        pids = [tmp_path / "pid0", tmp_path / "pid1"]
        wait_for(lambda: all(path.exists() and path.read_text() for path in pids), 200)
        process.kill()
    wait_for(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids), 60)


def wait_for(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import accumviz as av

def loop(path=None):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(8.0).reshape(4, 2)[dist.get_rank() :: 2]
    with av.record(model, optimizer, path=path) as recording:
        for _ in range(2):
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    loop(sys.argv[1])
    dist.destroy_process_group()
"""


def test_torchrun_gives_the_same_ledger_as_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LIGHT + SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "script.py", "run.ledger"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("run.rank*.ledger"))
    assert [path.name for path in files] == ["run.rank0.ledger", "run.rank1.ledger"]
    launched = Ledger.merge(files)
    here = av.distribute(
        in_notebook("\n" * LIGHT.count("\n") + SCRIPT.replace('"__main__"', "''"), "loop"), ranks=2
    ).ledger
    apart = {where for where, _ in differences(ledger_of(launched), ledger_of(here))}
    assert apart == {" sources", " events file", " events frames"}
