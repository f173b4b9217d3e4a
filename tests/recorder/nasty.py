"""Loops that are hard on a recorder, written as their authors would; each trains for real, and says what it made.

A loop is given `record`: what to open around the part that may be recorded. It returns whatever it
trained: tensors, modules, optimizers, numbers. How many backwards its author wrote is in `LOOPS`.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

Record = Callable[..., Any]


@dataclass(frozen=True)
class Loop:
    """A loop, and how many backwards of it belong into the ledger; None where that is not one number."""

    run: Callable[[Record], Any]
    backwards: int | None


LOOPS: dict[str, Loop] = {}
IN_RANKS: dict[str, Loop] = {}


def loop(backwards: int | None, *, ranks: bool = False) -> Callable[[Callable[[Record], Any]], Callable[[Record], Any]]:
    def add(run: Callable[[Record], Any]) -> Callable[[Record], Any]:
        (IN_RANKS if ranks else LOOPS)[run.__name__.replace("_", " ")] = Loop(run, backwards)
        return run

    return add


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(*modules: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr, momentum=0.9)


def batch() -> torch.Tensor:
    return torch.randn(3, 4)


def train(model: Any, optimizer: Any = None, steps: int = 2) -> None:
    for _ in range(steps):
        model(batch()).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


# --- what autograd can do -------------------------------------------------------------------------


@loop(2)
def backward_through_a_backward(record: Record) -> Any:
    weight = torch.randn(3, requires_grad=True)
    with record({"weight": weight}):
        weight.pow(3).sum().backward(create_graph=True)
        first = weight.grad
        weight.grad = None
        assert first is not None
        first.square().sum().backward()
    return first.detach(), weight


class Counting(torch.autograd.Function):
    """Its backward gives another gradient each time that it runs."""

    ran = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Counting.ran += 1
        return gradient * 2 * Counting.ran


@loop(2)
def a_function_in_place_on_a_slice(record: Record) -> Any:
    weight, Counting.ran = torch.ones(3, requires_grad=True), 0
    with record({"weight": weight}):
        for _ in range(2):
            y = weight.clone()
            Counting.apply(y[:2])
            y.sum().backward()
    return weight, Counting.ran


@loop(2)
def a_reentrant_checkpoint(record: Record) -> Any:
    first, second = net(), nn.Linear(2, 2)
    optimizer = sgd(first, second)

    def part(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(first(x), 0.5)

    with record(first=first, second=second):
        for _ in range(2):
            x = batch().requires_grad_()
            hidden = checkpoint(part, x, use_reentrant=True)
            hidden = hidden + checkpoint(part, x, use_reentrant=True)
            second(hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return first, second


@loop(1)
def a_checkpoint_within_a_checkpoint(record: Record) -> Any:
    model = net()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False)

    with record(model):
        checkpoint(inner, batch(), use_reentrant=False).square().mean().backward()
    return model


@loop(1)
def saved_tensors_moved_by_hooks(record: Record) -> Any:
    model = net()
    with record(model), torch.autograd.graph.save_on_cpu():
        train(model, steps=1)
    return model


@loop(3)
def the_optimizer_in_the_backward(record: Record) -> Any:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with record(model, *optimizers.values()):
        train(model, steps=3)
    return model


@loop(1)
def functional_transforms(record: Record) -> Any:
    model = net()
    weights = dict(model.named_parameters())
    detached = {name: weight.detach() for name, weight in weights.items()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    with record(model):
        optimizer, x = sgd(model), batch()
        for name, gradient in torch.func.grad(loss)(detached, x).items():
            weights[name].grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, x)
        loss(weights, x).backward()
        optimizer.step()
    return model, list(samples.values())


@loop(2)
def data_parallel_on_a_processor(record: Record) -> Any:
    model = nn.DataParallel(net())
    optimizer = sgd(model)
    with record(model, optimizer):
        train(model, optimizer)
    return model


@loop(2)
def hooks_of_the_user_that_change_gradients(record: Record) -> Any:
    model = net()
    with record(model):
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient * 2)
        model[0].register_full_backward_hook(lambda module, given, made: None)  # type: ignore[index]
        train(model)
    return model


@loop(2)
def only_some_inputs_of_a_kept_graph(record: Record) -> Any:
    model = net()
    some = list(model.parameters())[:2]
    with record(model):
        loss = model(batch()).square().mean()
        loss.backward(inputs=some, retain_graph=True)
        loss.backward()
    return model


@loop(2)
def anomalies_are_detected(record: Record) -> Any:
    model = net()
    with record(model), torch.autograd.detect_anomaly(check_nan=True):
        train(model)
    return model


@loop(1)
def a_backward_in_a_hook(record: Record) -> Any:
    model = net()
    with record(model):
        y = model(batch())
        loss, inner = y.square().mean(), y.sum()
        handle = y.register_hook(lambda _: handle.remove() or inner.backward(retain_graph=True))
        loss.backward()
    return model


@loop(2)
def forward_mode_and_a_given_gradient(record: Record) -> Any:
    model, x = net(), batch()
    with record(model):
        with torch.autograd.forward_ad.dual_level():
            model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))).square().mean().backward()
        y = model(x)
        y.backward(gradient=torch.full_like(y, 0.25))
    return model


@loop(2)
def nested_and_complex_tensors(record: Record) -> Any:
    model, x = net(), batch()
    with record(model), _quiet():
        model(torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)).values().sum().backward()
        z = torch.fft.fft(model(x)[:, 0])
        (z * z.conj()).real.sum().backward()
    return model


# --- optimizers, scalers and clips ----------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """As many libraries write it: an Optimizer that never calls `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


@loop(3)
def an_optimizer_that_skips_its_own_init_under_a_scaler(record: Record) -> Any:
    model = net()
    optimizer = Wrapper(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with record(model, optimizer):
        for step in range(3):
            scaler.scale(model(batch()).square().mean() * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, scaler.get_scale()


@loop(4)
def accelerate_with_a_scaler(record: Record) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = net()
    model, optimizer = accelerator.prepare(plain, sgd(plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with record(model, optimizer):
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(scaler.scale(model(batch()).square().mean()))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
    return plain, scaler.get_scale()


@loop(2)
def clips_of_every_kind(record: Record) -> Any:
    model = net()
    optimizer = sgd(model)
    with record(model, optimizer):
        for kind in (2.0, float("inf")):
            model(batch()).square().mean().backward()
            nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.1, norm_type=kind)
            nn.utils.clip_grad_value_(iter(model.parameters()), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model


@loop(3)
def a_closure_that_a_step_calls_again(record: Record) -> Any:
    model, x = net(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with record(model, optimizer):
        optimizer.step(closure)
    return model, optimizer


@loop(2)
def sparse_gradients_and_a_fused_step(record: Record) -> Any:
    rows, model = nn.EmbeddingBag(9, 4, sparse=True), net()
    sparse, fused = torch.optim.SGD(rows.parameters(), lr=0.1), torch.optim.AdamW(model.parameters(), fused=True)
    with record(sparse, fused, rows=rows, model=model):
        for _ in range(2):
            model(rows(torch.randint(0, 9, (3, 2)))).square().mean().backward()
            for optimizer in (sparse, fused):
                optimizer.step()
                optimizer.zero_grad()
    return rows, model, fused


# --- tensors that change under one's hands --------------------------------------------------------


@loop(4)
def swapped_on_conversion(record: Record) -> Any:
    model = net()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with record(model):
            optimizer = sgd(model)
            for dtype in (torch.float32, torch.float64):
                model.to(dtype)
                for _ in range(2):
                    model(batch().to(dtype)).square().mean().backward()
            optimizer.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    return model


@loop(2)
def gradients_in_a_tensor_subclass(record: Record) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor as kind

    weight = nn.Parameter(kind(torch.ones(3), torch.full((3,), 2.0)))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
    with record({"weight": weight}, optimizer):
        for _ in range(2):
            (weight * kind(torch.arange(3.0), torch.ones(3))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weight.a.detach(), weight.b.detach()


class Loud(torch.Tensor):
    """A subclass that notes down each function that is called on it, as a units or a logging library does."""

    called = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Loud.called += getattr(function, "__name__", "") in ("mul", "add", "sub", "square", "sum")
        return super().__torch_function__(function, types, args, kwargs or {})


@loop(2)
def gradients_that_notice_what_is_called_on_them(record: Record) -> Any:
    Loud.called = 0
    weight = torch.ones(3).as_subclass(Loud).requires_grad_()
    with record({"weight": weight}):
        for _ in range(2):
            (weight * torch.arange(3.0)).square().sum().backward()
            weight.grad = weight.grad.as_subclass(Loud)  # type: ignore[union-attr]
    return weight, Loud.called


@loop(3)
def a_meta_and_a_fake_tensor_beside_it(record: Record) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, ghost = net(), nn.Linear(4, 2, device="meta")
    with record(model, ghost=ghost):
        model(batch()).square().mean().backward()
        ghost(torch.ones(1, 4, device="meta")).sum().backward()
        with FakeTensorMode(allow_non_fake_inputs=True):
            nn.Linear(4, 2)(torch.ones(1, 4)).sum().backward()
    return model


@loop(3)
def a_gradient_set_shared_and_deleted_by_hand(record: Record) -> Any:
    model = net()
    with record(model):
        train(model, steps=1)
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
        train(model, steps=1)
        for p, old in zip(model.parameters(), kept, strict=True):
            p.grad = old
        with torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(0.5)  # type: ignore[union-attr]
        train(model, steps=1)
    return model, kept


@loop(2)
def copies_and_pickles_of_what_is_recorded(record: Record) -> Any:
    import io

    model = net()
    optimizer = sgd(model)
    with record(model, optimizer):
        for _ in range(2):
            model(batch()).square().mean().backward()
            twin, buffer = copy.deepcopy(model), io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], buffer)
            optimizer.step()
    return model, twin


# --- others at work on torch ----------------------------------------------------------------------


@loop(2)
def somebody_wraps_backward_during_a_recording(record: Record) -> Any:
    weight, before = torch.ones(1, requires_grad=True), torch.autograd.backward
    called = 0

    def wrap() -> None:
        inner = torch.autograd.backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            called += 1
            return inner(*args, **kwargs)

        torch.autograd.backward = theirs  # type: ignore[assignment]

    try:
        for _ in range(2):
            with record({"weight": weight}):
                wrap()
        with record({"weight": weight}):
            for _ in range(2):
                (weight * 2).sum().backward()
    finally:
        torch.autograd.backward = before
    return weight, called


# --- loops that raise -----------------------------------------------------------------------------


class Unspeakable(Exception):
    """Nobody can say what it says."""

    def __init__(self, one: int, two: int) -> None:
        self.both = one, two

    def __str__(self) -> str:
        raise RuntimeError("this text is not to be read")

    __repr__ = __str__


class Raising(torch.autograd.Function):
    error: BaseException = ValueError()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Raising.error


def _raising(record: Record, error: BaseException, *, caught: bool = False) -> Any:
    model = net()
    optimizer = sgd(model)
    Raising.error = error
    with record(model, optimizer):
        train(model, optimizer, steps=1)
        with contextlib.suppress(type(error)) if caught else contextlib.nullcontext():
            Raising.apply(model(batch())).sum().backward()
        train(model, optimizer, steps=1)
    return model


LOOPS |= {
    "an error in a backward that is caught": Loop(partial(_raising, error=ValueError("caught"), caught=True), 3),
    "an interrupt in a backward": Loop(partial(_raising, error=KeyboardInterrupt()), 2),
    "an error that cannot be written down": Loop(partial(_raising, error=Unspeakable(1, 2)), 2),
    "an error that cannot be written down and is caught": Loop(
        partial(_raising, error=Unspeakable(1, 2), caught=True), 3
    ),
}


@loop(2)
def a_graph_that_is_walked_twice(record: Record) -> Any:
    model = net()
    with record(model):
        loss = model(batch()).square().mean()
        loss.backward()
        loss.backward()


@loop(1)
def an_error_in_a_step(record: Record) -> Any:
    model = net()
    optimizer = sgd(model)
    with record(model, optimizer):
        train(model, steps=1)
        optimizer.step(closure=lambda: 1 / 0)


@loop(1)
def a_clip_of_what_is_not_finite(record: Record) -> Any:
    model = net()
    with record(model):
        (model(batch()).square().mean() * float("inf")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# --- several processes ----------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, nested tensors are not settled
        yield


def _accumulate(record: Record, model: Any, optimizer: Any, clip: Callable[[], Any] = lambda: None) -> Any:
    with record(model, optimizer):
        for _ in range(2):
            with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
                model(batch()).square().mean().backward()
            model(batch()).square().mean().backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop(4, ranks=True)
def ddp_with_views_and_parts_unused(record: Record) -> Any:
    model = nn.parallel.DistributedDataParallel(
        nn.ModuleList([net(), net()])[0], find_unused_parameters=True, gradient_as_bucket_view=True
    )
    clip = nn.utils.clip_grad_norm_
    return _accumulate(record, model, sgd(model), lambda: clip(model.parameters(), 0.1))


@loop(4, ranks=True)
def ddp_that_compresses(record: Record) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=1e-5)
    model.register_comm_hook(None, fp16_compress_hook)
    return _accumulate(record, model, sgd(model))


@loop(4, ranks=True)
def tensor_parallel(record: Record) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _accumulate(record, model, sgd(model))


def _fsdp1(record: Record, use_orig_params: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _quiet():
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        return _accumulate(record, model, sgd(model), lambda: model.clip_grad_norm_(0.1))


IN_RANKS |= {
    "fsdp1": Loop(partial(_fsdp1, use_orig_params=False), 4),
    "fsdp1 with the parameters as they were": Loop(partial(_fsdp1, use_orig_params=True), 4),
}


@loop(2, ranks=True)
def fsdp2_that_syncs_last(record: Record) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = net()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model[0], model[2], model):
        fully_shard(part, mp_policy=precision)
    optimizer = sgd(model)
    with record(model, optimizer):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(batch()).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model
