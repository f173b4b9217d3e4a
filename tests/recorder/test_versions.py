"""The lower bounds that are declared: what is below them is refused, and what is not is recorded."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import accumviz as av
from accumviz import needs

ROOT = Path(__file__).resolve().parents[2]
LOWEST = ".".join(map(str, needs.TORCH))


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


def test_the_bound_that_record_checks_is_declared_and_installed_by_ci() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert project["dependencies"] == ["numpy>=1.26"], "a guest brings no torch"
    assert extras["torch"] == [f"torch>={LOWEST}.dev0"]
    declared = [line for lines in (project["dependencies"], *extras.values()) for line in lines]
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "book.yml").read_text())["jobs"]["oldest"]
    said = " ".join(step.get("run", "") for step in job["steps"])
    assert f"torch=={LOWEST}.*" in said
    for package in ("matplotlib", "numpy", "anywidget", "cloudpickle"):
        [bound] = [line.removeprefix(f"{package}>=") for line in declared if line.startswith(f"{package}>=")]
        assert f"{package}=={bound}.*" in said
