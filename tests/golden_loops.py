"""Collect the loops of the suites as programs: files, a line that runs them, and in how many ranks."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Loops = Iterator[tuple[str, dict[str, Any]]]

OF_RANKS = """
import of_ranks, train
try:
    train.{}(av.record)
finally:
    of_ranks.end_groups()
"""


def program(run: str, ranks: int = 0, **files: str) -> dict[str, Any]:
    """Return a loop of these files, whose names lack their `.py`."""
    return {"files": {f"{name}.py": text for name, text in files.items()}, "run": run, "ranks": ranks}


def read(path: str) -> str:
    return (HERE / path).read_text("utf-8")


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


def of_corpus() -> Loops:
    from tests.corpus import healthy
    from tests.corpus.scripts import scripts

    common = read("corpus/common.py")
    text = read("corpus/healthy.py").replace("tests.corpus.", "")
    run = "import healthy; running = healthy.LOOPS[{!r}]()\nwith av.record(*next(running)):\n    [*running]\n"
    for name in healthy.LOOPS:
        yield f"healthy/{name}", program(run.format(name), healthy=text, common=common)
    for script in scripts("mistakes"):
        for kind in ("wrong", "right"):
            text = script.text(right=kind == "right").replace("tests.corpus.", "")
            run = f"import loop; loop.{script.name}(av.record)"
            yield f"mistakes/{script.name}, {kind}", program(run, loop=text, common=common)
    for script in scripts("ranks"):
        for kind in ("wrong", "right"):
            text = script.text(right=kind == "right").replace("tests.corpus.", "")
            files = {"train": text, "of_ranks": read("corpus/of_ranks.py")}
            yield f"ranks/{script.name}, {kind}", program(OF_RANKS.format(script.name), 2, **files)


def of_museum() -> Loops:
    """The exhibits: functions of the chapter that record, with the switch that fixes them off and on."""
    text = (HERE.parent / "chapters" / "12_museum.md").read_text("utf-8")
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    cells = [re.sub(r"\A(---\n.*?\n---\n|(:[^\n]*\n)+)", "", cell, flags=re.DOTALL) for cell in cells]
    kept = [cells[0]]
    exhibits = {}
    for cell in cells[1:]:
        for node in ast.parse(cell).body:
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(cell, node) or ""
                kept.append(source)
                if "av.record(" in source and all(argument.arg in ("fixed", "K") for argument in node.args.args):
                    exhibits[node.name] = ast.dump(node.args) + " ranks" * ("DistributedDataParallel(" in source)
    for name, about in exhibits.items():
        for call in ("fixed=False", "fixed=True") if "fixed" in about else ("",):
            run, text = f"import museum; museum.{name}({call})", "\n\n".join(kept)
            ranks = 2 if "ranks" in about else 0
            yield f"{'ranks/' * bool(ranks)}museum/{name}({call})", program(run, ranks, museum=text)


def collected() -> dict[str, dict[str, Any]]:
    """Return every loop of the suites by its name."""
    return dict(itertools.chain(of_nasty(), of_corpus(), of_museum()))
