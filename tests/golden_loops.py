"""Collect the loops of the suites as programs: files, a line that runs them, and in how many ranks."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Loops = Iterator[tuple[str, dict[str, Any]]]

# What a test's loop is run by: the test itself, with so many-th of its parameters and without its assertions.
PARAMETRIZED = '''
import itertools

def combinations(test):
    """Yield the arguments of a test, for each set of its parameters."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        arguments = {}
        for mark, value in zip(marks, values):
            names = mark.args[0]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            arguments.update(zip(names, value if len(names) > 1 else [value]))
        yield arguments

def run(test, number):
    try:
        test(**next(itertools.islice(combinations(test), number, None)))
    except (ValueError, IndexError, AttributeError, KeyError, TypeError, StopIteration):
        pass  # what a test asks of the report is not the loop's
'''
CURES = """
import os
import accumviz as av
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net(out=5):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out))

def batches(*sizes):
    return [(torch.randn(n, 8), torch.randint(0, 5, (n,))) for n in sizes]

def run(many=8):
    names = {"torch": torch, "nn": nn, "F": F, "batches": batches, "__name__": "loop"}
    names["loader"] = DataLoader(TensorDataset(torch.randn(2 * many, 8), torch.randint(0, 5, (2 * many,))), 2)
    exec(compile(open("loop.py", newline="").read(), os.path.abspath("loop.py"), "exec"), names)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with av.record(model, optimizer) as recording:
        names["loop"](model, optimizer)
"""
OF_RANKS = """
import gc, os, of_ranks
import torch.distributed as dist
names = {"__name__": "train"}
try:
    exec(compile(open("train.py").read(), os.path.abspath("train.py"), "exec"), names)
    names["loop"](av.record)
finally:
    names.clear()
    while of_ranks.groups:
        dist.destroy_process_group(of_ranks.groups.pop())
    gc.collect()
"""


def program(run: str, ranks: int = 0, **files: str) -> dict[str, Any]:
    """Return a loop of these files, whose names lack their `.py`."""
    return {
        "files": {name.replace("__", "/") + ".py": text for name, text in files.items()},
        "run": run,
        "ranks": ranks,
    }


def standalone(text: str) -> str:
    """Return a module's text without its assertions and its imports of what is inside accumviz or in other suites."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            new = "pass"
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(("accumviz.", "tests.")):
            new = " = ".join(alias.asname or alias.name for alias in node.names) + " = object"
        else:
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        lines[first:last] = [" " * node.col_offset + new] + [""] * (last - first - 1)
    return "\n".join(lines) + "\n"


def read(path: str) -> str:
    return (HERE / path).read_text("utf-8")


def changed(text: str, by: dict[str, str]) -> str:
    for old, new in by.items():
        text = text.replace(old, new)
    return text


def of_nasty() -> Loops:
    from tests.recorder import nasty

    text = read("recorder/nasty.py")
    for name in nasty.LOOPS:
        yield f"nasty/{name}", program(f"import nasty; nasty.LOOPS[{name!r}].run(av.record)", nasty=text)
        record = "functools.partial(av.record, graphs=True, memory=True)"
        run = f"import functools, nasty; nasty.LOOPS[{name!r}].run({record})"
        yield f"nasty/graphs/{name}", program(run, nasty=text)
    for name in nasty.IN_RANKS:
        yield f"ranks/nasty/{name}", program(f"import nasty; nasty.IN_RANKS[{name!r}].run(av.record)", 2, nasty=text)


def of_healthy() -> Loops:
    from tests import test_healthy_loops

    run = "import healthy; running = healthy.LOOPS[{!r}]()\nwith av.record(*next(running)):\n    [*running]\n"
    for name in test_healthy_loops.LOOPS:
        yield f"healthy/{name}", program(run.format(name), healthy=read("test_healthy_loops.py"))


def of_tests(kind: str, suite: str) -> Loops:
    """The loops of a suite whose tests run them themselves."""
    from importlib import import_module

    module, text = import_module(f"tests.{suite}"), standalone(read(f"{suite}.py"))
    helper: dict[str, Any] = {}
    exec(PARAMETRIZED, helper)
    for name, test in vars(module).items():
        if not name.startswith("test_") or "distribute(" in text.partition(f"def {name}(")[2].partition("\ndef ")[0]:
            continue
        for number, _ in enumerate(helper["combinations"](test)):
            run = f"import suite, parametrized; parametrized.run(suite.{name}, {number})"
            yield f"{kind}/{name.removeprefix('test_')} {number}", program(run, suite=text, parametrized=PARAMETRIZED)


def of_cures() -> Loops:
    from tests.test_cures import MISTAKES

    for name, mistake in MISTAKES.items():
        for kind, by in (("wrong", {}), ("right", mistake.right), ("disguised", mistake.disguise)):
            if by or kind == "wrong":
                text = changed(mistake.text, by)
                yield f"cures/{name}, {kind}", program("import cures; cures.run()", loop=text, cures=CURES)


def of_disguises() -> Loops:
    from tests.dressings.disguises import DISGUISES
    from tests.test_disguises import DRESSINGS, variant

    for (rule, dressing), made in DISGUISES.items():
        for kind, edits in (("wrong", made.about + made.mistake), ("right", made.about)):
            texts = {name: text.replace("tests.dressings.", "") for name, text in variant(dressing, edits).items()}
            script, library = DRESSINGS[dressing].files[-1], DRESSINGS[dressing].library
            files = {f"site-packages__{name}" if name in library else name: text for name, text in texts.items()}
            run = f"import functools, {script}; {script}.descend(functools.partial(av.record, **{made.options!r}))"
            yield f"disguises/{rule}, {dressing}, {kind}", program(run, **files)


def of_disguises_of_ranks() -> Loops:
    from tests.test_disguises_of_ranks import FORMS, SLIM, side

    head, _, _ = read("test_disguises_of_ranks.py").partition(f"# {64 * '-'} the loops")
    helpers = standalone(head)
    slim = {"site-packages__slim____init__": "from slim.fabric import Slim\n", "site-packages__slim__fabric": SLIM}
    for (rule, disguise), texts in FORMS.items():
        for kind in ("wrong", "right"):
            files = {path.removesuffix(".py"): "\n".join(side(text, kind == "wrong")) for path, text in texts.items()}
            files = {name: text.replace("tests.test_disguises_of_ranks", "of_ranks") for name, text in files.items()}
            yield f"ranks/disguises/{rule}, {disguise}, {kind}", program(OF_RANKS, 2, of_ranks=helpers, **slim, **files)


def of_projects_in_ranks() -> Loops:
    text = standalone(read("test_project_loops.py"))
    kinds = {"replicated": ["ddp-unsynced-step"], "sharded": ["clip-per-micro-batch", "fsdp1-local-clip"]}
    for loop, mistakes in (kinds | {"static": ["ddp-static-graph-no-sync"]}).items():
        for mistake in ("", *mistakes):
            run = f"import suite; suite.{loop}({mistake!r})"
            yield f"ranks/projects/{loop}, {mistake or 'right'}", program(run, 2, suite=text)


def of_museum() -> Loops:
    """The exhibits: functions of the chapter that record, with the switch that mends them off and on."""
    text = (HERE.parent / "chapters" / "11_museum.md").read_text("utf-8")
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    cells = [re.sub(r"\A(---\n.*?\n---\n|(:[^\n]*\n)+)", "", cell, flags=re.DOTALL) for cell in cells]
    kept = [cells[0]]
    exhibits = {}
    for cell in cells[1:]:
        for node in ast.parse(cell).body:
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(cell, node) or ""
                kept.append(source)
                if "av.record(" in source and all(argument.arg in ("mended", "N") for argument in node.args.args):
                    exhibits[node.name] = ast.dump(node.args) + " ranks" * ("DistributedDataParallel(" in source)
    for name, about in exhibits.items():
        for call in ("mended=False", "mended=True") if "mended" in about else ("",):
            run, text = f"import museum; museum.{name}({call})", "\n\n".join(kept)
            ranks = 2 if "ranks" in about else 0
            yield f"{'ranks/' * bool(ranks)}museum/{name}({call})", program(run, ranks, museum=text)


def collected() -> dict[str, dict[str, Any]]:
    """Return every loop of the suites by its name."""
    return dict(
        itertools.chain(
            of_nasty(),
            of_healthy(),
            of_tests("mistakes", "test_check_loops"),
            of_tests("projects", "test_project_loops"),
            of_cures(),
            of_disguises(),
            of_museum(),
            of_projects_in_ranks(),
            of_disguises_of_ranks(),
        )
    )
