"""Resolve what to record: modules, optimizers, parameters, dicts of tensors, groups, and their names."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accumviz.arguments import a
from accumviz.recorder.callsite import variable
from accumviz.recorder.distributed import Shard, Shards, local, units
from accumviz.recorder.transfer import readable

# The variables of so many callers are searched for an optimizer's name.
_CALLERS = 32
# So many wrappers are looked into for the optimizer itself; betas and such are so many numbers.
_WRAPPED, _FEW = 4, 8


def is_optimizer(item: Any) -> bool:
    """Whether this steps like an optimizer: it is one, or wraps one and shows its groups."""
    if isinstance(item, torch.optim.Optimizer):
        return True
    return (
        not isinstance(item, torch.nn.Module | torch.Tensor)
        and callable(getattr(item, "step", None))
        and _has(item)
    )


def _has(item: Any) -> bool:
    return isinstance(getattr(item, "param_groups", None), list)


def parameters(optimizer: Any) -> Iterator[Any]:
    """Its parameters; none where a wrapper cannot say."""
    try:
        groups = list(optimizer.param_groups)
    except (
        Exception
    ):  # whatever a wrapper's property raises is no affair of the loop that we watch
        return
    for group in groups:
        yield from group["params"]


class Optimizers:
    """Optimizers in the order in which they were met.

    An optimizer and what wraps it are one: they share the very list of groups, or one holds the
    other and steps the same parameters. None is held: a loop may make a new one, with a state of
    the model's size, for each epoch. `owned` tells the numbers of the leaves that an optimizer has.
    """

    def __init__(self, owned: Callable[[Any], list[int]]) -> None:
        self.names: list[str] = []
        self.settings: list[dict[str, Any]] = []
        # Of each, the leaves that it had when it was last seen.
        self._leaves: list[list[int]] = []
        # Of each, how many parameters it had that are not recorded, when it was met.
        self._others: list[int] = []
        self._owned = owned
        # Every object met, the wrapped ones too, by id.
        self._met: dict[int, tuple[Callable[[], Any], int]] = {}
        self._lock = threading.RLock()

    def meet(self, optimizer: Any, frame: FrameType | None) -> int:
        """The number of this optimizer."""
        met = self._met.get(id(optimizer))
        if met is not None and met[0]() is optimizer:
            return met[1]
        with self._lock:  # two threads' optimizers are two
            return self._meet(optimizer, frame)

    def _meet(self, optimizer: Any, frame: FrameType | None) -> int:
        self._met = {
            key: known for key, known in self._met.items() if known[0]() is not None
        }
        index = next(
            (i for known, i in self._met.values() if _one(known(), optimizer)),
            len(self.names),
        )
        if index == len(self.names):
            self.names.append(self._name(optimizer, frame))
            self._leaves.append(self._owned(optimizer))
            self._others.append(self._unrecorded(optimizer))
            self.settings.append(settings(optimizer))
        self._met[id(optimizer)] = _weak(optimizer), index
        return index

    def leaves(self) -> list[list[int]]:
        """The leaves that each has, or had."""
        for known, index in reversed(
            self._met.values()
        ):  # of one and its wrapper, what was met first
            optimizer = known()
            if optimizer is not None:
                self._leaves[index] = self._owned(optimizer)
        return self._leaves

    def grown(self) -> Iterator[str]:
        """The names of those that have got parameters since they were met, of which nothing is recorded."""
        for known, index in self._met.values():
            optimizer = known()
            if (
                optimizer is not None
                and self._unrecorded(optimizer) > self._others[index]
            ):
                yield self.names[index]

    def _unrecorded(self, optimizer: Any) -> int:
        return sum(1 for _ in parameters(optimizer)) - len(self._owned(optimizer))

    def _name(self, optimizer: Any, frame: FrameType | None) -> str:
        """The callers' own name for it, else its class, kept apart from those already taken."""
        name = called(optimizer, frame)
        if name not in self.names:
            return name
        return next(
            f"{name}#{n}"
            for n in range(2, len(self.names) + 3)
            if f"{name}#{n}" not in self.names
        )

    def forget(self) -> None:
        """Forget which optimizers there were; their names stay."""
        self._met.clear()


def called(item: Any, frame: FrameType | None) -> str:
    """What the callers call this object, else its class."""
    name = ""
    for _ in range(_CALLERS):
        if frame is None or name:
            break
        name, frame = variable(frame, item), frame.f_back
        name = "" if name == "self" else name  # a method of its own
    return name or type(item).__name__


def settings(optimizer: Any) -> dict[str, Any]:
    """Its class, and the plain numbers of its first group: learning rate, momentum, weight decay, betas.

    Of a wrapper, those of what it wraps. A number on a device is left out: nothing waits for it.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> found = settings(torch.optim.AdamW([w], lr=0.1))
    >>> found["class"], found["lr"], found["betas"], found["weight_decay"]
    ('AdamW', 0.1, [0.9, 0.999], 0.01)
    """
    for _ in range(_WRAPPED):
        inside = getattr(optimizer, "__dict__", {}).get("optimizer")
        if not isinstance(inside, torch.optim.Optimizer):
            break
        optimizer = inside
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    try:
        group = dict(optimizer.param_groups[0])
    except Exception:  # as above
        return found
    for name, value in group.items():
        plain = _plain(value)
        if (
            isinstance(name, str)
            and name not in ("params", "param_names", "class")
            and plain is not None
        ):
            found[name] = plain
    return found


def _plain(value: Any) -> Any:
    if type(value) in (list, tuple):
        many = [_plain(each) for each in value]
        return many if len(many) <= _FEW and None not in many else None
    if isinstance(value, torch.Tensor):
        one = value.is_cpu and value.numel() == 1 and not value.is_complex()
        return float(value.item()) if one and readable(value) else None
    return value if type(value) in (bool, int, float) else None


def _weak(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item)
    except TypeError:  # with slots: held, so that no other gets its id
        return lambda: item


def _one(a: Any, b: Any) -> bool:
    shared = getattr(a, "param_groups", None)
    if shared is not None and shared is getattr(b, "param_groups", None):
        return True
    return _holds(a, b) or _holds(b, a)


def _holds(outer: Any, inner: Any) -> bool:
    inside = getattr(outer, "__dict__", {})
    if not any(value is inner for value in inside.values()):
        return False
    mine = {id(p) for p in parameters(outer)}
    return not mine or any(id(p) in mine for p in parameters(inner))


_NESTED = "`{name}` is a nested tensor, whose gradients are not recorded"
_EXPECTED = (
    "expected a module, an optimizer, a parameter, a dict of named tensors, or a list of these, "
    "for example record(model, optimizer) or record(G=generator, D=discriminator)"
)


@dataclass
class Named:
    """The tensors to record, in order, with their names; and the optimizers met on the way."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    aliases: list[list[str]] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    wrapped: list[torch.nn.Module] = field(default_factory=list)
    shards: Shards = field(default_factory=Shards)
    notes: list[str] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of everything but names."""
        for held in (
            self.tensors,
            self.optimizers,
            self.modules,
            self.wrapped,
            self._index,
        ):
            held.clear()
        self.shards = Shards()

    @property
    def index(self) -> dict[int, int]:
        """The number of each tensor, by its id."""
        return dict(self._index)

    def add(self, name: str, tensor: Any, group: str) -> None:
        """A tensor that is there already (a tied weight) keeps its first name and gains an alias."""
        known = self._index.get(id(tensor))
        if known is not None:
            if name and name != self.names[known] and name not in self.aliases[known]:
                self.aliases[known].append(name)
            return
        if getattr(tensor, "is_nested", False):
            self.notes.append(_NESTED.format(name=name))
            return
        if not tensor.is_leaf:
            raise ValueError(
                f"{name!r} is not a leaf (it was computed by {tensor.grad_fn}), so backward does not keep "
                "its .grad; pass the parameters it was computed from"
            )
        if name in self.names:
            name = next(
                f"{name}#{n}"
                for n in range(2, len(self.names) + 3)
                if f"{name}#{n}" not in self.names
            )
        self._index[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.names.append(name)
        self.groups.append(group)
        self.aliases.append([])


def collect(
    objects: tuple[Any, ...], groups: Mapping[str, Any], frame: FrameType | None
) -> Named:
    """Name everything that was passed to `record`.

    Raises `TypeError` for something that holds no parameters, `ValueError` when nothing is
    left to record.
    """
    named = Named()
    modules = [item for item in objects if isinstance(item, torch.nn.Module)]
    # Optimizers last: a module knows better names for the same parameters.
    for item in sorted(objects, key=is_optimizer):
        prefix = (
            (variable(frame, item) or type(item).__name__)
            if len(modules) > 1 and item in modules
            else ""
        )
        _add(named, item, prefix, prefix, frame)
    for group, item in groups.items():
        _add(named, item, group, group, frame)
    for module in named.wrapped:
        _add_wholes(named, module)
    if not named.tensors:
        got = (
            ", ".join(type(item).__name__ for item in (*objects, *groups.values()))
            or "no arguments"
        )
        raise ValueError(f"nothing to record in {got}; {_EXPECTED}")
    lazy = [
        name
        for name, tensor in zip(named.names, named.tensors, strict=True)
        if is_lazy(tensor)
    ]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy[:3])} are made by the first forward; run one before you record"
        )
    if not any(tensor.requires_grad for tensor in named.tensors):
        raise ValueError(
            f"none of the {len(named.tensors)} tensors passed to record requires grad, so no backward will ever "
            "write to them; unfreeze some (tensor.requires_grad_()) or pass others"
        )
    return named


def _add(
    named: Named, item: Any, prefix: str, group: str, frame: FrameType | None
) -> None:
    def join(name: str) -> str:
        return ".".join(part for part in (prefix, name) if part)

    if isinstance(item, torch.nn.Module):
        named.wrapped.append(item)
        if isinstance(item, torch.nn.parallel.DistributedDataParallel):
            item = item.module  # names as in the model that was wrapped
        named.modules[prefix or f"model{len(named.modules) or ''}"] = item
        for name, tensor in item.named_parameters(remove_duplicate=False):
            named.add(join(name.replace("_fsdp_wrapped_module.", "")), tensor, group)
    elif is_optimizer(item):
        named.optimizers.append(item)
        _add_optimizer(named, item, prefix, group, frame)
    elif isinstance(item, torch.Tensor):
        named.add(
            join(variable(frame, item)) or f"tensor{len(named.tensors)}", item, group
        )
    elif isinstance(item, Mapping):
        for name, value in item.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"cannot record {name!r}, {a(value)}; expected a tensor in the dict"
                )
            named.add(join(str(name)), value, group)
    elif isinstance(item, Iterable) and not isinstance(item, str | bytes):
        for n, value in enumerate(item):
            if (
                isinstance(value, tuple)
                and len(value) == 2
                and isinstance(value[0], str)
            ):
                _add(named, {value[0]: value[1]}, prefix, group, frame)
            elif isinstance(value, torch.Tensor):
                named.add(join(variable(frame, value) or str(n)), value, group)
            else:
                _add(named, value, prefix, group, frame)
    else:
        raise TypeError(f"cannot record {item!r:.80}, {a(item)}; {_EXPECTED}")


def _add_wholes(named: Named, module: torch.nn.Module) -> None:
    """Beside the shards that FSDP shows, the whole gradients that it keeps until they are scattered."""
    for unit, whole, tensors in units(module):
        shards = [
            named._index[id(tensor)] for tensor in tensors if id(tensor) in named._index
        ]
        if not shards or id(unit) in named.shards.by_id:
            continue
        if hasattr(unit, "flat_param"):
            for i in shards:
                named.tensors[i] = Shard(named.tensors[i], unit)  # type: ignore[call-overload]
        name = " … ".join(
            dict.fromkeys([named.names[shards[0]], named.names[shards[-1]]])
        )
        named.add(f"{name} (unsharded)", whole, named.groups[shards[0]])
        sizes = [local(named.tensors[i]).numel() for i in shards]
        named.shards.add(unit, named._index[id(whole)], shards, sizes)


def _add_optimizer(
    named: Named, optimizer: Any, prefix: str, group: str, frame: FrameType | None
) -> None:
    for g, options in enumerate(optimizer.param_groups):
        known = options.get("param_names")
        for n, tensor in enumerate(options["params"]):
            name = (
                known[n] if known else variable(frame, tensor) or f"group{g}.param{n}"
            )
            if id(tensor) not in named._index:
                named.add(
                    ".".join(part for part in (prefix, name) if part), tensor, group
                )
