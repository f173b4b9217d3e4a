"""Tails and undivided losses of several processes: what is advised mends the loop, and what would not is not advised.

Loops as text, on real processes; what mends one is seen by the weights, which are those of the large batch.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import accumviz as av
from accumviz.checks.report import Finding
from accumviz.ledger.ledger import CONTRIBUTED, Ledger
from tests.test_cures import applied, changed

# Windows of two, and one that is left over.
MANY, RATE = 5, 0.1
DATA = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=False))


def parts(ranks: int, many: int = MANY) -> list[list[torch.Tensor]]:
    """The micro-batches of each rank."""
    return [list(own.chunk(many)) for own in DATA[: 6 * many * ranks].chunk(ranks)]


def large_batch(ranks: int, windows: list[list[int]], many: int = MANY) -> np.ndarray:
    """The weights after so many steps of one process, each on all ranks' micro-batches of a window."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for window in windows:
        batch = torch.cat([own[i] for own in parts(ranks, many) for i in window])
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def flat(model: torch.nn.Module) -> np.ndarray:
    found = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone().numpy().ravel() for p in model.parameters()]
    return np.concatenate(found)


def wrapped(kind: str) -> Any:
    model: Any = make()
    if kind == "plain":
        return model
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP1":
        warnings.simplefilter("ignore")  # deprecated
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    shape = (2, 2) if kind == "HSDP" else (dist.get_world_size(),)
    return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :]))


class Played(NamedTuple):
    """What a loop left on one rank."""

    ledger: Ledger
    weights: np.ndarray


def play(kind: str, path: Path, many: int) -> Played:
    names: dict[str, Any] = {"__name__": "loop"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with av.record(model, optimizer) as recording:
        names["loop"](model, optimizer, parts(dist.get_world_size(), many)[dist.get_rank()])
    with FullyShardedDataParallel.summon_full_params(model) if kind == "FSDP1" else warnings.catch_warnings():
        return Played(recording.ledger, flat(model))


def play_all(loops: list[tuple[str, Path]], many: int) -> list[Played]:
    return [play(kind, path, many) for kind, path in loops]


class Processes:
    """Plays texts as the loops of so many processes."""

    def __init__(self, ranks: int, folder: Path, many: int = MANY) -> None:
        self.ranks, self.folder, self.many = ranks, folder, many

    def __call__(self, loops: list[tuple[str, str]]) -> list[list[Played]]:
        """For each loop, a kind of model and a text, what it left on each rank."""
        paths = []
        for kind, text in loops:
            path = self.folder / f"loop_{len(list(self.folder.iterdir()))}.py"
            path.write_text(text)
            paths.append((kind, path))
        found = av.distribute(play_all, ranks=self.ranks, loops=paths, many=self.many).returned
        return [list(each) for each in zip(*found, strict=True)]


def one(played: list[Played]) -> Finding:
    """The one finding, which every rank's ledger has, and all of them in one."""
    reports = [av.check(each.ledger) for each in played] + [av.check(Ledger.merge([each.ledger for each in played]))]
    found = [[f for f in report.findings if f.severity != "note"] for report in reports]
    assert all(len(each) == 1 for each in found), reports
    told = {(f.rule, f.line, re.sub(r"loop_\d+", "loop", f.cure)) for (f,) in found}
    assert len(told) == 1, told
    return found[0][0]


def healthy(played: list[Played], weights: np.ndarray) -> None:
    for each in played:
        report = av.check(each.ledger)
        assert report.healthy and not any(f.severity != "note" for f in report.findings), report
        # float32, a few additions in another order
        np.testing.assert_allclose(each.weights, weights, rtol=1e-4, atol=1e-6)


TAIL = """
import contextlib

def loop(model, optimizer, parts):
    for epoch in range(2):
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            last = i % 2 == 1
            with contextlib.nullcontext():
                (model(part).square().mean() / 2).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        # after
"""
CARRIED = {"range(2):\n        optimizer.zero_grad()\n": "range(2):\n"}
QUIET = {
    "DDP": {"nullcontext():": "nullcontext() if last else model.no_sync():"},
    "FSDP1": {"nullcontext():": "nullcontext() if last else model.no_sync():"},
    "FSDP2": {"            with": "            model.set_requires_gradient_sync(last)\n            with"},
    "HSDP": {"            with": "            model.set_requires_all_reduce(last)\n            with"},
}
WHOLE = [[0, 1], [2, 3], [4]] * 2
FLUSH = """
if True:
    for p in [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]:
        p.grad *= 2
    optimizer.step()
    optimizer.zero_grad()
"""


def after(text: str, rows: str, by: dict[str, str] | None = None) -> str:
    return changed(text, {"# after": textwrap.indent(textwrap.dedent(rows).strip(), " " * 8).strip()} | (by or {}))


def flushed(text: str, finding: Finding) -> str:
    """The text with what is advised for after the loop, there."""
    new = [row[1:] for row in finding.cure.splitlines() if row.startswith("+") and not row.startswith("+++")]
    return after(text, "\n".join(new)).replace("micro_batches_left", "1")


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(1, ["DDP quiet", "DDP"]), (2, ["DDP", "FSDP1", "FSDP2"]), (4, ["HSDP"])],
    ids=["1 rank", "2 ranks", "4 ranks"],
)
def test_the_step_that_is_advised_for_a_tail_makes_a_whole_window_of_it(
    ranks: int, kinds: list[str], tmp_path: Path
) -> None:
    processes = Processes(ranks, tmp_path)
    loops, rules = [], []
    for kind in kinds:
        name, _, quiet = kind.partition(" ")
        text = changed(TAIL, QUIET[name]) if quiet else TAIL
        loops += [(name, text), (name, changed(text, CARRIED))]
        rules += ["tail-dropped", "leftover-carried"]
    findings = [one(played) for played in processes(loops)]
    assert [finding.rule for finding in findings] == rules
    mended = [(name, flushed(text, finding)) for (name, text), finding in zip(loops, findings, strict=True)]
    for played in processes(mended):
        healthy(played, large_batch(ranks, WHOLE))


@pytest.mark.parametrize(
    ("ranks", "kinds"), [(2, ["DDP", "FSDP1", "FSDP2"]), (4, ["HSDP"])], ids=["2 ranks", "4 ranks"]
)
def test_no_step_is_advised_for_a_tail_that_waits_for_its_average_and_none_would_mend_it(
    ranks: int, kinds: list[str], tmp_path: Path
) -> None:
    carried = {kind: changed(TAIL, CARRIED | QUIET[kind]) for kind in kinds}
    dropped = {kind: changed(TAIL, QUIET[kind]) for kind in kinds}
    # FSDP1 raises: the whole gradient has not the size of the shard.
    stepped = {kind: after(text, FLUSH) for kind, text in carried.items() if kind != "FSDP1"}
    mends = {"last = i % 2 == 1": "last = i % 2 == 1 or i == len(parts) - 1", "/ 2)": "/ (1 if i == 4 else 2))"}
    mended = {kind: changed(text, mends) for kind, text in carried.items()}
    texts = [carried, dropped, stepped, mended]
    left = iter(Processes(ranks, tmp_path)([loop for each in texts for loop in each.items()]))
    tail, lost, tried, cured = ({kind: next(left) for kind in each} for each in texts)
    for kind in kinds:
        finding = one(tail[kind])
        assert (finding.rule, finding.cure) == ("leftover-carried", "")
        assert "the last micro-batch of an epoch has to synchronise" in finding.cause
        healthy(cured[kind], large_batch(ranks, WHOLE))
    for kind, played in lost.items():
        finding = one(played)
        # What FSDP2 keeps elsewhere is not zeroed, either.
        expected = {"FSDP2": "fsdp2-zero-keeps-unsharded", "HSDP": "leftover-carried"}
        assert (finding.rule, finding.cure) == (expected.get(kind, "tail-dropped"), "")
    for kind, played in tried.items():
        for before, now in zip(tail[kind], played, strict=True):
            same = np.array_equal(before.weights, now.weights)
            assert same == (kind != "DDP"), "what waits with FSDP is in no `.grad`"
            assert not np.allclose(now.weights, large_batch(ranks, WHOLE), rtol=1e-4, atol=1e-6)


def test_what_waits_in_a_group_of_ranks_has_come_to_no_gradient_also_where_that_is_there_and_zero(
    tmp_path: Path,
) -> None:
    text = changed(TAIL, QUIET["HSDP"] | {"zero_grad()": "zero_grad(set_to_none=False)"})
    (played,) = Processes(4, tmp_path)([("HSDP", text)])
    for each in played:
        scatters = [event.index for event in each.ledger.of("sync") if event.details["op"] == "reduce-scatter"]
        brings = (each.ledger.state[scatters] & CONTRIBUTED).any(axis=1)
        assert brings.tolist() == [False, True, False, True, False, False, True, False, True, False]


def test_a_step_on_what_waits_in_each_group_of_ranks_is_found(tmp_path: Path) -> None:
    whole = {"(parts)": "(parts[:4])"}
    early = {"            with": "            model.set_requires_all_reduce(not last)\n            with"}
    never = {"            with": "            model.set_requires_all_reduce(False)\n            with"}
    texts = [changed(TAIL, whole | switch) for switch in (early, never, QUIET["HSDP"])]
    *wrong, right = Processes(4, tmp_path)([("HSDP", text) for text in texts])
    for played, end in zip(wrong, ("it enters a later window.", "no step reads it."), strict=True):
        finding = one(played)
        assert (finding.rule, finding.times) == ("fsdp2-zero-keeps-unsharded", 4)
        assert finding.cause.endswith(end)
    assert np.array_equal(wrong[1][0].weights, flat(make()))
    healthy(right, large_batch(4, [[0, 1], [2, 3]] * 2))


def test_a_step_that_ran_before_what_waits_is_synchronised_has_read_nothing(tmp_path: Path) -> None:
    text = after(changed(TAIL, CARRIED | QUIET["FSDP2"] | {"range(2)": "range(1)"}), "optimizer.step()")
    (played,) = Processes(2, tmp_path)([("FSDP2", text)])
    for each in played:
        assert [len(window.backwards) for window in each.ledger.windows()] == [2, 2, 0]
        assert {row.step for row in each.ledger.shares()} == {window.step for window in each.ledger.windows()[:2]}


SHARED = """
import torch.distributed as dist

def loop(model, optimizer, parts):
    for i, part in enumerate(parts):
        (model(part).square().mean() / (3 * dist.get_world_size())).backward()
        if i % 3 == 2:
            # average
            optimizer.step()
            optimizer.zero_grad()
"""
MEAN = {"# average": "for p in model.parameters():\n                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)"}
DIVIDED_BY_ONE = "    model.set_gradient_divide_factor(1.0)\n    model.set_force_sum_reduction_for_comms(True)\n"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loss_that_is_divided_by_the_number_of_ranks_twice_is_found_whatever_averages_over_them(
    ranks: int, tmp_path: Path
) -> None:
    kinds = {"DDP": SHARED, "FSDP1": SHARED, "FSDP2": SHARED, "plain": changed(SHARED, MEAN)}
    kinds |= {"HSDP": SHARED} if ranks == 4 else {}
    wrong = list(kinds.items())
    right = [(kind, changed(text, {"(3 * dist.get_world_size())": "3"})) for kind, text in wrong]
    by_one = {"    for i,": DIVIDED_BY_ONE + "    for i,"}
    right.append(("FSDP2", changed(SHARED, by_one)))
    summed = "FSDP2", changed(dict(right)["DDP"], by_one)
    *found, last = Processes(ranks, tmp_path, many=6)([*wrong, *right, summed])
    for played in found[: len(wrong)]:
        (finding,) = av.check(Ledger.merge([each.ledger for each in played])).findings
        assert (finding.rule, finding.severity) == ("wrong-divisor", "note" if ranks == 2 else "warning")
        assert finding.evidence["sum of shares of all ranks"] == 1 / ranks
    for played in found[len(wrong) :]:
        healthy(played, large_batch(ranks, [[0, 1, 2], [3, 4, 5]], many=6))
        assert av.check(Ledger.merge([each.ledger for each in played])).findings == ()
    finding = one(last)
    assert (finding.rule, finding.evidence["sum of shares"]) == ("loss-not-divided", pytest.approx(ranks))


HOOKED = """
import torch.distributed as dist

def hook(_, whole, shard):
    dist.reduce_scatter_tensor(shard, whole)

def loop(model, optimizer, parts):
    model.register_comm_hook(None, hook)
    for part in parts:
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_a_hook_of_ones_own_makes_of_the_ranks_shards_is_not_guessed(tmp_path: Path) -> None:
    (played,) = Processes(2, tmp_path)([("FSDP1", HOOKED)])
    for each in played:
        assert {row.unknown.partition(";")[0] for row in each.ledger.shares()} == {"a comm hook reduced gradients"}
        assert av.check(each.ledger).verdict == "no verdict"


UNDIVIDED = {
    "in two branches": """
    def loop(model, optimizer, parts):
        for i, part in enumerate(parts):
            if i % 4 != 3:
                with model.no_sync():
                    loss = model(part).square().mean()
                    loss.backward()
            else:
                loss = model(part).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """,
    "one after the other": """
    def loop(model, optimizer, parts):
        for window in (parts[:4], parts[4:]):
            with model.no_sync():
                for part in window[:-1]:
                    loss = model(part).square().mean()
                    loss.backward()
            loss = model(window[-1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_divided_on_no_line_is_divided_on_all_of_its_lines(ranks: int, tmp_path: Path) -> None:
    texts = [textwrap.dedent(text).strip() + "\n" for text in UNDIVIDED.values()]
    processes = Processes(ranks, tmp_path, many=8)
    findings = [one(played) for played in processes([("DDP", text) for text in texts])]
    for finding in findings:
        assert finding.rule == "loss-not-divided"
        assert finding.evidence["micro-batches"] == 4 and finding.evidence["sum of shares"] == 4
        assert finding.cure.count("+") - 3 == finding.cure.count("(loss / 4).backward()") + 2 == 4, finding.cure
    mended = [("DDP", applied(finding.cure, text)) for finding, text in zip(findings, texts, strict=True)]
    for played in processes(mended):
        healthy(played, large_batch(ranks, [[0, 1, 2, 3], [4, 5, 6, 7]], many=8))


def test_two_losses_on_two_lines_are_not_one(tmp_path: Path) -> None:
    text = """
    def loop(model, optimizer, parts):
        for window in (parts[:4], parts[4:]):
            with model.no_sync():
                for part in window[:3]:
                    loss = model(part).square().mean()
                    loss.backward()
            penalty = model(window[-1]).abs().mean()
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    (played,) = Processes(2, tmp_path, many=8)([("DDP", textwrap.dedent(text))])
    finding = one(played)
    assert (finding.rule, finding.evidence["micro-batches"]) == ("loss-not-divided", 3)


def test_one_rank_that_does_not_synchronise_lacks_nothing(tmp_path: Path) -> None:
    text = changed(
        TAIL, QUIET["DDP"] | {"nullcontext() if last": "nullcontext() if not last", "(parts)": "(parts[:4])"}
    )
    (played,) = Processes(1, tmp_path)([("DDP", text)])
    healthy(played, large_batch(1, WHOLE[:2] * 2))
