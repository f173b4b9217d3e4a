"""The judge on real loops, written in the manner of real projects: the healthy ones, and each with one mistake."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accumviz as av
from accumviz.recorder.recording import Recording

K = 4


def batches(mistake: str, *, amp: bool = False, set_to_none: bool = True) -> Recording:
    """Two epochs of 22 batches in windows of four: loader, scaler, clip, scheduler, everything in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    data = torch.utils.data.TensorDataset(torch.randn(44, 16), torch.randint(0, 5, (44,)))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=256.0)
    with av.record(model, optimizer) as recording:
        for _ in range(2):
            if mistake == "tail-dropped":
                optimizer.zero_grad()
            for i, (x, y) in enumerate(loader):
                if mistake == "zero-grad-inside-window":
                    optimizer.zero_grad()
                short = mistake not in ("partial-window-underscaled", "tail-dropped", "leftover-carried")
                size = len(loader) % K if short and i >= len(loader) // K * K else K
                loss = F.cross_entropy(model(x), y)
                if mistake != "loss-not-divided":
                    loss = loss / size
                scaler.scale(loss).backward()
                if mistake == "clip-per-micro-batch":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                if mistake == "scheduler-per-micro-batch":
                    scheduler.step()
                flushed = mistake not in ("tail-dropped", "leftover-carried") and i + 1 == len(loader)
                if (i + 1) % K and not flushed:
                    continue
                if mistake != "clip-scaled-grads":
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                if mistake != "scheduler-per-micro-batch":
                    scheduler.step()
                if mistake != "missing-zero-grad":
                    optimizer.zero_grad(set_to_none=set_to_none)
    return recording


LINES = {
    "zero-grad-inside-window": "optimizer.zero_grad()",
    "missing-zero-grad": "scaler.step(optimizer)",
    "loss-not-divided": "scaler.scale(loss).backward()",
    "partial-window-underscaled": "scaler.scale(loss).backward()",
    "leftover-carried": "scaler.scale(loss).backward()",
    "tail-dropped": "scaler.scale(loss).backward()",
    "clip-per-micro-batch": "nn.utils.clip_grad_norm_(model.parameters(), 0.05)",
    "scheduler-per-micro-batch": "scheduler.step()",
    "clip-scaled-grads": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # the mistake itself
@pytest.mark.parametrize("mistake", LINES)
def test_one_mistake_in_a_loop_is_one_finding_on_its_line(mistake: str) -> None:
    (finding,) = av.check(batches(mistake, amp=mistake == "clip-scaled-grads")).findings
    assert finding.rule == mistake
    assert finding.source == LINES[mistake]


@pytest.mark.parametrize("settings", [{}, {"amp": True}, {"set_to_none": False}], ids=str)
def test_the_same_loop_without_it_is_healthy(settings: dict[str, bool]) -> None:
    report = av.check(batches("", **settings))
    assert report.findings == () and report.healthy, report


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_three_mistakes_are_three_findings_and_a_small_last_batch_is_none() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    data = torch.utils.data.TensorDataset(torch.randn(26, 16), torch.randint(0, 5, (26,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # six of four, and one of two
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            for i, (x, y) in enumerate(loader):
                F.cross_entropy(model(x), y).backward()
                scheduler.step()
                if (i + 1) % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    report = av.check(recording)
    assert [finding.rule for finding in report.findings if finding.severity != "note"] == [
        "leftover-carried",
        "scheduler-per-micro-batch",
        "loss-not-divided",
    ]


def gan(*, zeroed: bool, joint: bool = False) -> Recording:
    generator, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    of_g, of_d = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
    bce = F.binary_cross_entropy_with_logits
    with av.record(generator=generator, judge=judge, of_g=of_g, of_d=of_d) as recording:
        for _ in range(5):
            if zeroed:
                judge.zero_grad()
            fake = generator(torch.randn(8, 2))
            if joint:
                real = bce(judge(torch.randn(8, 4)), torch.ones(8, 1))
                (real + bce(judge(fake.detach()), torch.zeros(8, 1))).backward()
            else:
                bce(judge(torch.randn(8, 4)), torch.ones(8, 1)).backward()
                bce(judge(fake.detach()), torch.zeros(8, 1)).backward()
            of_d.step()
            if not zeroed:
                of_d.zero_grad()
            generator.zero_grad()
            bce(judge(fake), torch.ones(8, 1)).backward()
            of_g.step()
    return recording


def in_turns(how: str) -> Recording:
    """Two players whose micro-batches take turns; or two parts of one model, with a loss of the second one's own."""
    width = 64 if how == "large opponents" else 4
    first, second = nn.Linear(2, width), nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    of_first, of_second = torch.optim.Adam(first.parameters()), torch.optim.Adam(second.parameters())
    bce = F.binary_cross_entropy_with_logits
    with av.record(first=first, second=second, of_first=of_first, of_second=of_second) as recording:
        for _ in range(4):
            of_first.zero_grad()
            of_second.zero_grad()
            for _ in range(K):
                made = first(torch.randn(8, 2))
                wanted = torch.zeros(8, 1) if "opponents" in how else torch.ones(8, 1)
                if how == "two losses of all":
                    (second(made).square().mean() / K).backward(retain_graph=True)
                elif how != "one loss":
                    (bce(second(made.detach()), wanted) / K).backward()
                (bce(second(made), torch.ones(8, 1)) / K).backward()
            of_second.step()
            of_first.step()
    return recording


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("opponents", ["gan-gradient-leak"]),
        ("large opponents", ["gan-gradient-leak"]),
        ("one model", []),
        ("one loss", []),
        ("two losses of all", []),
    ],
)
def test_opponents_in_turns_are_a_note_and_parts_of_one_model_are_nothing(how: str, expected: list[str]) -> None:
    torch.manual_seed(0)
    report = av.check(in_turns(how))
    assert [finding.rule for finding in report.findings] == expected and report.healthy, report


def sentences(reduction: str) -> Recording:
    words, head = nn.Embedding(11, 8), nn.Linear(8, 11)
    optimizer = torch.optim.AdamW([*words.parameters(), *head.parameters()])
    lengths = (3, 40, 7, 110)
    with av.record(words, head, optimizer) as recording:
        for _ in range(3):
            for n in lengths:
                ids = torch.randint(1, 11, (2, 120))
                ids[:, n:] = 0
                targets = ids.masked_fill(ids == 0, -100).flatten()
                loss = F.cross_entropy(head(words(ids)).flatten(0, 1), targets, reduction=reduction)
                (loss / (len(lengths) if reduction == "mean" else 2 * sum(lengths))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


def kept(*, graphs: bool) -> Recording:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Any] = []
    with av.record(model, optimizer, memory=True) as recording:
        for _ in range(8):
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward(retain_graph=graphs)
            losses.append(loss if graphs else loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return recording


def unused(*, to_none: bool) -> Recording:
    used, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*used.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    with av.record(used, other, optimizer) as recording:
        for i in range(4):
            out = used(torch.randn(3, 4)) + (other(torch.randn(3, 4)) if i == 0 else 0)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return recording


def unused_beside_another() -> Recording:
    used, other, judge = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*used.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    with av.record(used, other, judge, optimizer, of_judge) as recording:
        for i in range(4):
            out = used(torch.randn(3, 4)) + (other(torch.randn(3, 4)) if i == 0 else 0)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            judge(out.detach()).square().mean().backward()
            of_judge.step()
            of_judge.zero_grad()
    return recording


def test_a_zero_that_drifts_is_told_where_it_was_made_and_not_where_anothers_were() -> None:
    (found,) = av.check(unused_beside_another()).findings
    assert (found.rule, found.source) == ("zero-tensor-drift", "optimizer.zero_grad(set_to_none=False)")
    assert "+            optimizer.zero_grad()" in found.cure


@pytest.mark.parametrize(("weights", "severity"), [(None, []), ([1.0, 2.0, 1.0, 1.0, 3.0], ["note"])])
def test_classes_that_count_unequally_make_no_error_of_equal_batches(
    weights: list[float] | None, severity: list[str]
) -> None:
    model, weight = nn.Linear(4, 5), None if weights is None else torch.tensor(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    with av.record(model, optimizer) as recording:
        for i in range(8):
            loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 5, (6,)), weight=weight)
            (loss / K).backward()
            if i % K == K - 1:
                optimizer.step()
                optimizer.zero_grad()
    assert [found.severity for found in av.check(recording).findings] == severity


def mixing(*, layer: bool, training: bool = True) -> Recording:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if layer else nn.Identity()).train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            for _ in range(K):
                (F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8)) / K).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


def test_the_layers_of_a_copy_that_follows_the_model_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, average, copied, optimizer) as recording:
        for _ in range(3):
            for _ in range(K):
                (F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8)) / K).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            copied.load_state_dict(model.state_dict())
    (finding,) = av.check(recording).findings
    assert finding.evidence["layers"] == ["model.1"] and finding.evidence["batches in their statistics"] == 3 * K


def contrasting(how: str) -> Recording:
    """Each sample against each; or eight samples of eight classes, which look alike."""
    model, warmth = nn.Linear(4, 8, bias=False), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([*model.parameters(), warmth], lr=0.1)
    with av.record(model=model, warmth=warmth, optimizer=optimizer) as recording:
        for _ in range(3):
            for _ in range(K):
                one = F.normalize(model(torch.randn(8, 4)), dim=1)
                other = F.normalize(model(torch.randn(8, 4)), dim=1)
                targets = torch.arange(8)
                if how == "einsum":
                    loss = F.cross_entropy(torch.einsum("id,jd->ij", one, other) / 0.1, targets) + 0 * warmth
                elif how == "cosines":
                    alike = F.cosine_similarity(one.unsqueeze(1), other.unsqueeze(0), dim=-1)
                    loss = F.cross_entropy(alike / 0.05, targets) + 0 * warmth
                elif how == "prototypes":
                    loss = F.cross_entropy(torch.einsum("id,jd->ij", one, model.weight.new_ones(8, 8)), targets)
                    loss = loss + F.cross_entropy(one[:, :4] @ F.normalize(model.weight).T, targets) + 0 * warmth
                    alike = F.cosine_similarity(one[:, None, :4], model.weight[None], dim=-1)
                    loss = loss + F.cross_entropy(alike, targets)
                elif how == "classes":
                    loss = F.cross_entropy(model(torch.randn(8, 4)), targets) + 0 * warmth
                elif how == "both ways":
                    pairs = one @ other.T / 0.1
                    loss = (F.cross_entropy(pairs, targets) + F.cross_entropy(pairs.T, targets)) / 2 + 0 * warmth
                else:
                    loss = F.cross_entropy(warmth.exp() * (one @ other.T), targets)
                (loss / K).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (lambda: mixing(layer=True), ["micro-batch-side-effects"]),
        (lambda: mixing(layer=True, training=False), []),
        (lambda: mixing(layer=False), []),
        (lambda: contrasting("a learnt temperature"), ["contrastive-accumulation"]),
        (lambda: contrasting("both ways"), ["contrastive-accumulation"]),
        (lambda: contrasting("einsum"), ["contrastive-accumulation"]),
        (lambda: contrasting("cosines"), ["contrastive-accumulation"]),
        (lambda: contrasting("classes"), []),
        (lambda: contrasting("prototypes"), []),
    ],
)
def test_what_mixes_samples_is_noted_and_frightens_nobody(recording: Any, expected: list[str]) -> None:
    report = av.check(recording())
    assert [finding.rule for finding in report.findings] == expected
    assert report.verdict != "findings" and all(finding.severity == "note" for finding in report.findings)


def halves(*, stepped: bool, alike: bool = False, windows: int = 4) -> Recording:
    """Two optimizers for the halves of a model, of which one may only zero; alike to the other, or by the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    body, head = (torch.optim.SGD(model[n].parameters(), lr=0.01) for n in (0, 2))
    with av.record(model, body, head) as recording:
        for _ in range(windows):
            for _ in range(K):
                (F.cross_entropy(model(torch.randn(3, 4)), torch.randint(0, 2, (3,))) / K).backward()
            head.step()
            if stepped:
                body.step()
            if alike:
                model.zero_grad()
            else:
                head.zero_grad()
                body.zero_grad()
    return recording


def test_an_optimizer_that_only_zeroes_is_found_and_a_half_that_the_model_zeroes_is_a_choice() -> None:
    (found,) = av.check(halves(stepped=False)).findings
    assert (found.rule, found.severity) == ("parameter-outside-or-twice", "warning")
    assert found.source == "body.zero_grad()" and found.evidence["parameters"] == ["0.weight", "0.bias"]
    for right in (halves(stepped=True), halves(stepped=False, alike=True), halves(stepped=False, windows=2)):
        assert av.check(right).verdict == "healthy"


@pytest.mark.parametrize(
    ("how", "noted"), [("detached", True), ("frozen", False), ("set by hand", False), ("used once", False)]
)
def test_what_no_backward_reaches_is_noted_unless_it_is_meant(how: str, noted: bool) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(4, 6).requires_grad_(how != "frozen"), nn.Linear(6, 2)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with av.record(model, optimizer) as recording:
        for step in range(4):
            features = body(torch.randn(3, 4))
            features = features if how == "used once" and step == 2 else features.detach()
            F.cross_entropy(head(features), torch.randint(0, 2, (3,))).backward()
            if how == "set by hand":
                body.weight.grad, body.bias.grad = torch.ones(6, 4), torch.ones(6)
            optimizer.step()
            optimizer.zero_grad()
    report = av.check(recording)
    assert report.verdict == "healthy"
    assert [f.evidence["parameters"] for f in report.findings] == [["0.weight", "0.bias"]] * noted


@pytest.mark.parametrize(
    ("mistake", "cured", "rule"),
    [
        (lambda: gan(zeroed=False), lambda: gan(zeroed=True), "gan-gradient-leak"),
        (lambda: gan(zeroed=False, joint=True), lambda: gan(zeroed=True, joint=True), "gan-gradient-leak"),
        (lambda: sentences("mean"), lambda: sentences("sum"), "token-mean-of-means"),
        (lambda: kept(graphs=True), lambda: kept(graphs=False), "graph-retained"),
        (lambda: unused(to_none=False), lambda: unused(to_none=True), "zero-tensor-drift"),
    ],
)
def test_other_loops_with_a_mistake_and_without(mistake: Any, cured: Any, rule: str) -> None:
    assert [finding.rule for finding in av.check(mistake()).findings] == [rule]
    report = av.check(cured())
    assert report.findings == () and report.healthy, report


def closures(optimizer: torch.optim.Optimizer, model: nn.Module, zeroed: str, micro_batches: int = 1) -> Recording:
    """Five steps that call a closure of so many backwards; it is zeroed at its beginning, below the step, or never."""
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        if zeroed == "in the closure":
            optimizer.zero_grad()
        losses = [F.mse_loss(model(x), y) / micro_batches for _ in range(micro_batches)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum()

    with av.record(model, optimizer) as recording:
        for _ in range(5):
            optimizer.step(closure)  # type: ignore[arg-type]
            if zeroed == "below":
                optimizer.zero_grad()
    return recording


@pytest.mark.parametrize("kind", ["SGD", "LBFGS", "LBFGS with a line search"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_closure_that_never_zeroes_is_found_and_one_that_does_is_not(kind: str, micro_batches: int) -> None:
    def recorded(zeroed: str) -> Recording:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        search = "strong_wolfe" if "search" in kind else None
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if kind != "SGD":
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
        return closures(optimizer, model, zeroed, micro_batches)

    (found,) = av.check(recorded("never")).findings
    assert (found.rule, found.severity, found.cure) == ("missing-zero-grad", "error", "")
    assert found.source.startswith("optimizer.step(closure)") and "closure" in found.cause
    for right in ("in the closure", *["below"] * (kind == "SGD")):
        report = av.check(recorded(right))
        assert report.healthy and not report.findings, report


def test_the_cure_of_a_sum_that_keeps_all_graphs_is_no_second_walk_through_a_freed_one() -> None:
    def summed(*, detached: bool) -> Any:
        weight = torch.tensor(1.0, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.01)
        with av.record(weight, optimizer) as recording:
            total = torch.tensor(0.0)
            for x in (1.0, 2.0, 3.0, 4.0, 5.0):
                loss = (2 * x - weight * x).square().mean()
                total = total + (loss.detach() if detached else loss)
                if detached:
                    loss.backward()
                else:
                    total.backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
        return recording

    (found,) = av.check(summed(detached=False)).findings
    assert found.rule == "graph-retained" and not found.cure
    assert "`total`" in found.cause and "`detach()`" in found.cause
    assert av.check(summed(detached=True)).healthy


def fused(mistake: str) -> Recording:
    """Windows of four under a scaler, and an optimizer that divides by its scale inside the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with av.record(model, optimizer) as recording:
        for i in range(5 * K):
            x, y = torch.randn(2, 16), torch.randint(0, 5, (2,))
            if mistake == "an overflow" and i == K:
                x = x * float("inf")
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss if mistake == "loss-not-divided" else loss / K).backward()
            if (i + 1) % K:
                continue
            if mistake == "clip-scaled-grads":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if mistake == "bypass-scaler-step":
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if mistake != "missing-zero-grad":
                optimizer.zero_grad()
    return recording


def test_what_an_earlier_step_has_unscaled_and_left_is_told_as_left_and_nothing_else() -> None:
    (finding,) = av.check(batches("missing-zero-grad", amp=True)).findings
    assert finding.rule == "missing-zero-grad"


@pytest.mark.parametrize(
    "mistake", ["", "loss-not-divided", "clip-scaled-grads", "bypass-scaler-step", "missing-zero-grad"]
)
def test_a_fused_optimizer_that_unscales_inside_its_step_is_judged_like_any_other(mistake: str) -> None:
    recording = fused(mistake)
    report = av.check(recording)
    assert [finding.rule for finding in report.findings] == ([mistake] if mistake else []), report
    if not mistake:
        assert report.healthy and not [rule for rule, why in report.unjudged.items() if "share" in why], report
        np.testing.assert_allclose(recording.ledger.shares().share, 1 / K, rtol=1e-3)


def test_a_fused_step_that_the_scaler_skipped_divides_nothing() -> None:
    recording = fused("an overflow")
    skipped = [event for event in recording.ledger.of("step") if event.skipped]
    assert len(skipped) == 1
    assert [share.share for share in recording.ledger.shares()] == pytest.approx([1 / K] * 4 * K, rel=1e-3)
    assert av.check(recording).healthy


def turns(mistake: str, many: int = K) -> Recording:
    """Two parts of one model, trained in turns on one loss; what comes in the other's turn is to be zeroed."""
    torch.manual_seed(0)
    body, head = nn.Linear(16, 16), nn.Linear(16, 5)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]

    def learn() -> None:
        x, y = torch.randn(2, 16), torch.randint(0, 5, (2,))
        (F.cross_entropy(head(body(x).relu()), y) / many).backward()

    with av.record(*optimizers, body=body, head=head) as recording:
        for turn in range(8):
            own, other = optimizers[turn % 2], optimizers[(turn + 1) % 2]
            if mistake in ("", "zeroed before its turn"):
                own.zero_grad()
            for _ in range(many):
                if mistake == "zero-grad-inside-window":
                    own.zero_grad()
                learn()
            own.step()
            if mistake == "gan-gradient-leak":
                own.zero_grad()
            if mistake == "the other zeroed after its turn":
                other.zero_grad()
    return recording


@pytest.mark.parametrize("many", [1, 2, K])
@pytest.mark.parametrize("how", ["zeroed before its turn", "the other zeroed after its turn"])
def test_two_parts_in_turns_on_one_loss_are_healthy(how: str, many: int) -> None:
    report = av.check(turns(how, many))
    assert report.findings == () and report.healthy, report


@pytest.mark.parametrize("many", [1, 2, K])
def test_what_came_in_the_others_turn_and_stayed_is_a_leak_and_nothing_else(many: int) -> None:
    (leak,) = av.check(turns("gan-gradient-leak", many)).findings
    assert leak.rule == "gan-gradient-leak" and "turn" in leak.cause and not leak.cure


def test_a_zeroing_inside_a_turn_is_told_with_what_that_turn_lost() -> None:
    recording = turns("zero-grad-inside-window")
    (found,) = av.check(recording).findings
    assert found.rule == "zero-grad-inside-window"
    erased, (kept,) = found.evidence["backwards erased"], found.evidence["backwards consumed"]
    backwards = [event.index for event in recording.ledger.of("backward")]
    assert [*erased, kept] == backwards[:K] and found.evidence["steps concerned"] == 4


@pytest.mark.parametrize("divided", [1, 2])
def test_two_parts_that_step_at_paces_of_their_own_leak_nothing(divided: int) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(16, 16), nn.Linear(16, 5)
    often, seldom = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head))
    with av.record(often, seldom, body=body, head=head) as recording:
        for i in range(12):
            (F.cross_entropy(head(body(torch.randn(2, 16))), torch.randint(0, 5, (2,))) / divided).backward()
            for optimizer, pace in ((often, 1), (seldom, 2)):
                if (i + 1) % pace == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    rules = [finding.rule for finding in av.check(recording).findings]
    assert rules == ([] if divided == 2 else ["loss-not-divided"])


class Sharp(torch.optim.Optimizer):
    """SAM as most people use it: two steps around a base optimizer."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, *, zero_grad: bool = False) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * 0.05 / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, *, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


def sharpened(how: str) -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = Sharp(model.parameters())

    def learn(x: torch.Tensor, y: torch.Tensor) -> None:
        (F.cross_entropy(model(x), y) / (2 if how == "a mixture of both" else 1)).backward()

    with av.record(model, optimizer, optimizer.base) as recording:
        for _ in range(6):
            x, y = torch.randn(4, 16), torch.randint(0, 5, (4,))
            if how == "a closure":
                learn(x, y)
                optimizer.step(lambda x=x, y=y: learn(x, y))
                optimizer.zero_grad()
            elif how in ("a helper", "a mixture of both", "a helper, zeroed"):
                learn(x, y)
                optimizer.first_step(zero_grad=how == "a helper, zeroed")
                learn(x, y)
                optimizer.second_step(zero_grad=True)
            else:
                F.cross_entropy(model(x), y).backward()
                optimizer.first_step(zero_grad=how != "kept")
                F.cross_entropy(model(x), y).backward()
                optimizer.second_step(zero_grad=True)
    return recording


@pytest.mark.parametrize("how", ["kept", "a helper"])
def test_a_gradient_that_only_told_where_to_move_the_weights_and_stays_is_found(how: str) -> None:
    (finding,) = av.check(sharpened(how)).findings
    assert finding.rule == "ascent-gradient-kept" and finding.severity == "warning" and finding.times == 6
    assert not finding.cure, "which optimizer is zeroed there is said in another function"


def climbing(places: int, each: int, *, weight: float = 1.0, zeroed: bool = False) -> Recording:
    """The weights are moved along their gradient again and again before the step; each gradient is of several parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with av.record(model, optimizer) as recording:
        for _ in range(4):
            for place in range(places):
                for _ in range(each):
                    loss = F.cross_entropy(model(torch.randn(4, 16)), torch.randint(0, 5, (4,)))
                    (loss * weight / each).backward()
                if place < places - 1:
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(p.grad, alpha=0.01)
                    if zeroed:
                        optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    return recording


@pytest.mark.parametrize(("places", "each"), [(3, 1), (2, 2), (3, 2)])
def test_gradients_of_several_places_and_of_several_parts_of_which_only_the_last_is_meant_are_found(
    places: int, each: int
) -> None:
    (finding,) = av.check(climbing(places, each)).findings
    assert finding.rule == "ascent-gradient-kept" and not finding.cure, "one line runs them all"
    assert len(finding.evidence["backwards"]) == places * each
    assert f"{places - 1} times in all" in finding.cause or places == 2


@pytest.mark.parametrize(("places", "each"), [(3, 1), (2, 2), (3, 2)])
def test_several_places_of_which_all_are_meant_or_but_the_last_zeroed_are_healthy(places: int, each: int) -> None:
    for recording in (climbing(places, each, weight=1 / places), climbing(places, each, zeroed=True)):
        report = av.check(recording)
        assert report.findings == () and report.healthy, report


@pytest.mark.parametrize("how", ["zeroed", "a closure", "a helper, zeroed", "a mixture of both"])
def test_two_gradients_at_two_places_are_healthy(how: str) -> None:
    report = av.check(sharpened(how))
    assert report.findings == () and report.healthy, report


@pytest.mark.parametrize("inside", [False, True])
def test_two_losses_of_a_model_whose_weights_are_moved_elsewhere_are_healthy(inside: bool) -> None:
    """Moved after the step, by an average of the weights; or by a layer that normalises its own in each forward."""
    model = nn.Sequential(nn.Embedding(8, 16, max_norm=0.5 if inside else None), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with av.record(model, optimizer) as recording:
        for _ in range(6):
            F.mse_loss(model(torch.arange(8)), torch.zeros(8, 5)).backward()
            F.l1_loss(model(torch.arange(8)), torch.zeros(8, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
    report = av.check(recording)
    assert report.findings == () and report.healthy, report


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=4)


def _closures(model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    optimizer = lbfgs(model)
    yield optimizer

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)  # type: ignore[arg-type]


def _ema(model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    target = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield optimizer
    for i in range(16):
        loss = (F.mse_loss(model(x), target(x).detach()) + 0.3 * model(x).square().mean()) / 4
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for a, b in zip(target.parameters(), model.parameters(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)


def _penalty(model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    optimizer = torch.optim.Adam(model.parameters())
    yield optimizer
    for _ in range(4):
        at = x.clone().requires_grad_()
        out = model(at).square()
        (slope,) = torch.autograd.grad(out.sum(), at, create_graph=True)
        (out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _by_hand(model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    optimizer = torch.optim.Adam(model.parameters())
    yield optimizer
    for _ in range(3):
        for _ in range(4):
            model(x).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 4
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def _helper(model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    optimizer = torch.optim.Adam(model.parameters())
    yield optimizer

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    for _ in range(4):
        optimizer.zero_grad()
        backward(model(x).square().mean())
        backward(model(x).abs().mean())
        optimizer.step()


@pytest.mark.parametrize("loop", [_closures, _ema, _penalty, _by_hand, _helper])
def test_what_is_no_mistake_in_real_loops_stays_silent(loop: Any) -> None:
    model = nn.Linear(4, 4)
    running = loop(model, torch.randn(5, 4))
    optimizer = next(running)
    with av.record(model, optimizer) as recording:
        assert list(running) == []
    report = av.check(recording)
    assert report.findings == () and report.healthy, report


def test_gradients_from_autograd_grad_have_no_verdict() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            found = torch.autograd.grad(model(torch.randn(5, 4)).mean(), list(model.parameters()))
            for p, grad in zip(model.parameters(), found, strict=True):
                p.grad = grad
            optimizer.step()
    assert av.check(recording).verdict == "no verdict"


@pytest.mark.parametrize(("kept", "divided", "severity"), [(0.9, 1, "note"), (1.0, 1, "error"), (1.0, 2, "error")])
def test_momentum_by_hand_is_told_from_a_gradient_that_was_never_zeroed(
    kept: float, divided: int, severity: str
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with av.record(model, optimizer) as recording:
        for _ in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= divided
            optimizer.step()
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= kept
    report = av.check(recording)
    assert [(f.rule, f.severity) for f in report.findings if f.rule == "missing-zero-grad"] == [
        ("missing-zero-grad", severity)
    ]
    assert report.healthy == (severity == "note")


def before_it_began(what: str) -> Recording:
    """Two windows of two, with backwards before the recording, and what became of those in between."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)) for _ in range(2))
    optimizer, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, other))
    loader = torch.utils.data.DataLoader(torch.randn(4, 8))

    def backward(of: nn.Module) -> None:
        (of(torch.randn(3, 8)).mean() / 2).backward()  # type: ignore[no-untyped-call]

    if what != "nothing":
        backward(model)
        backward(other)
        second.zero_grad(set_to_none=False)
    if "zero" in what:
        optimizer.zero_grad(set_to_none="None" in what)
    with av.record(optimizer, second, model=model, other=other) as recording:
        if what == "zeroed in it":
            optimizer.zero_grad()
        if "another network" in what:
            backward(other)
            second.step()
            second.zero_grad()
        if "a clip" in what:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if what == "replaced":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        if "a step" in what:
            optimizer.step()
            optimizer.zero_grad()
        for i, _ in enumerate(loader) if "a loader" in what else enumerate(range(4)):
            backward(model)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    return recording


@pytest.mark.parametrize(
    ("what", "step"),
    [("left", 2), ("a clip first", 3), ("a loader first", 3), ("another network first", 5)],
)
def test_what_a_step_used_from_before_the_recording_is_in_no_share_and_said(what: str, step: int) -> None:
    report = av.check(before_it_began(what))
    assert f"the step of event {step} also used" in report.unjudged["loss-not-divided"], report
    assert "before the recording began" in str(report)


@pytest.mark.parametrize(
    "what",
    # What nobody read before it was gone may have been zeros.
    ["a step first", "nothing", "zeroed to None", "zeros", "zeroed in it", "replaced"]
    + [f"zeros, {first} first" for first in ("a step", "a clip", "a loader", "another network")],
)
def test_where_no_step_used_anything_from_before_nothing_is_said_of_it(what: str) -> None:
    report = av.check(before_it_began(what))
    assert not any("before the recording" in why for why in report.unjudged.values()), report


def with_another(what: str) -> av.Ledger:
    """Two windows of a model that is recorded, and something trained beside it or after it that is not."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))

    def window(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            (model(torch.randn(4, 3)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    with av.record(model, optimizer) as recording:
        for _ in range(2):
            window(model, optimizer)
        if what == "made anew":
            window(other, others)
        elif what == "differentiated, and not trained":
            other(torch.randn(4, 3)).square().mean().backward()
        elif what == "trained on the same backwards":
            (model(torch.randn(4, 3)) + other(torch.randn(4, 3))).mean().backward()
            others.step()
            optimizer.zero_grad()
    return recording.ledger


def test_what_trained_a_model_that_is_not_recorded_is_not_judged_and_said() -> None:
    ledger = with_another("made anew")
    assert ledger.meta["steps_elsewhere"] is True
    report = av.check(ledger)
    assert "2 of 6 backwards reached no parameter that is recorded" in report.unjudged["loss-not-divided"], report
    assert "2 of 6 backwards" in str(report)


@pytest.mark.parametrize("what", ["nothing", "differentiated, and not trained", "trained on the same backwards"])
def test_where_every_backward_of_a_training_is_recorded_nothing_is_said_of_others(what: str) -> None:
    report = av.check(with_another(what))
    assert not any("reached no parameter" in why for why in report.unjudged.values()), report


class Called:
    """What a trainer calls by its name, beside others."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer, self.batches = optimizer, 0

    def on_batch(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.batches += 1


def test_a_line_that_runs_all_callbacks_is_not_taken_away_for_one_that_zeroes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [Called(None), Called(optimizer)]

    def call(name: str) -> None:
        for callback in callbacks:
            getattr(callback, name)()

    with av.record(model, optimizer) as recording:
        for i in range(8):
            call("on_batch")
            (model(torch.randn(4, 3)).square().mean() / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    (found,) = av.check(recording).findings
    assert (found.rule, found.source, found.cure) == ("zero-grad-inside-window", 'call("on_batch")', "")
    assert "self.optimizer.zero_grad()" in str(found)
