"""Resolve what to record: modules, optimizers, parameters, dicts of tensors, groups, and their names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accumviz.arguments import a
from accumviz.recorder.callsite import Caller, variable
from accumviz.recorder.distributed import Shard, Shards, units
from accumviz.recorder.transfer import local

# The variables of so many callers are searched for a name.
_CALLERS = 32
# What schedulers call the number of steps that they are made for.
_HORIZONS = ("total_steps", "T_max", "total_iters", "num_training_steps")
# A module's attribute of such a name changes nothing, nor does a parameter's of one of the last two.
_NO_SWITCHES = ("requires_grad", "require_grad", "requires_grads")
_NESTED = "`{name}` is a nested tensor, whose gradients are not recorded"
_EXPECTED = (
    "expected a module, an optimizer, a parameter, a dict of named tensors, or a list of these, "
    "for example record(model, optimizer) or record(G=generator, D=discriminator)"
)


def is_optimizer(item: Any) -> bool:
    """Return whether this steps like an optimizer: it is one, or wraps one and shows its groups."""
    if isinstance(item, torch.optim.Optimizer):
        return True
    if isinstance(item, nn.Module | Tensor):
        return False
    groups = getattr(item, "param_groups", None)
    return callable(getattr(item, "step", None)) and isinstance(groups, list)


def parameters(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer's parameters; none where a wrapper cannot say."""
    try:
        groups = list(optimizer.param_groups)
    except Exception:  # a wrapper's property may raise anything
        return
    for group in groups:
        yield from group["params"]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def distinct(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: this one, or with a number behind it."""
    number = 2
    distinct = name
    while distinct in taken:
        distinct = f"{name}#{number}"
        number += 1
    return distinct


# --- optimizers --------------------------------------------------------------------------------


class Optimizers:
    """Optimizers in the order in which they were met.

    An optimizer and what wraps it are one, as far as they share the list of groups. None is held:
    a loop may make a new one, with a state of the model's size, for each epoch. `owned` gives the
    numbers of the leaves that an optimizer has.
    """

    def __init__(self, owned: Callable[[Any], list[int]]) -> None:
        self.names: list[str] = []
        # Of each, the leaves that it had when it was last seen.
        self._leaves: list[list[int]] = []
        # Of each, how many parameters it had that are not recorded, when it was met.
        self._others: list[int] = []
        self._owned = owned
        # Every object met, the wrapped ones too, by id: how to get it, and its number.
        self._met: dict[int, tuple[Callable[[], Any], int]] = {}

    def meet(self, optimizer: Any, frame: Caller) -> int:
        """Return the number of this optimizer, or of what it wraps or is wrapped by."""
        met = self._met.get(id(optimizer))
        if met is not None and met[0]() is optimizer:
            return met[1]
        index = len(self.names)
        for key, (alive, number) in list(self._met.items()):
            other = alive()
            if other is None:
                del self._met[key]
            elif _are_one(other, optimizer):
                index = number
        if index == len(self.names):
            name = called(optimizer, frame)
            self.names.append(distinct(name, self.names))
            self._leaves.append(self._owned(optimizer))
            self._others.append(self._unrecorded(optimizer))
        self._met[id(optimizer)] = ref(optimizer), index
        return index

    def leaves(self) -> list[list[int]]:
        """Return the leaves that each has, or had."""
        # Of one and its wrapper, what was met first counts.
        for alive, index in reversed(self._met.values()):
            optimizer = alive()
            if optimizer is not None:
                self._leaves[index] = self._owned(optimizer)
        return self._leaves

    def grown(self) -> Iterator[str]:
        """Yield the names of those that have got parameters since they were met, of which nothing is recorded."""
        for alive, index in self._met.values():
            optimizer = alive()
            if optimizer is None:
                continue
            if self._unrecorded(optimizer) > self._others[index]:
                yield self.names[index]

    def _unrecorded(self, optimizer: Any) -> int:
        return len(list(parameters(optimizer))) - len(self._owned(optimizer))

    def forget(self) -> None:
        """Forget which optimizers there were; their names stay."""
        self._met.clear()


def names_of(item: Any, frame: Caller) -> Iterator[str]:
    """Yield what the callers call this object, from the nearest to the outermost."""
    for _ in range(_CALLERS):
        if frame is None:
            return
        name = variable(frame, item)
        frame = frame.f_back
        if name not in ("", "self"):  # a method of its own says `self`
            yield name


def called(item: Any, frame: Caller) -> str:
    """Return what the nearest caller calls this object, else its class."""
    return next(names_of(item, frame), type(item).__name__)


def frozen_in_vain(modules: Iterable[nn.Module]) -> list[str]:
    """Return what was set to False to freeze something and is nothing that torch knows, as `layer.requires_grad`."""
    found = []
    for module in modules:
        for path, part in (*module.named_modules(), *module.named_parameters()):
            vain = [name for name in _NO_SWITCHES if vars(part).get(name) is False]
            found += [_joined(path, name) for name in vain]
    return list(dict.fromkeys(found))


def horizon(scheduler: Any) -> int | None:
    """Return for how many steps a schedule was made; None where it does not say, or one after another has no end."""
    held = vars(scheduler)
    for function in held.get("lr_lambdas", ()):  # transformers makes partials
        held = getattr(function, "keywords", {})
    if "_milestones" in held:
        last = horizon(held["_schedulers"][-1])
        return last and held["_milestones"][-1] + last
    lengths = map(held.get, _HORIZONS)
    return next((length for length in lengths if isinstance(length, int)), None)


class Loaders:
    """The data loaders of a recording in the order in which they were met; none is held.

    A loop may hold a loader's iterator alone. What draws indices for both is the same.
    """

    def __init__(self) -> None:
        self._samplers: list[Callable[[], Any]] = []

    def number_of(self, source: Any) -> int:
        """Return the number of a loader, or of the one that an iterator is of."""
        sampler = getattr(source, "_index_sampler", source)
        for number, alive in enumerate(self._samplers):
            if alive() is sampler:
                return number
        try:
            self._samplers.append(ref(sampler))
        except TypeError:  # a plain list of indices
            self._samplers.append(lambda: sampler)
        return len(self._samplers) - 1


def _are_one(first: Any, second: Any) -> bool:
    """Return whether one of two optimizers wraps the other, and shares its groups."""
    groups = getattr(first, "param_groups", None)
    return groups is not None and groups is getattr(second, "param_groups", None)


# --- what is recorded --------------------------------------------------------------------------


@dataclass
class Named:
    """The tensors to record, in order, with their names; and the optimizers met on the way."""

    tensors: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    aliases: list[list[str]] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    wrapped: list[nn.Module] = field(default_factory=list)
    shards: Shards = field(default_factory=Shards)
    notes: list[str] = field(default_factory=list)
    # The number of each tensor, by its id.
    index: dict[int, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of everything but names."""
        self.tensors.clear()
        self.optimizers.clear()
        self.modules.clear()
        self.wrapped.clear()
        self.index.clear()
        self.shards = Shards()

    def add(
        self,
        name: str,
        tensor: Any,
        group: str,
    ) -> None:
        """Add a tensor; one that was added before (a tied weight) keeps its first name and gains an alias."""
        if id(tensor) in self.index:
            self._add_alias(self.index[id(tensor)], name)
            return
        if getattr(tensor, "is_nested", False):
            self.notes.append(_NESTED.format(name=name))
            return
        if not tensor.is_leaf:
            raise ValueError(
                f"{name!r} is not a leaf (it was computed by {tensor.grad_fn}), so backward does not keep "
                "its .grad; pass the parameters it was computed from"
            )
        self.index[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.names.append(distinct(name, self.names))
        self.groups.append(group)
        self.aliases.append([])

    def _add_alias(self, number: int, name: str) -> None:
        aliases = self.aliases[number]
        if name and name not in (self.names[number], *aliases):
            aliases.append(name)


def collect(
    objects: tuple[Any, ...],
    groups: Mapping[str, Any],
    frame: Caller,
) -> Named:
    """Name everything that was passed to `record`.

    Raises `TypeError` for something that holds no parameters, `ValueError` when nothing is
    left to record.
    """
    named = Named()
    given = [*_prefixed(objects, frame), *groups.items()]
    # Optimizers last: a module knows better names for the same parameters.
    for prefix, item in sorted(given, key=lambda argument: is_optimizer(argument[1])):
        _Collector(named, prefix, frame).add(item)
    for module in named.wrapped:
        _add_wholes(named, module)
    if not named.tensors:
        kinds = [type(item).__name__ for _, item in given]
        listed = ", ".join(kinds) or "no arguments"
        raise ValueError(f"nothing to record in {listed}; {_EXPECTED}")
    _check(named)
    return named


def _prefixed(objects: tuple[Any, ...], frame: Caller) -> Iterator[tuple[str, Any]]:
    """Yield each object with its prefix. Among several modules, each has a distinct name as its prefix."""
    modules = [item for item in objects if isinstance(item, nn.Module)]
    taken: list[str] = []
    for item in objects:
        prefix = ""
        if len(modules) > 1 and isinstance(item, nn.Module):
            name = variable(frame, item) or type(item).__name__
            prefix = distinct(name, taken)
            taken.append(prefix)
        yield prefix, item


def _check(named: Named) -> None:
    """Raise `ValueError` where the tensors are not made yet, or none requires grad."""
    for name, tensor in zip(named.names, named.tensors, strict=True):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} is made by the first forward; run one before you record"
            )
    if not any(tensor.requires_grad for tensor in named.tensors):
        raise ValueError(
            f"none of the {len(named.tensors)} tensors passed to record requires grad, so no backward will ever "
            "write to them; unfreeze some (tensor.requires_grad_()) or pass others"
        )


@dataclass
class _Collector:
    """Adds the tensors of one argument of `record`, under the name of its group."""

    named: Named
    group: str
    frame: Caller

    def add(self, item: Any) -> None:
        """Add a module, an optimizer, a tensor, or what holds some of these."""
        if isinstance(item, nn.Module):
            self._add_module(item)
        elif is_optimizer(item):
            self._add_optimizer(item)
        elif isinstance(item, Tensor):
            name = variable(self.frame, item)
            if not (name or self.group):
                name = f"tensor{len(self.named.tensors)}"
            self._add_tensor(name, item)
        elif isinstance(item, Mapping):
            self._add_mapping(item)
        elif isinstance(item, Iterable) and not isinstance(item, str | bytes):
            self._add_several(item)
        else:
            name = f"{self.group}=" if self.group else ""
            raise TypeError(f"cannot record {name}{item!r:.80}, {a(item)}; {_EXPECTED}")

    def _add_tensor(self, name: str, tensor: Any) -> None:
        self.named.add(_joined(self.group, name), tensor, self.group)

    def _add_module(self, module: Any) -> None:
        named = self.named
        named.wrapped.append(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module  # names as in the model that was wrapped
        named.modules[self.group or f"model{len(named.modules) or ''}"] = module
        for path, tensor in module.named_parameters(remove_duplicate=False):
            name = path.replace("_fsdp_wrapped_module.", "")
            self._add_tensor(name, tensor)

    def _add_optimizer(self, optimizer: Any) -> None:
        self.named.optimizers.append(optimizer)
        for g, options in enumerate(optimizer.param_groups):
            names = options.get("param_names")
            for n, tensor in enumerate(options["params"]):
                if id(tensor) not in self.named.index:
                    name = names[n] if names else variable(self.frame, tensor)
                    self._add_tensor(name or f"group{g}.param{n}", tensor)

    def _add_mapping(self, tensors: Mapping[Any, Any]) -> None:
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"cannot record {name!r}, {a(value)}; expected a tensor in the dict"
                )
            self._add_tensor(str(name), value)

    def _add_several(self, items: Iterable[Any]) -> None:
        for n, value in enumerate(items):
            if isinstance(value, Tensor):
                name = variable(self.frame, value) or str(n)
                self._add_tensor(name, value)
            else:
                self.add(value)


def _add_wholes(named: Named, module: nn.Module) -> None:
    """Add, beside the shards that FSDP shows, the whole gradients that it keeps until they are scattered."""
    for whole, tensors in units(module):
        recorded = [tensor for tensor in tensors if id(tensor) in named.index]
        shards = [named.index[id(tensor)] for tensor in recorded]
        if not shards or id(whole.unit) in named.shards.by_id:
            continue
        if hasattr(whole.unit, "flat_param"):
            for i in shards:
                named.tensors[i] = Shard(named.tensors[i], whole.unit)  # type: ignore[call-overload]
        first = shards[0]
        last = shards[-1]
        ends = dict.fromkeys([named.names[first], named.names[last]])
        name = " … ".join(ends)
        number = len(named.tensors)
        named.add(f"{name} (unsharded)", whole, named.groups[first])
        sizes = [local(named.tensors[i]).numel() for i in shards]
        named.shards.add(whole.unit, number, shards, sizes)
