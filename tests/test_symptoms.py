"""The page of symptoms: each message is quoted as PyTorch says it, and each rule that it names exists."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch

from accumviz.checks.check import RULES
from tests.conftest import ROOT

PAGE = (ROOT / "symptoms.md").read_text("utf-8")
QUOTED = re.findall(r"^\* - `+((?:\w+Error|UserWarning): .+?) ?`+$", PAGE, re.MULTILINE)


def once(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    weight = torch.ones(2, requires_grad=True, dtype=dtype)
    return weight, torch.optim.SGD([weight], 1.0)


def a_second_time() -> None:
    loss = once()[0].square().sum()
    loss.backward()
    loss.backward()


def changed_in_place() -> None:
    weight, optimizer = once()
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def a_leaf_in_place() -> None:
    weight, _ = once()
    weight += 1


def no_leaf() -> None:
    doubled = once()[0] * 2
    doubled.sum().backward()
    assert doubled.grad is None


def scaled(dtype: torch.dtype = torch.float32) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    weight, optimizer = once(dtype=dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.square().sum()).backward()
    return scaler, optimizer


def unscaled_twice() -> None:
    scaler, optimizer = scaled()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def nothing_to_check() -> None:
    scaler, optimizer = scaled()
    optimizer.zero_grad()
    scaler.step(optimizer)


def sixteen_bits() -> None:
    scaler, optimizer = scaled(torch.float16)
    scaler.unscale_(optimizer)


def schedule_first() -> None:
    _, optimizer = once()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.step()
    optimizer.step()


FAULTS: tuple[Callable[[], object], ...] = (
    a_second_time,
    lambda: torch.ones(()).backward(),
    changed_in_place,
    a_leaf_in_place,
    lambda: once()[0].square().backward(),
    no_leaf,
    lambda: torch.optim.SGD([once()[0] * 2], 1.0),
    unscaled_twice,
    nothing_to_check,
    sixteen_bits,
    schedule_first,
)
# Only several processes raise it, or a GPU.
ELSEWHERE = re.compile("finished reduction|ready only once|CUDAGraphs")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_is_quoted_as_it_is_said(fault: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            fault()
            said = [f"{warning.category.__name__}: {warning.message}" for warning in warned]
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"]
    assert [quote for quote in QUOTED if any(quote in one for one in said)], said


def test_every_quoted_message_has_its_fault() -> None:
    assert len([quote for quote in QUOTED if not ELSEWHERE.search(quote)]) == len(FAULTS)


def test_a_symptom_names_rules_that_exist() -> None:
    assert {*re.findall(r"`check`: \*([\w-]+)\*", PAGE)} <= {rule.name for rule in RULES}
