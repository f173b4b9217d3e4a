"""The losses under a root: their reductions, elements and factors are those that plain arithmetic gives."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel.distributed import _DDPSink

import accumviz as av
from tests.recorder.loops import Doubled

ROWS, CLASSES, IGNORED, K = 12, 5, 3, 4
VALID = ROWS - IGNORED
REPLICA = SimpleNamespace(_ddp_sink_clone=True, static_graph=False, reducer=None)


class Batch:
    """Scores that depend on one layer, targets of which some are ignored, and what losses need beside them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(8, CLASSES)
        self.x = torch.randn(ROWS, 8)
        self.scores = self.layer(self.x)
        self.y = torch.randint(0, CLASSES, (ROWS,))
        self.ignoring = self.y.clone()
        self.ignoring[:IGNORED] = -100
        self.zeros = torch.zeros(ROWS, CLASSES)
        self.mask = self.ignoring >= 0
        self.weight = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5])
        self.probabilities = torch.softmax(torch.randn(ROWS, CLASSES), 1)


Expected = list[tuple[str, float | None, float]]
ALL = ROWS * CLASSES


def weighed(b: Batch) -> float:
    return sum(b.weight[int(c)].item() for c in b.ignoring if c >= 0)


# A loss, and each term's reduction, elements and factor, worked out by hand.
FORMS: dict[str, tuple[Callable[[Batch], torch.Tensor], Expected | Callable[[Batch], Expected]]] = {
    "cross entropy / K": (lambda b: F.cross_entropy(b.scores, b.ignoring) / K, [("mean", VALID, 1 / K)]),
    "two losses": (
        lambda b: F.mse_loss(b.scores, b.zeros) / K + 0.3 * b.scores.square().mean() / K,
        [("mean", ALL, 1 / K), ("mean", ALL, 0.3 / K)],
    ),
    "sum / count": (lambda b: F.cross_entropy(b.scores, b.ignoring, reduction="sum") / 100, [("sum", VALID, 1 / 100)]),
    "a sum in chunks": (
        lambda b: (
            sum(
                F.cross_entropy(b.scores[rows], b.ignoring[rows], reduction="sum") / VALID
                for rows in (slice(5), slice(5, ROWS))
            )
            / K
        ),
        [("sum", VALID, 1 / VALID / K)],
    ),
    "two sums with constants of their own": (
        lambda b: b.scores[0].sum() / 2 + b.scores[1:].sum() / 3,
        [("sum", CLASSES, 1 / 2), ("sum", ALL - CLASSES, 1 / 3)],
    ),
    "the mean of one number that two losses make": (
        lambda b: (b.scores.mean() + b.scores.sum()).mean() / K,
        [("mean", ALL, 1 / K), ("sum", ALL, 1 / K)],
    ),
    "the second output of a model under DDP": (
        lambda b: _DDPSink.apply(lambda: REPLICA, b.scores, F.mse_loss(b.scores, b.zeros))[1] / K,
        [("mean", ALL, 1 / K)],
    ),
    "a masked mean": (
        lambda b: (F.cross_entropy(b.scores, b.ignoring, reduction="none") * b.mask).sum() / b.mask.sum(),
        [("sum", VALID, 1 / VALID)],
    ),
    "a difference": (
        lambda b: F.l1_loss(b.scores, b.zeros) - F.huber_loss(b.scores, b.zeros),
        [("mean", ALL, 1), ("mean", ALL, -1)],
    ),
    "log_softmax, picked": (lambda b: -F.log_softmax(b.scores, 1)[range(ROWS), b.y].mean(), [("mean", ROWS, -1)]),
    "stacked": (
        lambda b: torch.stack([F.mse_loss(b.scores[i], b.zeros[i]) for i in range(3)]).mean(),
        [("mean", CLASSES, 1 / 3)] * 3,
    ),
    "nested sums": (
        lambda b: 2 * (F.mse_loss(b.scores, b.zeros) + (b.scores.sum() * 0.5 - b.scores.mean()) / 8),
        [("mean", ALL, 2), ("sum", ALL, 2 * 0.5 / 8), ("mean", ALL, -2 / 8)],
    ),
    "one less a loss": (lambda b: 1 - b.scores.mean(), [("mean", ALL, -1)]),
    "class weights": (
        lambda b: F.cross_entropy(b.scores, b.ignoring, weight=b.weight),
        lambda b: [("mean", weighed(b), 1)],
    ),
    "label smoothing": (
        lambda b: F.cross_entropy(b.scores, b.y, label_smoothing=0.1) / K,
        [("mean", ROWS, 0.9 / K), ("sum", ALL, 0.1 / CLASSES / ROWS / K)],
    ),
    "probabilities for targets": (
        lambda b: F.cross_entropy(b.scores, b.probabilities) / K,
        [("sum", ROWS, -1 / ROWS / K)],
    ),
    "unreduced and averaged": (
        lambda b: F.cross_entropy(b.scores, b.ignoring, reduction="none").mean(),
        [("mean", ROWS, 1)],
    ),
    "divided before the mean": (lambda b: ((b.scores - 1) ** 2 / K).mean(), [("mean", ALL, 1 / K)]),
    "where": (
        lambda b: torch.where(b.mask, F.cross_entropy(b.scores, b.y, reduction="none"), 0.0).sum() / 50,
        [("sum", VALID, 1 / 50)],
    ),
    "indexed by a mask": (
        lambda b: F.cross_entropy(b.scores, b.y, reduction="none")[b.mask].mean() / K,
        [("mean", VALID, 1 / K)],
    ),
    "a mask of rows": (lambda b: ((b.scores**2) * b.mask[:, None]).sum() / 60, [("sum", VALID * CLASSES, 1 / 60)]),
    "two masks": (
        lambda b: (F.cross_entropy(b.scores, b.ignoring, reduction="none") * (torch.arange(ROWS) < 6)).sum() / 3,
        [("sum", 6 - IGNORED, 1 / 3)],
    ),
    "rows, then all": (
        lambda b: F.cross_entropy(b.scores, b.y, reduction="none").view(3, 4).mean(1).mean() / K,
        [("mean", ROWS, 1 / K)],
    ),
    "per sample, then averaged": (lambda b: (b.scores**2).sum(1).mean() / K, [("mean", ROWS, 1 / K)]),
    "KL, batchmean": (
        lambda b: F.kl_div(F.log_softmax(b.scores, 1), b.probabilities, reduction="batchmean"),
        [("sum", ROWS, 1 / ROWS)],
    ),
    "concatenated": (
        lambda b: torch.cat([b.scores[:2].mean().view(1), b.scores[2:].mean().view(1)]).sum(),
        [("mean", 2 * CLASSES, 1), ("mean", (ROWS - 2) * CLASSES, 1)],
    ),
    "shapes of one element": (
        lambda b: b.scores.mean().view(1, 1).squeeze().unsqueeze(0).clone() / K,
        [("mean", ALL, 1 / K)],
    ),
    "times zero": (lambda b: b.scores.mean() * 0, [("mean", ALL, 0)]),
    "divided by zero": (lambda b: b.scores.mean() / 0, [("mean", ALL, math.inf)]),
}


def recorded(layer: Any, loss: Callable[[], Any], **how: Any) -> list[dict[str, Any]]:
    with av.record(layer) as recording:
        loss().backward(**how)
    terms: list[dict[str, Any]] = recording.ledger.of("backward")[0].details["terms"]
    return terms


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_is_read_as_arithmetic_has_it(form: str) -> None:
    made, expected = FORMS[form]
    batch = Batch()
    terms = recorded(batch.layer, lambda: made(batch))
    assert [term["unknown"] for term in terms] == [""] * len(terms)
    assert [(t["reduction"], t["elements"], t["factor"]) for t in terms] == [
        (reduction, pytest.approx(elements, rel=1e-6), pytest.approx(factor, rel=1e-6))
        for reduction, elements, factor in (expected(batch) if callable(expected) else expected)
    ]


UNKNOWN: dict[str, tuple[Callable[[Batch], Any], str]] = {
    "an operation of the user's": (lambda b: Doubled.apply(b.scores.mean()) / 2, "written in Python"),
    "a root": (lambda b: F.mse_loss(b.scores, b.zeros).sqrt(), "SqrtBackward0"),
    "a product": (lambda b: b.scores.mean() * b.scores.sum(), "product or a quotient"),
    "one of many": (lambda b: b.scores.view(-1)[0], "SelectBackward0"),
    "advantages": (lambda b: (b.scores[:, 0] * torch.randn(ROWS)).sum(), "some are negative"),
    "a mean over the batch, summed": (lambda b: b.scores.square().mean(0).sum() / K, "nested"),
    "a mean over the batch, weighted and summed": (lambda b: (b.scores.mean(0) * b.weight).sum(), "nested"),
    "another loss of torch's": (lambda b: F.multi_margin_loss(b.scores, b.y), "MultiMarginLoss"),
    "weights of rows and of columns": (lambda b: (b.scores[:CLASSES] * b.weight[:, None] * b.weight).sum(), "nested"),
    "weights of columns, then of their sums": (
        lambda b: ((b.scores[:CLASSES] * b.weight).sum(1) * b.weight).sum(),
        "nested",
    ),
    "probabilities of masked rows": (
        lambda b: -((b.probabilities * F.log_softmax(b.scores, 1)).sum(-1) * b.mask).sum() / VALID,
        "nested",
    ),
    "a mask in each summand": (lambda b: (0.5 * b.scores.sum(1) * b.mask + b.scores.mean(1)).sum(), "nested"),
    "a parameter": (lambda b: b.layer.bias, "a parameter itself"),
}


@pytest.mark.parametrize("form", UNKNOWN)
def test_what_cannot_be_read_says_why(form: str) -> None:
    made, why = UNKNOWN[form]
    batch = Batch()
    leaf = nn.Parameter(torch.ones(()))
    batch.layer.register_parameter("leaf", leaf)
    loss = leaf if form == "a parameter" else made(batch)
    (term,) = recorded(batch.layer, lambda: loss)
    assert why in term["unknown"]
    assert term["elements"] is None


def test_a_sum_of_more_losses_than_are_read_says_that_there_are_more() -> None:
    batch = Batch()
    terms = recorded(batch.layer, lambda: sum(batch.scores[i % ROWS].mean() for i in range(300)))
    assert len(terms) == 65
    assert {(t["reduction"], t["elements"], t["unknown"]) for t in terms[:-1]} == {("mean", CLASSES, "")}
    assert "more than 64" in terms[-1]["unknown"]


def test_of_a_factor_that_is_a_product_each_constant_is_told() -> None:
    batch = Batch()
    both = recorded(
        batch.layer,
        lambda: (0.3 * batch.scores.mean() + F.cross_entropy(batch.scores, batch.y)) / K - batch.scores.sum(),
    )
    assert [term.get("constants") for term in both] == [[1 / K, 0.3], None, None]
    assert "constants" not in both[1] and "constants" not in both[2]  # one, or none: the factor says it


def test_what_stands_inside_a_mean_is_told_apart() -> None:
    batch = Batch()
    terms = recorded(
        batch.layer,
        lambda: (
            3 * (0.5 * batch.scores.square()).mean()
            + (batch.scores.square().sum(1) / 4).mean()
            - batch.scores.sum() / 2
        ),
    )
    assert [(term["factor"], term.get("own")) for term in terms] == [(1.5, 0.5), (0.25, 0.25), (-0.5, None)]


def test_the_scaler_is_no_factor_of_a_term() -> None:
    batch = Batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with av.record(batch.layer) as recording:
        scaler.scale(F.cross_entropy(batch.layer(batch.x), batch.ignoring) / K).backward()
        (scaler.scale(batch.layer(batch.x).mean()) + 0.5 * scaler.scale(batch.layer(batch.x).sum())).backward()
    first, second = recording.ledger.of("backward")
    assert [(t["factor"], t["elements"]) for t in first.details["terms"]] == [(1 / K, VALID)]
    assert first.details["amp_scale"] == 1024.0
    assert [t["factor"] for t in second.details["terms"]] == [1.0, 0.5]


def test_a_compiled_loss_is_unknown() -> None:
    batch = Batch()

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor) -> torch.Tensor:
        return batch.layer(x).mean()

    (term,) = recorded(batch.layer, lambda: loss(batch.x) / K)
    assert "torch.compile" in term["unknown"]
    assert term["factor"] == 1 / K


@pytest.mark.parametrize(
    "reduced",
    [
        lambda scores: F.mse_loss(scores, torch.zeros_like(scores)),
        lambda scores: scores.masked_fill(scores > 0, 0).sum(),
    ],
    ids=["a loss", "a masked sum"],
)
def test_packed_tensors_are_unknown(reduced: Callable[[torch.Tensor], torch.Tensor]) -> None:
    batch = Batch()
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    def loss() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: kept[number]):
            return reduced(batch.layer(batch.x))

    (term,) = recorded(batch.layer, loss)
    assert term["elements"] is None
    assert "packed" in term["unknown"]


def test_a_constant_that_was_packed_away_may_be_the_scalers() -> None:
    batch = Batch()
    optimizer = torch.optim.SGD(batch.layer.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda kept: kept[0])
    with av.record(batch.layer, optimizer) as recording, hidden:
        scaler.scale(batch.layer(batch.x).mean()).backward()
        scaler.step(optimizer)
    [row] = recording.ledger.shares()
    assert math.isnan(row.share)
    assert "scaler" not in row.unknown
