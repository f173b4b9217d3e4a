"""The mistakes of ranks and networks, each as a plain loop and in three disguises: found on its line, and not without.

Loops as text: `# ill` marks what only the mistaken one has, `# right` what only its healthy twin, and `here` the line
that is to be found. They are real loops on two real processes, which play all of
them one after the other; the tests ask the ledgers that they leave.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import re
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import accumviz as av
from accumviz.checks.report import Finding
from accumviz.ledger.ledger import Ledger

# ---------------------------------------------------------------- what the loops import


def net(out: int = 3) -> nn.Module:
    """The same weights on every rank, and each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, out))
    torch.manual_seed(1 + dist.get_rank())
    return model


def batches(many: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's own."""
    return [(torch.randn(2, 4), torch.randint(0, 3, (2,))) for _ in range(many)]


def texts() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Windows of two texts, of other lengths on every rank."""
    lengths = [(3, 1), (2, 4)] if dist.get_rank() == 0 else [(5, 9), (8, 3)]
    return [[(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in window] for window in lengths]


groups: list[Any] = []


def replicated(model: nn.Module, **options: Any) -> Any:
    """In a group of its own, which ends with the loop: then nobody waits for a rank that has gone."""
    groups.append(dist.new_group())
    return DDP(model, process_group=groups[-1], **options)


def sharded(model: nn.Module) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def flat(model: nn.Module) -> Any:
    with warnings.catch_warnings(action="ignore"):  # deprecated
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def accelerator(*handlers: Any) -> Any:
    """An Accelerator that knows of none before it: what they share is the process's."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, kwargs_handlers=list(handlers))


# ---------------------------------------------------------------- the loops

HEAD = """
import contextlib
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from tests.test_disguises_of_ranks import accelerator, batches, flat, net, replicated, sharded, texts
"""
# A framework in the manner of Fabric, which lies where libraries do.
SLIM = """
import contextlib
from torch import nn


class Slim:
    def __init__(self, strategy):
        self.strategy = strategy

    def setup(self, module, make, **settings):
        module = self.strategy(module)
        return module, make(module.parameters(), **settings)

    @contextlib.contextmanager
    def no_backward_sync(self, module, enabled=True):
        with module.no_sync() if enabled else contextlib.nullcontext():
            yield

    def backward(self, loss):
        loss.backward()

    def clip_gradients(self, module, most):
        return nn.utils.clip_grad_norm_(module.parameters(), most)

    def clear(self, optimizer):
        optimizer.zero_grad()
"""
PLAIN, NAMES, HELPERS, FRAMEWORK = "plain", "names", "helpers", "framework"
DISGUISES = (PLAIN, NAMES, HELPERS, FRAMEWORK)


FORMS: dict[tuple[str, str], dict[str, str]] = {}
# The same loop in other words.
OTHERS = {
    "model": "policy",
    "optimizer": "sgd",
    "loss": "objective",
    "x": "inputs",
    "y": "aims",
    "i": "turn",
    "window": "chunk",
    "last": "fire",
    "count": "denominator",
    "of_judge": "critic_sgd",
    "of_maker": "actor_sgd",
    "judge": "critic",
    "maker": "actor",
    "fake": "sample",
}


def form(rule: str, disguise: str, train: str, **modules: str) -> None:
    """A loop: its files, `train.py` with `loop(record)` among them."""
    files = {"train.py": train} | {f"{name}.py": text for name, text in modules.items()}
    FORMS[rule, disguise] = files = {name: HEAD + textwrap.dedent(text) for name, text in files.items()}
    if disguise == PLAIN:
        words = re.compile(rf"(?<![.\w])({'|'.join(OTHERS)})\b")
        FORMS[rule, NAMES] = {name: words.sub(lambda word: OTHERS[word[1]], text) for name, text in files.items()}


form(
    "ddp-unsynced-step",
    PLAIN,
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(8)):
                loss = F.cross_entropy(model(x), y) / 4  # ill
                model.require_backward_grad_sync = i % 4 == 3
                loss = F.cross_entropy(model(x), y) / 4  # right
                loss.backward()  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "ddp-unsynced-step",
    HELPERS,
    """
    import steps

    class Trainer:
        def __init__(self, every):
            self.every, self.net = every, replicated(net())
            self.sgd = SGD(self.net.parameters(), lr=0.1)

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y) / self.every

        def quiet(self, i):
            self.net.require_backward_grad_sync = i % self.every == self.every - 1

        def fit(self, record):
            with record(self.net, self.sgd):
                for i, (x, y) in enumerate(batches(8)):
                    steps.learn(self.forward(x, y), self.quiet(i))  # ill
                    self.quiet(i)  # right
                    steps.learn(self.forward(x, y), ...)  # right
                    if i % self.every == self.every - 1:
                        self.sgd.step()
                        self.sgd.zero_grad()

    def loop(record):
        Trainer(4).fit(record)
    """,
    steps="""
    def learn(loss, _):
        loss.backward()  # here
    """,
)
form(
    "ddp-unsynced-step",
    FRAMEWORK,
    """
    def loop(record):
        boss = accelerator()
        model = net()
        model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
        with record(model, optimizer.optimizer):
            for i, (x, y) in enumerate(batches(8)):
                with boss.no_sync(model) if i % 4 else contextlib.nullcontext():  # ill
                with boss.no_sync(model) if i % 4 != 3 else contextlib.nullcontext():  # right
                    boss.backward(F.cross_entropy(model(x), y) / 4)  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "uneven-rank-backwards",
    PLAIN,
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(6 - 2 * dist.get_rank())):  # ill
            for i, (x, y) in enumerate(batches(4)):  # right
                last = i % 2 == 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 2
                    loss.backward()  # here
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "uneven-rank-backwards",
    HELPERS,
    """
    import steps

    def loop(record):
        trainer = steps.Trainer(record)
        with contextlib.nullcontext():  # ill
        with trainer.net.join():  # right
            trainer.fit(batches(6 if dist.get_rank() == 0 else 4))
    """,
    steps="""
    class Trainer:
        def __init__(self, record):
            self.net, self.record = replicated(net()), record
            self.sgd = SGD(self.net.parameters(), lr=0.1)

        def step(self, pair):
            def learn(x, y):
                F.cross_entropy(self.net(x), y).div(len(pair)).backward()  # here

            first, last = pair
            with self.net.no_sync():
                learn(*first)
            learn(*last)
            self.sgd.step()
            self.sgd.zero_grad()

        def fit(self, data):
            with self.record(self.net, self.sgd):
                for start in range(0, len(data), 2):
                    self.step(data[start : start + 2])
    """,
)
form(
    "uneven-rank-backwards",
    FRAMEWORK,
    """
    from slim import Slim

    def loop(record):
        slim = Slim(replicated)
        model, optimizer = slim.setup(net(), SGD, lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(6 - 2 * dist.get_rank())):  # ill
            for i, (x, y) in enumerate(batches(6)):  # right
                with slim.no_backward_sync(model, enabled=i % 2 == 0):
                    slim.backward(F.cross_entropy(model(x), y) / 2)  # here
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "no-sync-excludes-forward",
    PLAIN,
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(8)):
                last = i % 4 == 3
                loss = F.cross_entropy(model(x), y) / 4  # ill
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 4  # right
                    loss.backward()  # here
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "no-sync-excludes-forward",
    HELPERS,
    """
    import steps

    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        data = batches(8)
        with record(model, optimizer):
            for window in (data[:4], data[4:]):
                for x, y in window:

                    def forward(x=x, y=y):
                        return F.cross_entropy(model(x), y) / 4

                    loss = forward()  # ill
                    forward = lambda loss=loss: loss  # ill
                    steps.learn(model, forward, quiet=x is not window[-1][0])
                optimizer.step()
                optimizer.zero_grad()
    """,
    steps="""
    def learn(model, forward, quiet):
        if not quiet:
            return forward().backward()
        with model.no_sync():
            forward().backward()  # here
    """,
)
form(
    "no-sync-excludes-forward",
    FRAMEWORK,
    """
    def loop(record):
        boss = accelerator()
        model = net()
        model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
        with record(model, optimizer.optimizer):
            for i, (x, y) in enumerate(batches(8)):
                loss = F.cross_entropy(model(x), y) / 4  # ill
                with boss.no_sync(model) if i % 4 != 3 else contextlib.nullcontext():
                    loss = F.cross_entropy(model(x), y) / 4  # right
                    boss.backward(loss)  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "rank-token-weight",
    PLAIN,
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for window in texts():
                count = torch.tensor(float(sum(len(y) for _, y in window)))
                dist.all_reduce(count)  # right
                count /= dist.get_world_size()  # right
                for i, (x, y) in enumerate(window):
                    with model.no_sync() if i == 0 else contextlib.nullcontext():
                        loss = F.cross_entropy(model(x), y, reduction="sum") / count.item()
                        loss.backward()  # here
                optimizer.step()
                optimizer.zero_grad()
    """,
)
form(
    "rank-token-weight",
    HELPERS,
    """
    import steps

    class Trainer:
        def __init__(self):
            self.net = replicated(net())
            self.sgd = SGD(self.net.parameters(), lr=0.1)

        def compute_loss(self, x, y, items):
            return F.cross_entropy(self.net(x), y, reduction="none").sum() / items

        def training_step(self, inputs, items):
            loss = self.compute_loss(*inputs, items)
            steps.backward(loss)

        def fit(self, record):
            with record(self.net, self.sgd):
                for window in texts():
                    items = float(steps.items(window))
                    with self.net.no_sync():
                        self.training_step(window[0], items)
                    self.training_step(window[1], items)
                    self.sgd.step()
                    self.sgd.zero_grad()

    def loop(record):
        Trainer().fit(record)
    """,
    steps="""
    def items(window):
        own = torch.tensor(float(sum(len(y) for _, y in window)))
        dist.all_reduce(own)  # right
        own /= dist.get_world_size()  # right
        return own

    def backward(loss):
        loss.backward()  # here
    """,
)
form(
    "rank-token-weight",
    FRAMEWORK,
    """
    def loop(record):
        boss = accelerator()
        model = net()
        model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
        with record(model, optimizer.optimizer):
            for window in texts():
                count = torch.tensor(float(sum(len(y) for _, y in window)))
                count = boss.reduce(count, "mean")  # right
                for x, y in window:
                    with boss.no_sync(model) if y is window[0][1] else contextlib.nullcontext():
                        boss.backward(F.cross_entropy(model(x), y, reduction="sum") / count.item())  # here
                optimizer.step()
                optimizer.zero_grad()
    """,
)
form(
    "fsdp2-zero-keeps-unsharded",
    PLAIN,
    """
    def loop(record):
        model = sharded(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for _ in range(2):
                optimizer.zero_grad()  # here
                for i, (x, y) in enumerate(batches(6)):
                    last = i % 4 == 3  # ill
                    last = i in (3, 5)  # right
                    model.set_requires_gradient_sync(last)
                    loss = F.cross_entropy(model(x), y) / (4 if i < 4 else 2)
                    loss.backward()
                    if last:
                        optimizer.step()
                        optimizer.zero_grad()
    """,
)
form(
    "fsdp2-zero-keeps-unsharded",
    HELPERS,
    """
    import steps

    class Trainer:
        def __init__(self, record):
            self.net, self.record = sharded(net()), record
            self.sgd = SGD(self.net.parameters(), lr=0.1)

        def learn(self, x, y, last):
            self.net.set_requires_gradient_sync(last)
            loss = F.cross_entropy(self.net(x), y) / 3
            loss.backward()

        def window(self, pairs, odd):
            for x, y in pairs[:-1]:
                self.learn(x, y, False)
            if odd:  # ill
                return steps.again(self)  # ill
            self.learn(*pairs[-1], True)
            self.sgd.step()
            steps.again(self)

        def fit(self):
            with self.record(self.net, self.sgd):
                for turn in range(4):
                    self.window(batches(3), odd=turn == 1)

    def loop(record):
        Trainer(record).fit()
    """,
    steps="""
    def again(trainer):
        trainer.sgd.zero_grad(set_to_none=True)  # here
    """,
)
form(
    "fsdp2-zero-keeps-unsharded",
    FRAMEWORK,
    """
    from slim import Slim

    def loop(record):
        slim = Slim(sharded)
        model, optimizer = slim.setup(net(), SGD, lr=0.1)
        data = batches(8)
        with record(model, optimizer):
            for _ in range(2):
                slim.clear(optimizer)  # here
                for i in range(6):  # ill
                for i in range(8):  # right
                    x, y = data[i]
                    model.set_requires_gradient_sync(i % 4 == 3)
                    slim.backward(F.cross_entropy(model(x), y) / 4)
                    if i % 4 == 3:
                        optimizer.step()
                        optimizer.zero_grad()
    """,
)
form(
    "fsdp-no-sync-memory",
    PLAIN,
    """
    def loop(record):
        model = sharded(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(8)):
                last = i % 4 == 3
                model.set_requires_gradient_sync(last)  # ill
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()  # here
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "fsdp-no-sync-memory",
    HELPERS,
    """
    import steps

    def loop(record):
        model = flat(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        data = batches(8)
        with record(model, optimizer):
            for window in (data[:4], data[4:]):
                steps.accumulate(model, [lambda x=x, y=y: F.cross_entropy(model(x), y) / 4 for x, y in window])
                optimizer.step()
                optimizer.zero_grad()
    """,
    steps="""
    def accumulate(model, forwards):
        def backward(forward):
            forward().backward()  # here

        *before, last = forwards
        with model.no_sync():  # ill
        with contextlib.nullcontext():  # right
            for forward in before:
                backward(forward)
        backward(last)
    """,
)
form(
    "fsdp-no-sync-memory",
    FRAMEWORK,
    """
    from slim import Slim

    def loop(record):
        slim = Slim(flat)
        model, optimizer = slim.setup(net(), SGD, lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(8)):
                with slim.no_backward_sync(model, enabled=i % 4 != 3):  # ill
                with slim.no_backward_sync(model, enabled=False):  # right
                    slim.backward(F.cross_entropy(model(x), y) / 4)  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "fsdp1-local-clip",
    PLAIN,
    """
    def loop(record):
        model = flat(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(12)):
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
                if i % 4 == 3:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # ill, here
                    model.clip_grad_norm_(0.01)  # right
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "fsdp1-local-clip",
    HELPERS,
    """
    import steps

    class Trainer:
        most = 0.01

        def __init__(self):
            self.net = flat(net())
            self.sgd = SGD(self.net.parameters(), lr=0.1)

        def fit(self, record):
            with record(self.net, self.sgd):
                for i, (x, y) in enumerate(batches(12)):
                    loss = F.cross_entropy(self.net(x), y) / 4
                    loss.backward()
                    if i % 4 == 3:
                        steps.step(self)

    def loop(record):
        Trainer().fit(record)
    """,
    steps="""
    of = nn.utils.clip_grad_norm_

    def step(trainer):
        of(trainer.net.parameters(), trainer.most)  # ill, here
        trainer.net.clip_grad_norm_(trainer.most)  # right
        trainer.sgd.step()
        trainer.sgd.zero_grad()
    """,
)
form(
    "fsdp1-local-clip",
    FRAMEWORK,
    """
    from slim import Slim

    def loop(record):
        slim = Slim(flat)
        model, optimizer = slim.setup(net(), SGD, lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(12)):
                slim.backward(F.cross_entropy(model(x), y) / 4)
                if i % 4 == 3:
                    slim.clip_gradients(model, 0.01)  # ill, here
                    model.clip_grad_norm_(0.01)  # right
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "ddp-static-graph-no-sync",
    PLAIN,
    """
    def loop(record):
        model = replicated(net(), static_graph=True)  # ill
        model = replicated(net())  # right
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(8)):
                last = i % 4 == 3
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 4
                    loss.backward()  # here
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "ddp-static-graph-no-sync",
    HELPERS,
    """
    import steps

    class Trainer:
        def __init__(self, **settings):
            self.net = replicated(net(), **settings)
            self.sgd = SGD(self.net.parameters(), lr=0.1)

        def fit(self, record):
            with record(self.net, self.sgd):
                data = batches(6)
                for start in (0, 3):
                    steps.window(self.net, data[start : start + 3])
                    self.sgd.step()
                    self.sgd.zero_grad()

    def loop(record):
        Trainer(**steps.settings).fit(record)
    """,
    steps="""
    settings = {"static_graph": True}  # ill
    settings = {}  # right

    def window(model, pairs):
        def learn(x, y):
            F.cross_entropy(model(x), y).div(3).backward()  # here

        with model.no_sync():
            for pair in pairs[:-1]:
                learn(*pair)
        learn(*pairs[-1])
    """,
)
form(
    "ddp-static-graph-no-sync",
    FRAMEWORK,
    """
    def loop(record):
        from accelerate import DistributedDataParallelKwargs

        boss = accelerator(DistributedDataParallelKwargs(static_graph=True))  # ill
        boss = accelerator()  # right
        model = net()
        model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
        with record(model, optimizer.optimizer):
            for i, (x, y) in enumerate(batches(8)):
                with boss.no_sync(model) if i % 4 != 3 else contextlib.nullcontext():
                    boss.backward(F.cross_entropy(model(x), y) / 4)  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "gan-gradient-leak",
    PLAIN,
    """
    def loop(record):
        maker, judge = replicated(net(4)), replicated(net(1))
        of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
        with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
            for x, _ in batches(4):
                fake = maker(torch.randn(2, 4))
                F.softplus(-judge(fake)).mean().backward()  # here
                of_maker.step()
                of_maker.zero_grad()
                of_judge.zero_grad()  # right
                (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
                of_judge.step()
                of_judge.zero_grad()
    """,
)
form(
    "gan-gradient-leak",
    HELPERS,
    """
    import steps

    class Trainer:
        def __init__(self):
            self.maker, self.judge = replicated(net(4)), replicated(net(1))
            self.of_maker = SGD(self.maker.parameters(), lr=0.1)
            self.of_judge = SGD(self.judge.parameters(), lr=0.1)

        def make(self, noise):
            self.judge.requires_grad_(False)  # right
            fake = self.maker(noise)
            steps.learn(F.softplus(-self.judge(fake)).mean(), self.of_maker)
            self.judge.requires_grad_(True)  # right
            return fake.detach()

        def tell(self, real, fake):
            loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()
            loss.backward()
            self.of_judge.step()
            self.of_judge.zero_grad()

        def fit(self, record):
            networks = {"maker": self.maker, "judge": self.judge}
            with record(**networks, of_maker=self.of_maker, of_judge=self.of_judge):
                for x, _ in batches(4):
                    self.tell(x, self.make(torch.randn(2, 4)))

    def loop(record):
        Trainer().fit(record)
    """,
    steps="""
    def learn(loss, optimizer):
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()
    """,
)
form(
    "gan-gradient-leak",
    FRAMEWORK,
    """
    def loop(record):
        boss = accelerator()
        maker, judge = net(4), net(1)
        of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
        maker, judge, of_maker, of_judge = boss.prepare(maker, judge, of_maker, of_judge)
        with record(maker=maker, judge=judge, of_maker=of_maker.optimizer, of_judge=of_judge.optimizer):
            for x, _ in batches(4):
                fake = maker(torch.randn(2, 4))
                boss.backward(F.softplus(-judge(fake)).mean())  # here
                of_maker.step()
                of_maker.zero_grad()
                of_judge.zero_grad()  # right
                boss.backward(F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean())
                of_judge.step()
                of_judge.zero_grad()
    """,
)

# ---------------------------------------------------------------- more ways to one mistake, and what is none

form(
    "ddp-unsynced-step",
    "one of two modules",
    """
    def loop(record):
        body, head = replicated(nn.Linear(4, 6)), replicated(nn.Linear(6, 3))
        optimizer = SGD([*body.parameters(), *head.parameters()], lr=0.1)
        with record(body=body, head=head, optimizer=optimizer):
            for i, (x, y) in enumerate(batches(8)):
                head.require_backward_grad_sync = i % 4 == 3
                body.require_backward_grad_sync = i % 4 == 0  # ill
                body.require_backward_grad_sync = i % 4 == 3  # right
                (F.cross_entropy(head(body(x)), y) / 4).backward()  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "ddp-unsynced-step",
    "a second backward",
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for x, y in batches(4):
                out = model(x)
                first, second = F.cross_entropy(out, y), out.square().mean()
                first.backward(retain_graph=True)  # ill
                second.backward()  # ill, here
                (first + second).backward()  # right
                optimizer.step()
                optimizer.zero_grad()
    """,
)
form(
    "ddp-unsynced-step",
    "a tail",
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for _ in range(2):
                for i, (x, y) in enumerate(batches(6)):
                    with model.no_sync() if i % 4 != 3 else contextlib.nullcontext():
                        (F.cross_entropy(model(x), y) / (4 if i < 4 else 2)).backward()  # here
                    if i in (3, 5):
                        if i == 5:  # right
                            for p in model.parameters():  # right
                                dist.all_reduce(p.grad)  # right
                                p.grad /= dist.get_world_size()  # right
                        optimizer.step()
                        optimizer.zero_grad()
    """,
)
form(
    "uneven-rank-backwards",
    "a forward without gradients",
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(6 - 2 * dist.get_rank())):  # ill
            for i, (x, y) in enumerate(batches(4)):  # right
                last = i % 2 == 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 2
                    if dist.get_rank() == 0:
                        with torch.no_grad():
                            model(x)
                    loss.backward()  # here
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
form(
    "no-sync-excludes-forward",
    "an evaluation with gradients",
    """
    def loop(record):
        model = replicated(net())
        optimizer = SGD(model.parameters(), lr=0.1)
        with record(model, optimizer):
            for i, (x, y) in enumerate(batches(8)):
                if i % 4 == 0:
                    with contextlib.nullcontext():  # ill
                    with torch.no_grad():  # right
                        F.cross_entropy(model(x), y)
                with model.no_sync() if i % 4 != 3 else contextlib.nullcontext():
                    (F.cross_entropy(model(x), y) / 4).backward()  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)

# What stops a script: one that waits for a rank that has gone, and one that torch refuses.
STOPPED = {"uneven-rank-backwards", "ddp-static-graph-no-sync"}
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
RULES = list(dict.fromkeys(rule for rule, _ in FORMS))


# ---------------------------------------------------------------- their processes


def written(folder: Path) -> None:
    """The files of all loops, and those of the framework."""
    for name, text in {"__init__": "from slim.fabric import Slim\n", "fabric": SLIM}.items():
        path = folder / "site-packages" / "slim" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for (rule, disguise), files in FORMS.items():
        for ill in (True, False):
            for name in files:
                path = folder / f"{rule}-{disguise}-{ill}" / name
                path.parent.mkdir(exist_ok=True)
                path.write_text("\n".join(side(files[name], ill)))


def side(text: str, ill: bool) -> list[str]:
    """The lines of a loop with its mistake, or without."""
    return [line for line in text.splitlines() if not re.search("# right$" if ill else "# ill(, here)?$", line)]


def play(folder: Path, loops: list[tuple[str, str, bool]]) -> list[Ledger]:
    """On one rank, all of them in turn."""
    from accumviz.recorder import callsite

    gc.freeze()  # what is there by now stays, and needs no looking through after each loop
    packages = str(folder / "site-packages")
    sys.path.append(packages)
    callsite._LIBRARIES = (*callsite._LIBRARIES, packages + "/")
    return [play_one(folder / f"{rule}-{disguise}-{ill}", ill and rule in STOPPED) for rule, disguise, ill in loops]


def play_one(folder: Path, stops: bool) -> Ledger:
    recordings: list[Any] = []

    def record(*models: Any, **named: Any) -> Any:
        recordings.append(av.record(*models, **named))
        return recordings[0]

    sys.modules.pop("steps", None)
    sys.path.insert(0, str(folder))
    path = folder / "train.py"
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with contextlib.suppress(RuntimeError) if stops else contextlib.nullcontext():
        names["loop"](record)
    sys.path.remove(str(folder))
    names.clear()
    while groups:
        dist.destroy_process_group(groups.pop())
    gc.collect()  # what still holds the group keeps another rank waiting
    found: Ledger = recordings[0].ledger
    return found


Key = tuple[str, str, bool]


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, list[Ledger]]:
    """Of each loop, by its rule, its disguise and whether it has the mistake: the ledgers of both ranks."""
    folder = tmp_path_factory.mktemp("loops")
    written(folder)
    possible = [key for key, files in FORMS.items() if HAS_ACCELERATE or "accelerator(" not in files["train.py"]]
    loops = [(*key, ill) for key in possible for ill in (True, False)]
    found = av.distribute(play, folder=folder, loops=loops, timeout=300).returned
    return {loop: list(each) for loop, each in zip(loops, zip(*found, strict=True), strict=True)}


def of(ledgers: dict[Key, list[Ledger]], rule: str, disguise: str, ill: bool) -> list[Ledger]:
    if (rule, disguise, ill) not in ledgers:
        pytest.skip("accelerate is not installed")
    return ledgers[rule, disguise, ill]


def marked(rule: str, disguise: str) -> tuple[str, int]:
    """The file and the line that are to be found."""
    lines = [
        (name, n)
        for name, text in FORMS[rule, disguise].items()
        for n, line in enumerate(side(text, ill=True), 1)
        if line.endswith("here")
    ]
    (found,) = lines
    return found


def serious(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "note"]


EVERY = [pytest.param(*key, id="-".join(key)) for key in FORMS]


def test_each_rule_has_a_plain_loop_and_three_disguises() -> None:
    assert {(rule, disguise) for rule in RULES for disguise in DISGUISES} <= FORMS.keys()


@pytest.mark.parametrize(("rule", "disguise"), EVERY)
def test_the_mistake_is_found_on_its_line(ledgers: dict[Key, list[Ledger]], rule: str, disguise: str) -> None:
    merged = Ledger.merge(of(ledgers, rule, disguise, True))
    report = av.check(merged)
    (finding,) = serious(report.findings) or report.findings
    assert (finding.rule, (finding.file, finding.line)) == (rule, marked(rule, disguise)), report
    via = merged[finding.event].via
    assert via.startswith(("accelerate/", "slim/") if disguise == FRAMEWORK else "") and bool(via) == (
        disguise == FRAMEWORK
    )


@pytest.mark.parametrize(("rule", "disguise"), EVERY)
def test_its_twin_is_healthy(ledgers: dict[Key, list[Ledger]], rule: str, disguise: str) -> None:
    own = of(ledgers, rule, disguise, False)
    for ledger in (*own, Ledger.merge(own)):
        report = av.check(ledger)
        assert report.healthy and serious(report.findings) == [], report
        assert rule not in [finding.rule for finding in report.findings], report
