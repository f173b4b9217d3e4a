"""Loops as text, each with a mistake on a marked line: found there, in disguise, too; and cured by its own cure."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accumviz as av
from accumviz.checks.cures import flushed
from accumviz.checks.diffs import placed
from accumviz.checks.report import Finding, Report
from accumviz.ledger.events import Event
from tests.by_hand import windows


def net(out: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out))


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 8), torch.randint(0, 5, (n,))) for n in sizes]


class Mistake(NamedTuple):
    """What a loop does wrong: the line with `# here` is the one to be found.

    `right` are replacements that make a healthy twin, `disguise` those that make it look different.
    """

    rule: str
    text: str
    right: dict[str, str]
    disguise: dict[str, str]


MISTAKES: dict[str, Mistake] = {}


def mistake(name: str, rule: str, text: str, right: dict[str, str], disguise: dict[str, str] | None = None) -> None:
    MISTAKES[name] = Mistake(rule, textwrap.dedent(text).strip() + "\n", right, disguise or {})


mistake(
    "undivided",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"loss.backward()": "(loss / 4).backward()"},
    {"loss.backward()": "torch.autograd.backward(loss)"},
)
mistake(
    "an undivided loss beside a divided one",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = F.cross_entropy(out, y) / 4 + 0.3 * out.square().mean()
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"0.3 *": "0.3 / 4 *"},
    {"0.3 *": "weight *", "model, optimizer)": "model, optimizer, weight=0.3)"},
)
mistake(
    "a bare loss beside a divided one",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            (F.cross_entropy(out, y) / 4 + out.square().mean()).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {" / 4 + out.square().mean()": " / 4 + out.square().mean() / 4"},
    {"out.square().mean()": "out.square().sum() / out.numel()"},
)
mistake(
    "an undivided loss beside a divided one, in windows of two lengths",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        weight = torch.rand(()).item()
        for i, (x, y) in enumerate(batches(*[2] * 10)):
            out = model(x)
            loss = F.cross_entropy(out, y) / (4 if i < 8 else 2) + weight * out.square().mean()
            loss.backward()  # here
            if i % 4 == 3 or i == 9:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"weight *": "weight / (4 if i < 8 else 2) *"},
    {"loss = ": "loss = 1.0 * "},
)
mistake(
    "a second backward with an undivided loss",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            (F.cross_entropy(out, y) / 4).backward(retain_graph=True)
            (0.3 * out.square().mean()).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"0.3 *": "0.3 / 4 *"},
    {"(0.3 * out.square().mean()).backward()": "torch.autograd.backward(0.3 * out.square().mean())"},
)
mistake(
    "undivided sums over their own lengths",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[6] * 16)):
            loss = F.cross_entropy(model(x), y, reduction="sum") / len(y)
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"/ len(y)": "/ (4 * len(y))"},
    {"/ len(y)": "* (1 / len(y))"},
)
mistake(
    "an undivided loss of a balance, beside a sum over the window's tokens",
    "loss-not-divided",
    """
    def loop(model, optimizer, weight=0.01):
        for i, (x, y) in enumerate(batches(*[3] * 16)):
            out = model(x)
            balance = 7 * out.softmax(1).mean(0).square().mean()
            loss = F.cross_entropy(out, y, reduction="sum") / 12 + weight * balance
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"weight * balance": "weight * balance / 4"},
    {"weight * balance": "torch.mul(balance, weight)"},
)
mistake(
    "a mixture of two, undivided",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = 0.7 * F.cross_entropy(out, y) + 0.3 * out.square().mean()
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"loss = 0.7": "loss = 0.25 * 0.7", "0.3": "0.25 * 0.3"},
    {"0.3 * out": "(1 - 0.7) * out"},
)
mistake(
    "two losses divided twice",
    "double-division",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = (F.cross_entropy(out, y) + 0.1 * out.square().mean()) / 4
            (loss / 4).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"(loss / 4).": "loss."},
    {"(loss / 4).backward()": "torch.autograd.backward([loss / 4])"},
)
mistake(
    "a mixture of two losses divided twice",
    "double-division",
    """
    def loop(model, optimizer, alpha=0.3):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = alpha * F.cross_entropy(out, y) / 4 + (1 - alpha) * out.square().mean() / 4
            (loss / 4).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"(loss / 4).": "loss."},
    {"(loss / 4).backward()": "torch.autograd.backward([loss / 4])"},
)
mistake(
    "a mean of as many losses as micro-batches, divided twice",
    "double-division",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = (F.cross_entropy(out, y) + out.square().mean() + out.abs().mean() + out.exp().mean()) / 4
            (loss / 4 / 4).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"(loss / 4 / 4).": "(loss / 4)."},
    {"loss / 4 / 4": "loss * 0.25 / 4"},
)
mistake(
    "two losses divided by one more than their micro-batches",
    "wrong-divisor",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            loss = (F.cross_entropy(out, y) + 0.1 * out.square().mean()) / 5
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"/ 5": "/ 4"},
    {"0.1 * ": ""},
)
mistake(
    "undivided under a scaler",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()  # here
            if i % 4 == 3:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """,
    {"scale(loss)": "scale(loss / 4)"},
    {"scale(loss)": "scale(loss + 0.0)"},
)
mistake(
    "undivided sum of two",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            out = model(x)
            (F.cross_entropy(out, y) + 0.0 * out.square().mean()).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {".mean()).backward()": ".mean()).div(4).backward()"},
    {"(F.cross": "torch.autograd.backward(F.cross", ").backward()": ")"},
)
mistake(
    "divided on one way only",
    "loss-not-divided",
    """
    def loop(model, optimizer, divide=False):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            torch.autograd.backward(loss / 4 if divide else loss)  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"divide=False": "divide=True"},
    {"torch.autograd.backward(loss / 4 if divide else loss)": "(loss / 4 if divide else loss).backward()"},
)
mistake(
    "divided by what is one",
    "loss-not-divided",
    """
    def loop(model, optimizer, N=1):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            ((model(x) - 1).square().mean() / N).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"N=1": "N=4"},
    {"(model(x) - 1).square().mean() / N": "(model(x) - 1).square().mean() * (1 / N)"},
)
mistake(
    "a short window",
    "partial-window-underscaled",
    """
    def loop(model, optimizer, N=4):
        for i, (x, y) in enumerate(batches(*[2] * 10)):
            ((model(x) - 1).square().mean() / N).backward()  # here
            if i % 4 == 3 or i == 9:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {".mean() / N)": ".mean() / (4 if i < 8 else 2))"},
    {".mean() / N": ".mean() * (1 / N)"},
)
mistake(
    "a short window, divided before",
    "partial-window-underscaled",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 10)):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()  # here
            if i % 4 == 3 or i == 9:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"y) / 4": "y) / (4 if i < 8 else 2)"},
    {"loss.backward()": "torch.autograd.backward([loss])"},
)
mistake(
    "a short window, divided on one way only",
    "partial-window-underscaled",
    """
    def loop(model, optimizer, divide=True):
        def backward(value):
            value.backward()
        for i, (x, y) in enumerate(batches(*[2] * 10)):
            loss = F.cross_entropy(model(x), y)
            torch.autograd.backward(loss / 4 if divide else loss)  # here
            if i % 4 == 3 or i == 9:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"loss / 4 if divide": "loss / (4 if i < 8 else 2) if divide"},
)
mistake(
    "divided twice",
    "double-division",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y) / 4
            (loss / 4).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"(loss / 4).": "loss."},
    {"(loss / 4).backward()": "torch.autograd.backward(loss / 4)"},
)
mistake(
    "means of unequal lengths",
    "token-mean-of-means",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[3, 11, 5, 7] * 4)):
            loss = F.cross_entropy(model(x), y)
            (loss / 4).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"model(x), y)": "model(x), y, reduction='sum')", "loss / 4": "loss / 26"},
    {"(loss / 4).backward()": "torch.autograd.backward(0.25 * loss)"},
)
mistake(
    "sums divided by their own lengths",
    "token-mean-of-means",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[3, 11, 5, 7] * 4)):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            (loss / len(y) / 4).backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"loss / len(y) / 4": "loss / 26"},
    {
        'F.cross_entropy(model(x), y, reduction="sum")': 'F.cross_entropy(model(x), y, reduction="none").sum()',
        "(loss / len(y) / 4)": "(0.25 / len(y) * loss)",
    },
)
mistake(
    "two sums under masks, divided by what the masks let through",
    "token-mean-of-means",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[8] * 12)):
            mask = (torch.arange(8) < (2, 7)[i % 2]).float()
            loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()
            (loss / 2).backward()  # here
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"/ mask.sum()": "/ 4.5"},
    {"mask).sum() / mask.sum()": "mask / mask.sum()).sum()"},
)
mistake(
    "sums carried into the next epoch",
    "leftover-carried",
    """
    def loop(model, optimizer):
        for epoch in range(3):
            for i, (x, y) in enumerate(batches(*[2] * 6)):
                loss = F.cross_entropy(model(x), y, reduction="sum") / 8
                loss.backward()  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    {"* 6)": "* 8)"},
    {"loss.backward()": "torch.autograd.backward(loss)", "/ 8": "* 0.125"},
)
mistake(
    "sums over each window's tokens, carried into the next epoch",
    "leftover-carried",
    """
    def loop(model, optimizer):
        sizes = [3, 5, 7, 2, 6, 4]
        for epoch in range(3):
            for i, (x, y) in enumerate(batches(*sizes)):
                tokens = sum(sizes[i // 4 * 4 : i // 4 * 4 + 4])
                loss = F.cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()  # here
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    {"i % 4 == 3:": "i % 4 == 3 or i == 5:"},
    {'y, reduction="sum") / tokens': "y) * (len(y) / tokens)"},
)
mistake(
    "zeroed inside the window",
    "zero-grad-inside-window",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            optimizer.zero_grad()  # here
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
    """,
    {"optimizer.zero_grad()  #": "#", "optimizer.step()": "optimizer.step(); optimizer.zero_grad()"},
    {"optimizer.zero_grad()": "model.zero_grad()"},
)
mistake(
    "zeroed inside the window, and after the step as well",
    "zero-grad-inside-window",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            optimizer.zero_grad()  # here
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                model.zero_grad()
    """,
    {"optimizer.zero_grad()  #": "#"},
    {"model.zero_grad()": "for p in model.parameters(): p.grad = None"},
)
mistake(
    "zeroed inside the window, and after some steps as well",
    "zero-grad-inside-window",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            optimizer.zero_grad()  # here
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                if i % 8 == 7:
                    model.zero_grad()
    """,
    {"optimizer.zero_grad()  #": "#", "if i % 8 == 7": "if True"},
    {"model.zero_grad()": "model[0].zero_grad(); model[2].zero_grad()"},
)
mistake(
    "zeroed inside the window, and a part of it after the step as well",
    "zero-grad-inside-window",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            optimizer.zero_grad()  # here
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                model[0].zero_grad()
    """,
    {"optimizer.zero_grad()  #": "#", "model[0].zero_grad()": "model.zero_grad()"},
)
mistake(
    "zeroed between the backward and the step, and after that as well",
    "zero-before-step",
    """
    def loop(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()  # here
            optimizer.step()
            optimizer.zero_grad()
    """,
    {"model.zero_grad()  #": "#"},
    {"model.zero_grad()": "optimizer.zero_grad()"},
)
mistake(
    "one of two optimizers zeroed between the backward and its step, which the other uses",
    "zero-before-step",
    """
    def loop(model, optimizer):
        one, two = (torch.optim.SGD(model[n].parameters(), lr=0.01) for n in (0, 2))
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            one.zero_grad()  # here
            one.step()
            two.step()
            two.zero_grad()
    """,
    {"        one.zero_grad()  # here\n        one.step()": "        one.step()\n        one.zero_grad()"},
    {"two.step()\n        two.zero_grad()": "two.step(); two.zero_grad()"},
)
mistake(
    "a sum that begins anew in each window, of which each backward runs all so far",
    "graph-retained",
    """
    def loop(model, optimizer):
        total = 0
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            total = total + F.cross_entropy(model(x), y) / 4
            total.backward(retain_graph=True)  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                total = 0
    """,
    {"total = total +": "total ="},
    {"retain_graph=True": "retain_graph=i % 4 != 3"},
)
mistake(
    "divided in the last micro-batch of each window only",
    "loss-not-divided",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            if i % 4 == 3:
                loss = loss / 4
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"            loss = loss / 4": "            pass", "loss.backward()": "(loss / 4).backward()"},
    {"loss = loss / 4": "loss = loss * 0.25"},
)
mistake(
    "zeroed inside the window, on one line with a condition",
    "zero-grad-inside-window",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            if i % 2 == 0: optimizer.zero_grad()  # here
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
    """,
    {"if i % 2 == 0": "if i % 4 == 0"},
)
mistake(
    "never zeroed",
    "missing-zero-grad",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()  # here
    """,
    {"optimizer.step()": "optimizer.step(); optimizer.zero_grad()"},
    {"if i % 4 == 3:\n            optimizer.step()": "if i % 4 == 3: optimizer.step()"},
)
mistake(
    "clipped after each backward",
    "clip-per-micro-batch",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"nn.utils": "if i % 4 == 3: nn.utils"},
    {"model.parameters(), 0.01": "[*model.parameters()], max_norm=0.01"},
)
mistake(
    "clipped after each backward, before a step on one line with its condition",
    "clip-per-micro-batch",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # here
            if i % 4 == 3: optimizer.step(); optimizer.zero_grad()
    """,
    {"nn.utils": "if i % 4 == 3: nn.utils"},
    {"optimizer.step();": "optimizer.step() if True else None;"},
)
mistake(
    "clipped while scaled, on one line with a condition",
    "clip-scaled-grads",
    """
    def loop(model, optimizer):
        s = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            s.scale(F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3: nn.utils.clip_grad_norm_(model.parameters(), 0.1); s.step(optimizer)  # here
            if i % 4 == 3: s.update(); optimizer.zero_grad()
    """,
    {"nn.utils": "s.unscale_(optimizer); nn.utils"},
    {"if i % 4 == 3: nn": "if i % 4 == 3: x.mean(); nn"},
)
mistake(
    "clipped while scaled, after each backward",
    "clip-scaled-grads",
    """
    def loop(model, optimizer):
        s = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            s.scale(F.cross_entropy(model(x), y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # here
            if i % 4 == 3:
                s.step(optimizer)
                s.update()
                optimizer.zero_grad()
    """,
    {"nn.utils": "if i % 4 == 3: s.unscale_(optimizer); nn.utils"},
)
mistake(
    "a schedule for each micro-batch",
    "scheduler-per-micro-batch",
    """
    def loop(model, optimizer):
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()  # here
    """,
    {"schedule.step()": "if i % 4 == 3: schedule.step()"},
    {"schedule.step()": "[s.step() for s in [schedule]]"},
)


mistake(
    "divided by one more than there are",
    "wrong-divisor",
    """
    def loop(model, optimizer, N=5):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y) / N
            loss.backward()  # here
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"N=5": "N=4"},
    {"loss.backward()": "torch.autograd.backward(loss)"},
)
mistake(
    "a step one micro-batch too early",
    "wrong-divisor",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 17)):
            (F.cross_entropy(model(x), y) / 4).backward()  # here
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"i % 3 == 2": "i % 4 == 3"},
    {"y) / 4": "y).div(4)"},
)
mistake(
    "gradients divided by one more than there are",
    "wrong-divisor",
    """
    def loop(model, optimizer, N=5):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            F.cross_entropy(model(x), y).backward()  # here
            if i % 4 == 3:
                for p in model.parameters():
                    p.grad /= N
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"N=5": "N=4"},
    {"p.grad /= N": "p.grad.data.div_(N)"},
)
mistake(
    "a clip by hand after each backward",
    "clip-per-micro-batch",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()  # here
            length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad *= (0.01 / length).clamp(max=1.0)
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"(0.01 / length)": "(0.01 / length if i % 4 == 3 else torch.ones(()))"},
    {"p.grad *= (0.01 / length).clamp(max=1.0)": "p.grad.data.mul_((0.01 / length).clamp(max=1.0))"},
)
mistake(
    "a step after the first micro-batch",
    "partial-window-underscaled",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / 4).backward()  # here
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"i % 4 == 0": "i % 4 == 3"},
    {"i % 4 == 0": "not i % 4", "y) / 4": "y) * 0.25"},
)
mistake(
    "gradients divided after each backward",
    "double-division",
    """
    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            F.cross_entropy(model(x), y).backward()  # here
            for p in model.parameters():
                p.grad /= 4
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    {"for p in": "if i % 4 == 3:\n            for p in", "        p.grad /= 4": "            p.grad /= 4"},
    {"p.grad /= 4": "p.grad.data.div_(4)"},
)
mistake(
    "a gradient kept that told where to move the weights",
    "ascent-gradient-kept",
    """
    def loop(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            with torch.no_grad():
                [p.add_(move) for p, move in zip(model.parameters(), moves)]
            F.cross_entropy(model(x), y).backward()  # here
            with torch.no_grad():
                [p.sub_(move) for p, move in zip(model.parameters(), moves)]
            optimizer.step()
            optimizer.zero_grad()
    """,
    {"    with torch.no_grad():\n            [p.add_": "    optimizer.zero_grad(); [p.data.add_"},
    {"[p.add_(move)": "[p.copy_(p + move)"},
)
mistake(
    "losses divided for windows that never come about",
    "wrong-divisor",
    """
    def loop(model, optimizer, accumulate=4):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()  # here
            if (i + 1) % accumulate == 0:
                model.eval().train()
            optimizer.step()
            optimizer.zero_grad()
    """,
    {
        "    optimizer.step()": "if (i + 1) % accumulate == 0: optimizer.step()",
        "    optimizer.zero_grad()": "if (i + 1) % accumulate == 0: optimizer.zero_grad()",
    },
    {
        "loss = F": "scaled = F",
        "y)\n": "y)\n        scaled /= accumulate\n",
        "(loss / accumulate)": "scaled",
    },
)
mistake(
    "a clip of several lines after the step",
    "clip-on-the-wrong-side",
    """
    def loop(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            torch.nn.utils.clip_grad_norm_(  # here
                model.parameters(),
                # a comment of the user's
                max_norm=0.01,
            )
            optimizer.zero_grad()
    """,
    {
        "        optimizer.step()\n": "",
        "        optimizer.zero_grad()": "        optimizer.step(); optimizer.zero_grad()",
    },
    {"optimizer.step()\n": "optimizer.step(\n                closure=None,\n            )\n"},
)
mistake(
    "a clip alone in its block, after the step",
    "clip-on-the-wrong-side",
    """
    def loop(model, optimizer):
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # here
            optimizer.zero_grad()
    """,
    {
        "        optimizer.step()\n": "",
        "        optimizer.zero_grad()": "        optimizer.step(); optimizer.zero_grad()",
    },
)
mistake(
    "a method that clips, called after the one that steps",
    "clip-on-the-wrong-side",
    """
    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def clip(self):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)

        def step(self):
            self.optimizer.step()

        def fit(self):
            for x, y in batches(*[2] * 8):
                F.cross_entropy(self.model(x), y).backward()
                self.step()
                self.clip()  # here
                self.optimizer.zero_grad()

    def loop(model, optimizer):
        Trainer(model, optimizer).fit()
    """,
    {
        "            self.clip()  # here\n": "",
        "            self.step()\n": "            self.clip()\n            self.step()\n",
    },
    {"self.clip()": "(self.clip())"},
)
mistake(
    "a function that zeroes, called at the window's end and inside it",
    "zero-grad-inside-window",
    """
    def zero(of):
        of.zero_grad()

    def finish(optimizer):
        optimizer.step()
        zero(optimizer)

    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            zero(optimizer)  # here
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                finish(optimizer)
    """,
    {"        zero(optimizer)  # here\n": ""},
    {"    of.zero_grad()": "    for p in of.param_groups:\n        of.zero_grad()"},
)
mistake(
    "a function that trains, and zeroes before",
    "zero-grad-inside-window",
    """
    def train(model, own, x, y):
        own.zero_grad()  # here
        (F.cross_entropy(model(x), y) / 4).backward()

    def loop(model, optimizer):
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            train(model, optimizer, x, y)
            if i % 4 == 3:
                optimizer.step()
    """,
    {"    own.zero_grad()  # here\n": "", "optimizer.step()": "optimizer.step(); optimizer.zero_grad()"},
)
mistake(
    "functions without a name, in the wrong order",
    "zero-before-step",
    """
    def loop(model, optimizer):
        zero, step = lambda: optimizer.zero_grad(), lambda: optimizer.step()
        for x, y in batches(*[2] * 8):
            F.cross_entropy(model(x), y).backward()
            zero()  # here
            step()
    """,
    {"        zero()  # here\n        step()": "        step()\n        zero()"},
)
mistake(
    "a function that moves a schedule, called for each micro-batch",
    "scheduler-per-micro-batch",
    """
    def anneal(schedule):
        schedule.step()

    def loop(model, optimizer):
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for i, (x, y) in enumerate(batches(*[2] * 16)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            anneal(schedule)  # here
    """,
    {"        anneal(schedule)": "        if i % 4 == 3: anneal(schedule)"},
)
mistake(
    "a step between two backwards through one graph",
    "step-before-backward",
    """
    def loop(model, optimizer):
        x, y = batches(8)[0]
        for _ in range(8):
            out = model(x)
            one, two = F.cross_entropy(out, y), out.square().mean()
            try:
                one.backward(retain_graph=True)
                optimizer.step()  # here
                two.backward()
            except RuntimeError:
                return
            optimizer.zero_grad()
    """,
    {
        "            optimizer.step()  # here\n": "",
        "two.backward()": "two.backward()\n            optimizer.step()",
    },
    {  # its step stands below the backward that fails, and comes before it all the same
        "one.backward(retain_graph=True)\n            optimizer.step()  # here\n            two.backward()": (
            "for each in (one, two):\n"
            "                each.backward(retain_graph=True)\n"
            "                optimizer.step()"
        )
    },
)


def changed(text: str, by: dict[str, str]) -> str:
    for old, new in by.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


# Some mistakes are such that torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


def judged(text: str, folder: Path, many: int = 8, name: str = "") -> Report:
    torch.manual_seed(0)
    path = folder / (name or f"loop_{len(list(folder.iterdir()))}.py")
    path.write_bytes(text.encode())
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "batches": batches, "__name__": "loop"}
    names["loader"] = DataLoader(TensorDataset(torch.randn(2 * many, 8), torch.randint(0, 5, (2 * many,))), 2)
    exec(compile(text, str(path), "exec"), names)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with av.record(model, optimizer) as recording:
        names["loop"](model, optimizer)
    return av.check(recording)


def serious(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity != "note"]


def applied(cure: str, text: str) -> str:
    """The text after a cure, which is a diff of it to the letter: its rows, their places, its hunks' order."""
    # Says of a row that nothing ends it, before or after: only of the last one.
    endless = r"^([- +])(.*)\n\\ No newline at end of file\n"
    told = [row for row, _ in re.findall(endless, cure + "\n", flags=re.MULTILINE)]
    assert not told or not text.endswith("\n")
    cure = re.sub(endless, r"\1\2\n", cure + "\n", flags=re.MULTILINE)[:-1]
    lines, out, at = text.split("\n"), [], 0
    head, *hunks = re.split(r"^@@ -(\S+) \+(\S+) @@\n", cure + "\n", flags=re.MULTILINE)
    assert re.fullmatch(r"--- (.*)\n\+\+\+ \1\n", head), head
    for old, new, rows in zip(hunks[::3], hunks[1::3], hunks[2::3], strict=True):
        (start, many), (put, more) = ((*map(int, which.split(",")), 1)[:2] for which in (old, new))
        body = rows.split("\n")[:-1]
        stands = [row[1:] for row in body if row[0] != "+"]
        first = start - 1 if many else start
        assert first >= at and lines[first : first + many] == stands, (lines[first : first + many], stands)
        out += lines[at:first]
        made = [row[1:] for row in body if row[0] != "-"]
        assert (put, more) == (len(out) + bool(made), len(made)), (new, len(out), made)
        out, at = out + made, first + many
    return "\n".join(out + lines[at:])


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_is_found_on_its_line(name: str, tmp_path: Path) -> None:
    made = MISTAKES[name]
    (finding,) = serious(judged(made.text, tmp_path))
    assert finding.rule == made.rule
    assert finding.line == 1 + [line.endswith("# here") for line in made.text.splitlines()].index(True)


@pytest.mark.parametrize(("weight", "rules"), [(0.5, ["loss-not-divided"]), (0.3 / 4, [])])
def test_a_weight_that_may_be_a_part_of_another_is_a_note_at_most(
    weight: float, rules: list[str], tmp_path: Path
) -> None:
    text = MISTAKES["an undivided loss beside a divided one"].text
    report = judged(changed(text, {"0.3 *": f"float('{weight}') *"}), tmp_path)
    assert [finding.rule for finding in report.findings] == rules and report.healthy, report


mistake(
    "a scheduler that goes on when the scaler skips",
    "scheduler-on-skipped-step",
    """
    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for i, (x, y) in enumerate(batches(*[2] * 6)):
            loss = F.cross_entropy(model(x), y) * (float("inf") if i == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()  # here
    """,
    {"scheduler.step()": "[scheduler.step() for _ in range(i != 2)]"},
    {"scaler": "grad_scaler", "scheduler = ": "rates = ", "scheduler.step": "rates.step"},
)
# One backward a step: what a loss is scaled by may be meant, and mostly is.
ALONE = """
def loop(model, optimizer, heads=4, smoothing=0.25, log_every=4):
    running = 0.0
    for i, (x, y) in enumerate(batches(*[8] * 8)):
        out = model(x)
        loss = F.cross_entropy(out, y)
        LOSS.backward()
        running += loss.item() / log_every
        if i % log_every == 0:
            running = 0.0
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "loss",
    [
        *("loss", "(0.25 * loss)", "(loss * smoothing)", "(loss / 2)", "(loss / 4.5)"),
        "F.cross_entropy(out, y, label_smoothing=smoothing)",
        "(sum(F.cross_entropy(out.roll(k, 1), y) for k in range(heads)) / heads)",
        "torch.stack([F.cross_entropy(out.roll(k, 1), y) for k in range(heads)]).mean()",
        "(F.cross_entropy(out, y, reduction='sum') / len(y))",
        "(F.cross_entropy(out, y, reduction='none').sum() / len(y))",
        "(out.square().sum() / len(y))",
        "(loss + out.square().mean() / 4)",
        "((1 - smoothing) * loss + smoothing * out.square().mean())",
    ],
)
def test_a_loss_that_is_scaled_where_each_step_has_one_of_them_is_silent(loss: str, tmp_path: Path) -> None:
    report = judged(ALONE.replace("LOSS", loss), tmp_path)
    assert report.healthy and report.findings == (), report


@pytest.mark.parametrize("loss", ["(loss / 4)", "(loss / heads)", "(loss / (2 * heads))"])
def test_a_loss_that_is_divided_by_a_count_where_each_step_has_one_of_them_is_a_note(loss: str, tmp_path: Path) -> None:
    report = judged(ALONE.replace("LOSS", loss), tmp_path)
    assert [finding.rule for finding in report.findings] == ["wrong-divisor"] and report.healthy, report


def test_a_script_of_which_some_lines_were_kept_tells_what_it_counts_by() -> None:
    play = windows(*[1] * 8, factor=0.25)
    for row in play.rows:
        if row["kind"] == "backward":
            row["details"]["terms"][0] |= {"divisor": 4.0, "constants": [0.25]}
    ledger = play.ledger
    assert [finding.severity for finding in av.check(ledger).findings] == ["note"]
    ledger.sources["train.py"] = """    return whole - 1

for i in range(8):
    loss = net(i) / K
    loss.backward()
    if i % K == K - 1:
        print(i)
"""
    assert [finding.severity for finding in av.check(ledger).findings] == ["warning"]


@pytest.mark.parametrize("name", MISTAKES)
def test_its_twin_is_healthy(name: str, tmp_path: Path) -> None:
    made = MISTAKES[name]
    report = judged(changed(made.text, made.right), tmp_path)
    assert report.healthy and report.findings == (), report


@pytest.mark.parametrize("name", [name for name, made in MISTAKES.items() if made.disguise])
def test_it_is_found_in_disguise(name: str, tmp_path: Path) -> None:
    made = MISTAKES[name]
    assert [finding.rule for finding in serious(judged(changed(made.text, made.disguise), tmp_path))] == [made.rule]


def test_two_lines_that_share_a_graph_run_nothing_again(tmp_path: Path) -> None:
    text = """
def loop(model, optimizer):
    for x, y in batches(*[2] * 8):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward(retain_graph=True)
        loss = scores.square().mean() + scores.abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    assert serious(judged(text, tmp_path)) == []


def test_a_part_that_is_kept_still_for_a_while_is_no_mistake(tmp_path: Path) -> None:
    report = judged(KEPT_STILL, tmp_path)
    assert report.healthy, report
    for_ever = judged(KEPT_STILL.replace("if i < 3", "if True"), tmp_path)
    assert [finding.rule for finding in serious(for_ever)] == ["zero-before-step"]


KEPT_STILL = """
def loop(model, optimizer):
    one, two = (torch.optim.SGD(model[n].parameters(), lr=0.01) for n in (0, 2))
    for i, (x, y) in enumerate(batches(*[2] * 8)):
        F.cross_entropy(model(x), y).backward()
        if i < 3:
            one.zero_grad()
        for each in (one, two):
            each.step()
            each.zero_grad()
"""


@pytest.mark.parametrize("disguised", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_cure_that_is_written_cures(name: str, disguised: bool, tmp_path: Path) -> None:
    made = MISTAKES[name]
    text = changed(made.text, made.disguise) if disguised else made.text
    (finding,) = serious(judged(text, tmp_path))
    if not finding.cure:
        return
    after = applied(finding.cure, text)
    compile(after, "loop", "exec")
    assert after != text
    if re.search(r"^\+ *#", finding.cure, re.MULTILINE):  # what is left to be done stands in words
        return
    after = re.sub(r"\bmicro_batches_in_this_window\b", "(4 if i < 8 else 2)", after)
    after = after.replace("micro_batches_left", "2")
    report = judged(after, tmp_path)
    assert serious(report) == [], (finding.cure, report)


ZEROED_ANYWAY = [
    "zeroed inside the window, and after the step as well",
    "zeroed between the backward and the step, and after that as well",
    "a function that zeroes, called at the window's end and inside it",
]


@pytest.mark.parametrize("disguised", [False, True])
@pytest.mark.parametrize("name", [name for name, made in MISTAKES.items() if made.rule.startswith("zero-")])
def test_a_zeroing_is_put_below_the_step_only_where_none_follows_it(name: str, disguised: bool, tmp_path: Path) -> None:
    made = MISTAKES[name]
    (finding,) = serious(judged(changed(made.text, made.disguise) if disguised else made.text, tmp_path))
    added = [row for row in finding.cure.split("\n")[2:] if row.startswith("+")]
    if finding.cure:
        assert len(added) == (name not in ZEROED_ANYWAY), finding.cure


TWO = """
def loop(model, optimizer):
    one, two = (torch.optim.SGD(model[n].parameters(), lr=0.01) for n in (0, 2))
    for i, (x, y) in enumerate(batches(*[2] * 16)):
        model.zero_grad()
        (F.cross_entropy(model(x), y) / 4).backward()
        if i % 4 == 3:
            one.step()
            two.step()
"""


@pytest.mark.parametrize(
    ("below", "put"),
    [
        ("", ["            two.step()", "+            model.zero_grad()"]),
        ("one.zero_grad()", ["            two.step()", "+            model.zero_grad()"]),
        ("two.zero_grad()", ["            two.step()", "+            model.zero_grad()"]),
        ("one.zero_grad(); two.zero_grad()", []),
        ("optimizer.zero_grad()", []),
    ],
)
def test_a_line_that_zeroes_for_two_optimizers_is_put_below_the_steps_of_both(
    below: str, put: list[str], tmp_path: Path
) -> None:
    text = TWO + (f"            {below}\n" if below else "")
    (finding,) = serious(judged(text, tmp_path))
    assert [row.removeprefix(" ") for row in finding.cure.split("\n")[5:] if not row.startswith("@@")] == put
    assert serious(judged(applied(finding.cure, text), tmp_path)) == []


def test_a_line_that_steps_for_two_optimizers_in_turn_gets_no_zeroing_below_it(tmp_path: Path) -> None:
    each = "            for each in (one, two):\n                each.step()"
    (finding,) = serious(judged(changed(TWO, {"            one.step()\n            two.step()": each}), tmp_path))
    assert (finding.rule, finding.cure) == ("zero-grad-inside-window", "")


OPPONENTS = """
def loop(model, optimizer, K=4):
    maker, judge = model[0], model[2]
    of_maker, of_judge = (torch.optim.SGD(net.parameters(), lr=0.01) for net in (maker, judge))
    for _ in range(4):
        for _ in range(K):
            # of the judge
            made = maker(torch.randn(2, 8)).detach()
            (judge(made).exp().mean() / K).backward()
            (judge(torch.randn(2, 16)).square().mean() / K).backward()
        of_judge.step()
        of_judge.zero_grad()
        for _ in range(K):
            (judge(maker(torch.randn(2, 8))).abs().mean() / K).backward()
        of_maker.step()
        of_maker.zero_grad()
"""
IN_ONE_LOOP = """
def loop(model, optimizer):
    maker, judge = model[0], model[2]
    of_maker, of_judge = (torch.optim.SGD(net.parameters(), lr=0.01) for net in (maker, judge))
    for i in range(16):
        (judge(maker(torch.randn(2, 8))).abs().mean() / 4).backward()
        if i % 4 == 3:
            of_maker.step()
            of_maker.zero_grad()
        (judge(torch.randn(2, 16)).square().mean() / 4).backward()
        if i % 4 == 3:
            of_judge.step()
            of_judge.zero_grad()
"""
NOT_BELOW = {"        of_judge.zero_grad()\n": ""}


@pytest.mark.parametrize(
    ("text", "rule", "put"),
    [
        (OPPONENTS, "gan-gradient-leak", "of_maker.step()"),
        (changed(OPPONENTS, NOT_BELOW), "missing-zero-grad", "of_maker.step()"),
        (OPPONENTS.replace("K=4", "K=1"), "gan-gradient-leak", "(judge(made).exp().mean() / K).backward()"),
        (IN_ONE_LOOP, "gan-gradient-leak", ""),
        (OPPONENTS.replace("of_maker.step()", "for each in [of_maker]: each.step()"), "gan-gradient-leak", ""),
        # What zeroes inside the window takes away what has leaked, too.
        (changed(OPPONENTS, NOT_BELOW | {"# of the judge": "of_judge.zero_grad()"}), "zero-grad-inside-window", ""),
    ],
)
def test_what_leaks_to_an_opponent_is_zeroed_before_its_window_or_nowhere(
    text: str, rule: str, put: str, tmp_path: Path
) -> None:
    (finding,) = serious(judged(text, tmp_path))
    assert finding.rule == rule
    rows = [row[1:].strip() for row in finding.cure.split("\n")[3:]]
    assert sorted(rows) == (sorted(["of_judge.zero_grad()", put]) if put else []), finding.cure
    if put:
        assert serious(judged(applied(finding.cure, text), tmp_path)) == []


TAIL = """
def loop(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for epoch in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 3:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize("many", [10, 11, 12])
@pytest.mark.parametrize("how", ["dropped", "carried"])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_cure_of_a_tail_makes_a_whole_window_of_it(many: int, how: str, scaled: bool, tmp_path: Path) -> None:
    text = TAIL if how == "dropped" else TAIL.replace("        optimizer.zero_grad()\n        for", "        for")
    if not scaled:
        text = text.replace("scaler.scale(F", "(F").replace("                scaler.update()\n", "")
        text = text.replace("scaler.step(optimizer)", "optimizer.step()")
    report = judged(text, tmp_path, many)
    if many == 12:
        assert report.healthy and report.findings == (), report
        return
    (finding,) = serious(report)
    assert finding.rule == {"dropped": "tail-dropped", "carried": "leftover-carried"}[how]
    after = applied(finding.cure, text).replace("micro_batches_left", str(many % 4))
    report = judged(after, tmp_path, many)
    assert report.healthy and report.findings == (), (after, report)


EPOCHS = """for epoch in range(2):
    for x in loader:
        loss(x).backward()
        for optimizer in both:
            optimizer.step()
    print(epoch)
"""
BY_THE_WAY = """def at_the_end():
    optimizer.step()

for x in loader:
    loss(x).backward()
    at_the_end()
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (EPOCHS, [6]),
        (EPOCHS.replace("    ", "\t"), [6]),
        ("def f():\n    for x in loader:\n        loss(x).backward()\n        optimizer.step()", [5]),
        ("while True:\n    loss(x).backward()\n    optimizer.step()\nelse:\n    pass\n", [6]),
        ("for x in loader:\n    train(x)\n    optimizer.step()\n", []),  # who knows which loop it is
        (BY_THE_WAY, []),
        ("for x in loader:\n    loss(x).backward()\n    def end():\n        optimizer.step()\n    end()\n", []),
        (EPOCHS.replace("        for opt", "\n\n\n\n\n        for opt"), []),  # of which some lines were not kept
    ],
)
def test_what_is_added_behind_a_loop_stands_there_or_nowhere(text: str, lines: list[int]) -> None:
    line = next(i for i, row in enumerate(text.split("\n"), 1) if row.strip() == "optimizer.step()")
    step = Event(0, "step", file="a.py", line=line, source="optimizer.step()")
    cure = placed(flushed(step, 0), {"a.py": text})
    if not lines:
        assert cure == ""
        return
    after = applied(cure, text)
    ast.parse(after)
    rows = after.split("\n")
    assert [i for i, row in enumerate(rows, 1) if row.strip() == "if micro_batches_left:"] == lines
    loops = [row for row in text.split("\n")[:line] if row.lstrip().startswith(("for x", "while"))]
    assert rows[lines[0] - 1].partition("if")[0] == re.split("for|while", loops[-1])[0]


CLIPPED = """
def loop(model, optimizer):
    for i, (x, y) in enumerate(batches(*[2] * 16)):
        (F.cross_entropy(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        STEP
"""
AT_TIMES = [
    "(optimizer.step(), optimizer.zero_grad()) if i % 4 == 3 else None",
    "i % 4 == 3 and (optimizer.step(), optimizer.zero_grad())",
    "[(each.step(), each.zero_grad()) for each in [optimizer] if i % 4 == 3]",
    "for _ in range(i % 4 == 3): optimizer.step(); optimizer.zero_grad()",
    "if i % 4 < 3: pass\n        else: optimizer.step(); optimizer.zero_grad()",
]


@pytest.mark.parametrize("step", AT_TIMES)
def test_no_cure_is_written_above_a_line_that_steps_at_times_in_another_way_than_an_if(
    step: str, tmp_path: Path
) -> None:
    (finding,) = serious(judged(CLIPPED.replace("STEP", step), tmp_path))
    assert (finding.rule, finding.cure) == ("clip-per-micro-batch", "")


@pytest.mark.parametrize(
    "step", ["optimizer.step() if i % 4 == 3 else None", "if i % 4 < 3: pass\n        else: optimizer.step()"]
)
def test_no_zeroing_is_written_below_a_line_that_steps_at_times(step: str, tmp_path: Path) -> None:
    text = CLIPPED.replace("        nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n", "")
    (finding,) = serious(judged(text.replace("STEP", step), tmp_path))
    assert (finding.rule, finding.cure) == ("missing-zero-grad", "")


def test_what_is_moved_into_a_guarded_line_stands_before_the_step_with_its_comment(tmp_path: Path) -> None:
    line = "if i % 4 == 3: x.mean(); HERE optimizer.step(); optimizer.zero_grad()"
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    text = CLIPPED.replace("0.01)", "0.01)  # short").replace("STEP", line.replace("HERE ", ""))
    (finding,) = serious(judged(text, tmp_path))
    assert finding.cure.endswith(f"\n+        {line.replace('HERE', clip + ';')}  # short")


BYPASSED = """
def loop(model, optimizer):
    s = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i, (x, y) in enumerate(batches(*[2] * 16)):
        s.scale(F.cross_entropy(model(x), y) / 4).backward()
        try:
            STEP
        except AssertionError:  # there was nothing to update the scaler by
            return
"""
GUARDED = "if i % 4 == 3: s.step(optimizer); s.update(); optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("step", "cured"),
    [
        ("if i % 4 == 3: optimizer.step(); s.update(); optimizer.zero_grad()", GUARDED),
        ("if i % 4 == 3: optimizer.step(); optimizer.zero_grad()", GUARDED),
        *(
            (f"if i % 4 == 3:{row}optimizer.step(){row}{below}", f"if i % 4 == 3:{row}s.step(optimizer){row}{cured}")
            for row in ["\n" + " " * 16]
            for below, cured in [
                ("optimizer.zero_grad()", f"s.update(){row}optimizer.zero_grad()"),
                (f"s.update(){row}optimizer.zero_grad()", f"s.update(){row}optimizer.zero_grad()"),
            ]
        ),
        ("(optimizer.step(), optimizer.zero_grad()) if i % 4 == 3 else None", ""),
    ],
)
def test_a_scaler_that_takes_a_step_is_updated_once_for_each(step: str, cured: str, tmp_path: Path) -> None:
    text = BYPASSED.replace("STEP", step)
    (finding,) = serious(judged(text, tmp_path))
    assert finding.rule == "bypass-scaler-step"
    after = applied(finding.cure, text) if finding.cure else ""
    assert after == (BYPASSED.replace("STEP", cured) if cured else "")
    assert not cured or serious(judged(after, tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("train.py", {}),
        ("train.py", {"    ": "\t"}),
        ("train.py", {"\n": "\r\n"}),
        ("train.py", {"    ": "\t", "\n": "\r\n"}),
        ("endless.py", {}),
        ("endless.py", {"\n": "\r\n"}),
        ("a folder/of mine.py", {}),
        ("../elsewhere.py", {}),  # to be patched there: its folder is told to nobody, and patch follows no `..`
    ],
)
@pytest.mark.parametrize(
    "mistaken",
    [
        "never zeroed",
        "clipped after each backward",
        "a clip alone in its block, after the step",
        "a clip of several lines after the step",
    ],
)
def test_a_report_is_a_patch_of_the_file_to_the_letter(
    name: str, by: dict[str, str], mistaken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = changed(MISTAKES[mistaken].text, by)
    text = text.rstrip() if name == "endless.py" else text
    here = tmp_path / "here"
    path = here / name
    here.mkdir()
    path.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    report = judged(text, here, name=name)
    after = applied(report.findings[0].cure, text)
    assert after != text and after.count("\r\n") in (0, after.count("\n"))
    assert after.endswith("\n") == text.endswith("\n")
    rows = [line.removeprefix("    ") for line in report.text().split("\n") if line.startswith(("    ", "\\"))]
    assert applied("\n".join(rows), text) == after
    program = shutil.which("patch")
    if program:
        given, where = report.text().encode(), path.parent if ".." in name else here
        subprocess.run([program, "-p0"], input=given, cwd=where, check=True, capture_output=True)
        assert path.read_bytes().decode() == after
