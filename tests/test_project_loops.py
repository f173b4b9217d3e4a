"""Loops in the manner of real projects and frameworks: each healthy, and with one mistake, found on its line."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accumviz as av
from accumviz.recorder.recording import Recording

K = 4
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


def batches(many: int, size: int = 2) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(many * size, 8), torch.randint(0, 5, (many * size,)))
    return DataLoader(data, batch_size=size)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def dcgan(mistake: str) -> Recording:
    generator = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 5))
    judge = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4))
    of_g, of_d = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
    criterion = nn.BCEWithLogitsLoss()
    with av.record(generator=generator, judge=judge, of_g=of_g, of_d=of_d) as recording:
        for _ in range(4):
            real, label = torch.randn(6, 1, 8, 8), torch.ones(6)
            if mistake != "gan-gradient-leak":
                judge.zero_grad()
            criterion(judge(real).flatten(), label).backward()
            fake = generator(torch.randn(6, 4, 1, 1))
            criterion(judge(fake.detach()).flatten(), torch.zeros(6)).backward()
            of_d.step()
            if mistake == "gan-gradient-leak":
                of_d.zero_grad()
            if mistake != "missing-zero-grad":
                generator.zero_grad()
            criterion(judge(fake).flatten(), label).backward()
            of_g.step()
    return recording


def byol(mistake: str) -> Recording:
    """An online network, a predictor, and a target that follows by an average."""
    online, predictor = net(), nn.Linear(5, 5)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9)
    with av.record(online, predictor, optimizer) as recording:
        for i, (x, _) in enumerate(batches(12, 4)):
            one, other = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)

            def half(a: Tensor, b: Tensor) -> Tensor:
                aim = F.normalize(target(b), dim=1)
                return 2 - 2 * (F.normalize(predictor(online(a)), dim=1) * aim).sum(dim=1).mean()

            loss = (half(one, other) + half(other, one)) / 2
            if mistake == "loss-not-divided":
                loss.backward()
            else:
                (loss / K).backward()
            if i % K == K - 1:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                        slow.lerp_(fast, 0.01)
    return recording


def unet(mistake: str) -> Recording:
    """Segmentation: a cross entropy and a Dice loss, mixed precision, a scheduler once an epoch."""
    down, up = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 2, 2, 2)
    model = nn.Sequential(down, nn.ReLU(), up)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max")
    with av.record(model, optimizer) as recording:
        for _ in range(2):
            for i in range(8):
                images, masks = torch.randn(2, 1, 8, 8), torch.randint(0, 2, (2, 8, 8))
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(images)
                    loss = F.cross_entropy(out, masks)
                    chance = F.softmax(out.float(), 1)[:, 1]
                    loss = loss + 1 - (2 * (chance * masks).sum() + 1) / (chance.sum() + masks.sum() + 1)
                scaler.scale(loss / K).backward()
                if i % K != K - 1:
                    continue
                if mistake != "clip-scaled-grads":
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
            scheduler.step(1.0)
    return recording


def language_model(mistake: str) -> Recording:
    """Padded sentences; the window's tokens are counted first, and each loss is a sum over them."""
    words, head = nn.Embedding(11, 8), nn.Linear(8, 11)
    optimizer = torch.optim.AdamW([*words.parameters(), *head.parameters()])
    with av.record(words, head, optimizer) as recording:
        for _ in range(3):
            window = []
            for length in torch.randperm(K).mul(7).add(3).tolist():
                ids = torch.randint(1, 11, (2, 32))
                ids[:, length:] = -100
                window.append(ids)
            tokens = sum(int((ids != -100).sum()) for ids in window)
            for ids in window:
                logits = head(words(ids.clamp(min=0))).flatten(0, 1)
                if mistake == "token-mean-of-means":
                    loss = F.cross_entropy(logits, ids.flatten(), ignore_index=-100) / K
                else:
                    loss = F.cross_entropy(logits, ids.flatten(), ignore_index=-100, reduction="sum") / tokens
                loss.backward()
            nn.utils.clip_grad_norm_([*words.parameters(), *head.parameters()], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return recording


def lbfgs(mistake: str) -> Recording:
    """Two optimizers: LBFGS with a closure over the whole batch, and one for a head that accumulates."""
    model, head = nn.Linear(8, 5), nn.Linear(8, 5)
    whole = torch.optim.LBFGS(model.parameters(), max_iter=3)
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    with av.record(model=model, head=head, whole=whole, other=other) as recording:
        for i, (x, y) in enumerate(batches(12)):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                whole.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            whole.step(closure)  # type: ignore[arg-type]
            if mistake == "zero-grad-inside-window":
                other.zero_grad()
            (F.cross_entropy(head(x), y) / K).backward()
            if i % K == K - 1:
                other.step()
                other.zero_grad()
    return recording


def fresh_accelerator(**options: Any) -> Any:
    """An Accelerator that knows of none before it: what they share is the process's."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


def accelerated(mistake: str, many: int = 12) -> Recording:
    """Accelerate itself: it divides, steps at the window's end, and its loaders look one batch ahead."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=K)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, batches(many), scheduler)
    with av.record(model, optimizer.optimizer) as recording:
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    if mistake == "double-division":
                        loss = loss / K
                    accelerator.backward(loss)
                    if mistake == "clip-per-micro-batch":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    if mistake != "missing-zero-grad":
                        optimizer.zero_grad()
    return recording


def looking_ahead(mistake: str, many: int = 13) -> Recording:
    """Accelerate's loader, and windows by hand: the loader's end stands one batch early."""
    accelerator = fresh_accelerator()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader, evaluation = accelerator.prepare(batches(many), batches(3))
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            if mistake == "tail-dropped":
                optimizer.zero_grad()
            for i, (x, y) in enumerate(loader):
                tail = i >= many // K * K
                short = tail and mistake not in ("tail-dropped", "leftover-carried", "window-collapses-at-end")
                (F.cross_entropy(model(x), y) / (many % K if short else K)).backward()
                last = i == many - 1 if mistake != "window-collapses-at-end" else tail
                if i % K == K - 1 or (last and mistake not in ("tail-dropped", "leftover-carried")):
                    optimizer.step()
                    optimizer.zero_grad()
                if i % 6 == 5:
                    with torch.no_grad():
                        for a, _ in evaluation:
                            model(a)
    return recording


class Trained:
    """As transformers' Trainer does it: a window's batches first, their items counted, each loss in a method."""

    def __init__(self, mistake: str) -> None:
        self.mistake, self.model = mistake, net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def compute_loss(self, inputs: Any, items: int | None) -> Tensor:
        x, y = inputs
        if items is None:
            return F.cross_entropy(self.model(x), y)
        return F.cross_entropy(self.model(x), y, reduction="sum") / items

    def training_step(self, inputs: Any, items: int | None) -> float:
        self.model.train()
        if self.mistake == "zero-grad-inside-window":
            self.model.zero_grad()
        loss = self.compute_loss(inputs, items)
        if items is None and self.mistake != "loss-not-divided":
            loss = loss / K
        loss.backward()
        return loss.item()

    def train(self, counted: bool) -> Recording:
        loader = batches(12 if not counted else 14)
        with av.record(self.model, self.optimizer) as recording:
            for _ in range(2):
                stream, total = iter(loader), len(loader)
                for start in range(0, total, K):
                    window = [next(stream) for _ in range(min(K, total - start))]
                    items = sum(len(y) for _, y in window) if counted else None
                    for inputs in window:
                        self.training_step(inputs, items)
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.model.zero_grad()
        return recording


def trainer(mistake: str) -> Recording:
    return Trained(mistake).train(counted=mistake == "")


def undivided_trainer(mistake: str) -> Recording:
    return Trained(mistake).train(counted=False)


def lightning(mistake: str) -> Recording:
    """As Lightning does it: a closure for each batch, run by itself until the last, which runs inside the step."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with av.record(model, optimizer) as recording:
        for i, (x, y) in enumerate(batches(12)):

            def closure(x: Tensor = x, y: Tensor = y, i: int = i) -> Tensor:
                loss = F.cross_entropy(model(x), y) / K
                if i % K == 0 or mistake == "zero-grad-inside-window":
                    optimizer.zero_grad()
                loss.backward()
                if i % K == K - 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            if i % K == K - 1:
                optimizer.step(closure)  # type: ignore[arg-type]
            else:
                closure()
    return recording


Loop = Callable[[str], Recording]
HEALTHY: list[Loop] = [
    *(dcgan, byol, unet, language_model, lbfgs, accelerated, looking_ahead, trainer, undivided_trainer, lightning),
]
PLANTED: list[tuple[Loop, str, str]] = [
    (dcgan, "gan-gradient-leak", "criterion(judge(fake).flatten(), label).backward()"),
    (dcgan, "missing-zero-grad", "of_g.step()"),
    (byol, "loss-not-divided", "loss.backward()"),
    (unet, "clip-scaled-grads", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    (language_model, "token-mean-of-means", "loss.backward()"),
    (lbfgs, "zero-grad-inside-window", "other.zero_grad()"),
    (accelerated, "clip-per-micro-batch", "nn.utils.clip_grad_norm_(model.parameters(), 0.01)"),
    (accelerated, "missing-zero-grad", "optimizer.step()"),
    (accelerated, "double-division", "accelerator.backward(loss)"),
    (undivided_trainer, "zero-grad-inside-window", "self.model.zero_grad()"),
    (undivided_trainer, "loss-not-divided", "loss.backward()"),
    (lightning, "zero-grad-inside-window", "optimizer.zero_grad()"),
]


def told(recording: Recording) -> list[tuple[str, str]]:
    """What is found, notes left out: a rule and its line."""
    return [(one.rule, one.source) for one in av.check(recording).findings if one.severity != "note"]


@pytest.mark.parametrize("loop", HEALTHY)
def test_a_projects_loop_is_healthy(loop: Loop) -> None:
    torch.manual_seed(0)
    recording = loop("")
    assert av.check(recording).healthy and told(recording) == [], av.check(recording)


@pytest.mark.parametrize(("loop", "mistake", "line"), PLANTED)
def test_a_mistake_in_a_projects_loop_is_found_on_its_line(loop: Loop, mistake: str, line: str) -> None:
    torch.manual_seed(0)
    recording = loop(mistake)
    assert told(recording) == [(mistake, line)], av.check(recording)


@pytest.mark.parametrize("many", [13, 14, 15])
@pytest.mark.parametrize("mistake", ["", "tail-dropped", "leftover-carried", "window-collapses-at-end"])
def test_a_loader_that_looks_ahead_misleads_nobody_about_tails(mistake: str, many: int) -> None:
    torch.manual_seed(0)
    if mistake == "window-collapses-at-end" and many == 13:
        return  # one micro-batch is a window
    recording = looking_ahead(mistake, many)
    assert [rule for rule, _ in told(recording)] == ([mistake] if mistake else []), av.check(recording)


def test_what_accelerate_divides_by_in_a_short_window_is_found_and_no_line_of_the_users_is_blamed() -> None:
    (finding,) = av.check(accelerated("", 14)).findings
    assert (finding.rule, finding.source) == ("partial-window-underscaled", "accelerator.backward(loss)")
    assert finding.cure == ""


# ---------------------------------------------------------------- several processes


def replicated(mistake: str) -> list[tuple[str, str]]:
    """DDP with its flag, and mixed precision: nanoGPT's order of calls."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(net())
    torch.manual_seed(1 + torch.distributed.get_rank())
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            for i in range(K):
                if mistake != "ddp-unsynced-step":
                    model.require_backward_grad_sync = i == K - 1
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(torch.randn(2, 8)), torch.randint(0, 5, (2,))) / K
                if mistake == "ddp-unsynced-step":
                    model.require_backward_grad_sync = i == K - 1
                scaler.scale(loss).backward()
                if mistake == "ddp-unsynced-step":
                    model.require_backward_grad_sync = False
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return told(recording)


def sharded(mistake: str) -> list[tuple[str, str]]:
    """FSDP2 (and, for the rule about it, FSDP1) with a clip of the whole gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model: Any = net()
    if mistake == "fsdp1-local-clip":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(1 + torch.distributed.get_rank())
    optimizer = torch.optim.AdamW(model.parameters())
    with av.record(model, optimizer) as recording:
        for _ in range(3):
            for i in range(K):
                if mistake == "clip-per-micro-batch" and i:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                (F.cross_entropy(model(torch.randn(2, 8)), torch.randint(0, 5, (2,))) / K).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return told(recording)


def static(mistake: str) -> list[tuple[str, str]]:
    """DDP that was told its graph never changes, accumulating: torch stops the script."""
    model = nn.parallel.DistributedDataParallel(net(), static_graph=mistake != "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(RuntimeError), av.record(model, optimizer) as recording:
        for _ in range(2):
            for i in range(K):
                with model.no_sync() if i < K - 1 else contextlib.nullcontext():
                    loss = F.cross_entropy(model(torch.randn(2, 8)), torch.randint(0, 5, (2,))) / K
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(recording)


Told = list[tuple[str, str]]


def one_after_the_other(loops: Iterator[Any] | list[Any]) -> list[Told]:
    return [loop(mistake) for loop, mistake in loops]


@pytest.mark.parametrize(
    ("loop", "mistake", "line"),
    [
        (replicated, "ddp-unsynced-step", "scaler.scale(loss).backward()"),
        (sharded, "clip-per-micro-batch", "nn.utils.clip_grad_norm_(model.parameters(), 0.05)"),
        (sharded, "fsdp1-local-clip", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
        (static, "ddp-static-graph-no-sync", "loss.backward()"),
    ],
)
def test_a_mistake_in_several_processes_is_found_and_without_it_they_are_healthy(
    loop: Callable[[str], Told], mistake: str, line: str
) -> None:
    world = av.distribute(one_after_the_other, loops=[(loop, ""), (loop, mistake)])
    for healthy, found in world.returned:
        assert healthy == []
        assert found == [(mistake, line)]
