"""The lower bounds that are declared are tested by CI, and what an old torch does not say is unknown."""

import contextlib
import math
import re
import tomllib
from typing import Any

import torch
import yaml
from torch import nn
from torch._C._autograd import SavedTensor

import accumviz as av
from tests.conftest import ROOT

# Nothing makes a newer torch hide what graphs saved, so the torch that runs these tests decides what must hold.
SAYS_WHAT_GRAPHS_SAVED = hasattr(SavedTensor, "data")


def trained(recorded: bool) -> tuple[Any, nn.Linear, int]:
    """Train with hooks on what graphs save; return the recording, the model, and how many tensors were unpacked."""
    unpacked: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = av.record(model, optimizer, memory=True, graphs=True) if recorded else None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack), recording or contextlib.nullcontext():
        for _ in range(2):
            loss = model(torch.randn(4, 3)).square().mean() / 2
            if recorded:
                av.trace(loss, values=True)
            loss.backward()
        optimizer.step()
    return recording, model, len(unpacked)


def test_what_torch_does_not_say_of_a_graph_is_unknown_and_nothing_is_unpacked() -> None:
    recording, model, unpacked = trained(True)
    _, alone, unpacked_alone = trained(False)
    assert unpacked == unpacked_alone > 0
    for parameter, same in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter, same)
    ledger, report = recording.ledger, av.check(recording)
    notes = ledger.meta.get("notes", [])
    said = f"torch {torch.__version__} does not say what a graph saved"
    shares = [(row.share, row.unknown) for row in ledger.shares()]
    bytes_saved = [event.saved_before for event in ledger.of("backward")]
    bytes_saved += [graph.saved_bytes for graph in recording.graphs.values()]
    if SAYS_WHAT_GRAPHS_SAVED:
        assert shares == [(0.5, "")] * 2
        assert (report.healthy, notes) == (True, [])
        assert min(bytes_saved) > 0
    else:
        assert [math.isnan(share) and why for share, why in shares] == [said] * 2
        assert notes == [f"{said}: factors of losses and saved bytes are unknown; from 2.10 on they are read"]
        assert repr(report).startswith("Report: no verdict")
        assert said in report.unjudged["loss-not-divided"]
        assert all(math.isnan(count) for count in bytes_saved)
        assert "saves unknown;" in repr(recording.graphs[0])


def test_ci_installs_the_lower_bounds_that_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert project["dependencies"] == ["numpy>=1.26"], "a guest brings no torch"
    declared = [line for lines in (project["dependencies"], *extras.values()) for line in lines]
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "book.yml").read_text())["jobs"]["oldest"]
    installed = " ".join(step.get("run", "") for step in job["steps"])
    for package in ("torch", "matplotlib", "numpy", "anywidget", "cloudpickle"):
        [bound] = [found[1] for line in declared if (found := re.match(rf"{package}>=([\d.]*\d)", line))]
        assert f"{package}=={bound}.*" in installed
