"""The lower bounds that are declared: what is below them is refused, and what is not is recorded."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import accumviz as av
from accumviz.recorder import record

ROOT = Path(__file__).resolve().parents[2]
LOWEST = ".".join(map(str, record.NEEDED))


def test_below_its_bound_record_says_which_torch_it_needs_and_what_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(1, requires_grad=True)
    for old in ("2.9.1+cu128", "2.4.0", "1.13.1"):
        monkeypatch.setattr(torch, "__version__", old)
        with pytest.raises(ImportError, match=rf"needs torch {LOWEST} or newer.*{re.escape(old)}.*undivided.*pip"):
            av.record(weight)
    for new in (LOWEST + ".0", "2.15.0a0+git1234", "3.0", "2.100.1"):
        monkeypatch.setattr(torch, "__version__", new)
        av.record(weight)


def test_a_torch_that_is_too_old_can_still_load_a_ledger_and_show_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weight = torch.ones(1, requires_grad=True)
    with av.record(weight) as recording:
        weight.sum().backward()
    recording.ledger.save(tmp_path / "run.ledger")
    monkeypatch.setattr(torch, "__version__", "2.4.0")
    assert "run" not in repr(av.load(tmp_path / "run.ledger"))
    av.play(av.load(tmp_path / "run.ledger"))


def test_the_bound_that_record_checks_is_the_one_that_is_declared_and_that_ci_installs() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={LOWEST}" in declared
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "book.yml").read_text())["jobs"]["oldest"]
    said = " ".join(step.get("run", "") for step in job["steps"])
    assert f"torch=={LOWEST}.*" in said
    for package in ("matplotlib", "numpy", "anywidget", "cloudpickle", "tqdm"):
        [bound] = [line.removeprefix(f"{package}>=") for line in declared if line.startswith(f"{package}>=")]
        assert f"{package}=={bound}.*" in said


def test_a_loss_divided_by_k_is_recorded_with_its_scale_and_a_checkpoint_with_its_bytes() -> None:
    weight = torch.ones(256, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with av.record(weight, optimizer, memory=True) as recording:
        for _ in range(2):
            hidden = torch.utils.checkpoint.checkpoint(torch.tanh, weight * 2, use_reentrant=False)
            (hidden.mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1e-3)
        optimizer.step()
    assert [event.kind for event in recording.ledger] == ["backward", "backward", "clip", "step"]
    assert [event.scale for event in recording.ledger][:2] == [0.5, 0.5]
    assert recording.ledger[0].saved_before is not None
    assert recording.ledger[0].saved_before >= 256 * 4
