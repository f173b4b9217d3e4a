"""Loops of two ranks with one mistake each, as those in `mistakes.py`."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD

from tests.corpus.of_ranks import accelerator, batches, net, replicated, sharded, texts, trained


def ddp_unsynced_step_a_cast(record):
    """The model is cast after it was wrapped, and DDP's hooks are lost."""
    model = replicated(net())
    model.double().float()  # wrong
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for x, y in batches(4):
            F.cross_entropy(model(x), y).backward()  # finding: ddp-unsynced-step
            optimizer.step()
            optimizer.zero_grad()


def ddp_unsynced_step_a_penalty(record):
    """The backward of a penalty, for which no forward through DDP has armed an all-reduce."""
    judge = replicated(net(1))
    optimizer = SGD(judge.parameters(), lr=0.1)
    with record(judge, optimizer):
        for x, _ in batches(4):
            loss = F.softplus(-judge(x)).mean()
            loss.backward()  # wrong
            x.requires_grad_()
            (slope,) = torch.autograd.grad(judge.module(x).sum(), x, create_graph=True)
            loss = slope.square().sum(1).mean()
            # right: loss = loss + F.softplus(-judge(x)).mean()
            loss.backward()  # finding: ddp-unsynced-step
            optimizer.step()
            optimizer.zero_grad()


def ddp_unsynced_step_a_second_backward(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for x, y in batches(4):
            out = model(x)
            first, second = F.cross_entropy(out, y), out.square().mean()
            first.backward(retain_graph=True)  # wrong
            second.backward()  # wrong, finding: ddp-unsynced-step
            # right: (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp_unsynced_step_a_tail(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for _ in range(2):
            for i, (x, y) in enumerate(batches(6)):
                with model.no_sync() if i % 4 != 3 else contextlib.nullcontext():
                    (F.cross_entropy(model(x), y) / (4 if i < 4 else 2)).backward()  # finding: ddp-unsynced-step
                if i in (3, 5):
                    # right: if i == 5: [dist.all_reduce(p.grad) for p in model.parameters()]
                    # right: if i == 5: [p.grad.div_(dist.get_world_size()) for p in model.parameters()]
                    optimizer.step()
                    optimizer.zero_grad()


def ddp_unsynced_step_around_the_wrapper(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for x, y in batches(4):
            out = model.module(x)  # wrong
            # right: out = model(x)
            F.cross_entropy(out, y).backward()  # finding: ddp-unsynced-step
            optimizer.step()
            optimizer.zero_grad()


def ddp_unsynced_step_framework(record):
    boss = accelerator()
    model = net()
    model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
    with record(model, optimizer.optimizer):
        for i, (x, y) in enumerate(batches(8)):
            with boss.no_sync(model) if i % 4 else contextlib.nullcontext():  # wrong
                # right: with boss.no_sync(model) if i % 4 != 3 else contextlib.nullcontext():
                boss.backward(F.cross_entropy(model(x), y) / 4)  # finding: ddp-unsynced-step
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def ddp_unsynced_step_plain(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            loss = F.cross_entropy(model(x), y) / 4  # wrong
            model.require_backward_grad_sync = i % 4 == 3
            # right: loss = F.cross_entropy(model(x), y) / 4
            loss.backward()  # finding: ddp-unsynced-step
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def fsdp2_zero_keeps_unsharded_plain(record):
    with trained(record, sharded(net())) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()  # finding: fsdp2-zero-keeps-unsharded
            for i, (x, y) in enumerate(batches(6)):
                last = i % 4 == 3  # wrong
                # right: last = i in (3, 5)
                model.set_requires_gradient_sync(last)
                loss = F.cross_entropy(model(x), y) / (4 if i < 4 else 2)
                loss.backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()


def gan_gradient_leak_framework(record):
    boss = accelerator()
    maker, judge = net(4), net(1)
    of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    maker, judge, of_maker, of_judge = boss.prepare(maker, judge, of_maker, of_judge)
    with record(maker=maker, judge=judge, of_maker=of_maker.optimizer, of_judge=of_judge.optimizer):
        for x, _ in batches(4):
            fake = maker(torch.randn(2, 4))
            boss.backward(F.softplus(-judge(fake)).mean())  # finding: gan-gradient-leak
            of_maker.step()
            of_maker.zero_grad()
            # right: of_judge.zero_grad()
            boss.backward(F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean())
            of_judge.step()
            of_judge.zero_grad()


def gan_gradient_leak_plain(record):
    maker, judge = replicated(net(4)), replicated(net(1))
    of_maker, of_judge = SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.1)
    with record(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge):
        for x, _ in batches(4):
            fake = maker(torch.randn(2, 4))
            F.softplus(-judge(fake)).mean().backward()  # finding: gan-gradient-leak
            of_maker.step()
            of_maker.zero_grad()
            # right: of_judge.zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            of_judge.step()
            of_judge.zero_grad()


def no_sync_excludes_forward_an_evaluation_with_gradients(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            if i % 4 == 0:
                with contextlib.nullcontext():  # wrong
                    # right: with torch.no_grad():
                    F.cross_entropy(model(x), y)
            with model.no_sync() if i % 4 != 3 else contextlib.nullcontext():
                (F.cross_entropy(model(x), y) / 4).backward()  # finding: no-sync-excludes-forward
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def no_sync_excludes_forward_framework(record):
    boss = accelerator()
    model = net()
    model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
    with record(model, optimizer.optimizer):
        for i, (x, y) in enumerate(batches(8)):
            loss = F.cross_entropy(model(x), y) / 4  # wrong
            with boss.no_sync(model) if i % 4 != 3 else contextlib.nullcontext():
                # right: loss = F.cross_entropy(model(x), y) / 4
                boss.backward(loss)  # finding: no-sync-excludes-forward
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def no_sync_excludes_forward_plain(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            last = i % 4 == 3
            loss = F.cross_entropy(model(x), y) / 4  # wrong
            with contextlib.nullcontext() if last else model.no_sync():
                # right: loss = F.cross_entropy(model(x), y) / 4
                loss.backward()  # finding: no-sync-excludes-forward
            if last:
                optimizer.step()
                optimizer.zero_grad()


def rank_token_weight_framework(record):
    boss = accelerator()
    model = net()
    model, optimizer = boss.prepare(model, SGD(model.parameters(), lr=0.1))
    with record(model, optimizer.optimizer):
        for window in texts():
            count = torch.tensor(float(sum(len(y) for _, y in window)))
            # right: count = boss.reduce(count, "mean")
            for x, y in window:
                with boss.no_sync(model) if y is window[0][1] else contextlib.nullcontext():
                    loss = F.cross_entropy(model(x), y, reduction="sum") / count.item()
                    boss.backward(loss)  # finding: rank-token-weight
            optimizer.step()
            optimizer.zero_grad()


def rank_token_weight_plain(record):
    with trained(record, replicated(net())) as (model, optimizer):
        for window in texts():
            count = torch.tensor(float(sum(len(y) for _, y in window)))
            # right: dist.all_reduce(count)
            # right: count /= dist.get_world_size()
            for i, (x, y) in enumerate(window):
                with model.no_sync() if i == 0 else contextlib.nullcontext():
                    loss = F.cross_entropy(model(x), y, reduction="sum") / count.item()
                    loss.backward()  # finding: rank-token-weight
            optimizer.step()
            optimizer.zero_grad()


def summed_over_ranks_plain(record):
    with trained(record, net()) as (model, optimizer):
        for i, (x, y) in enumerate(batches(8)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)  # finding: summed-over-ranks
                    # right: parameter.grad /= dist.get_world_size()
                optimizer.step()
                optimizer.zero_grad()
