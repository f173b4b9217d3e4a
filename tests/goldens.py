"""Write what every loop of the suites records, judges and draws, and compare two such runs.

    python -m tests.goldens write OUT [--loops FILE] [--only TEXT ...]
    python -m tests.goldens compare A B

`write` puts one JSON file for each loop into OUT, and the loops themselves into `OUT/loops.json`: with `--loops` of
such a file the same loops run after the suites have changed. `--only` takes loops whose names hold one of these texts:
`nasty/`, `healthy/`, `mistakes/`, `museum/`, `ranks/`. `compare` names each
difference with an example and how many loops have it; it ends with 1 where there is one.

Only public names of accumviz are used, so that the same tool runs before and after a change of what is behind them.
"""

import argparse
import base64
import dataclasses
import difflib
import gc
import hashlib
import json
import math
import os
import random
import re
import sys
import tempfile
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What differs from one run to the next, or says where it ran.
VARIES = {"time", "accumviz", "torch", "path"}
# A clock that stands still: no time is recorded, and what is measured within a budget of time is always measured.
STILL = "import time\ntime.perf_counter = lambda: 0.0\n"
CLOSE = 1e-5
GLOO = re.compile(r"\s*(\[/\S*/gloo/|Read error|Write error|Connection (closed|reset)).*", re.DOTALL)


# ---------------------------------------------------------------- what a loop leaves


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: six digits, no times, no absolute paths."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if key not in VARIES}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, str):
        return value.replace(str(Path.cwd()) + os.sep, "").replace(sys.prefix, "PREFIX")
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value if isinstance(value, int | None) else str(value)


def fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or a named tuple that say something."""
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else value._fields
    held = {name: plain(getattr(value, name)) for name in names if name not in VARIES}
    return {name: item for name, item in held.items() if item not in (None, "nan", "", [], {})}


def ledger_of(ledger: Any) -> dict[str, Any]:
    """Return a ledger's parameters, windows and events, each with what it left in every `.grad`."""
    events = []
    for event in ledger:
        row, e = fields(event), event.index
        row["frames"] = [frame for frame in row.get("frames", ()) if "goldens.py" not in frame[0]]
        for p, parameter in enumerate(ledger.parameters):
            cell = {"norms": [ledger.contribution[e, p], ledger.grad[e, p]], "state": int(ledger.state[e, p])}
            if parameter.numel <= 4:
                with warnings.catch_warnings(action="ignore"):
                    cell |= elements(ledger, e, p)
            name = parameter.name if parameter.rank is None else f"{parameter.name} of rank {parameter.rank}"
            row.setdefault("parameters", {})[name] = plain(cell | {"live": ledger.live(e, p)})
        events.append(row)
    return {
        "complete": ledger.complete,
        "meta": plain(ledger.meta),
        "sources": sorted(plain(list(ledger.sources))),
        "parameters": [fields(parameter) for parameter in ledger.parameters],
        "windows": [fields(window) for window in ledger.windows()],
        "events": events,
    }


def elements(ledger: Any, event: int, parameter: int) -> dict[str, Any]:
    """Return a small parameter's elements after an event, where they were kept."""
    try:
        kinds = {of: ledger.values(parameter, of=of)[event] for of in ("contribution", "grad")}
    except KeyError:
        return {}
    weights = ledger.weights(parameter)
    return kinds | ({"weights": weights[event]} if weights.size else {})


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:12]


def page(html: str) -> dict[str, str]:
    """Return a hash of each part of a page: its text, and each entry of its data; scripts and styles are left out."""
    html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    html = re.sub(r"\bav[0-9a-f]{6}\b", "avid", html)
    parts = {}
    for kind, body in re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL):
        if "json" not in kind:
            continue
        data = json.loads(body)
        if isinstance(data, dict) and set(data) == {"z"}:
            raw = zlib.decompress(base64.b64decode(data["z"]))
            length = int.from_bytes(raw[:4], "little")
            data = json.loads(raw[4 : 4 + length]) | {"numbers": raw[4 + length :].hex()}
        parts |= {f"data {key}": digest(item) for key, item in data.items()} if isinstance(data, dict) else {}
    return {"text": digest(re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)), **parts}


def describe(ledger: Any, recording: Any = None) -> dict[str, Any]:
    """Return what a recording left, as JSON: its ledger, shares, report, graphs and pages."""
    import accumviz as av

    found: dict[str, Any] = {}
    parts = {
        "ledger": lambda: ledger_of(ledger),
        "shares": lambda: [fields(share) for share in ledger.shares()],
        "findings": lambda: [fields(finding) for finding in av.check(ledger).findings],
        "report": lambda: plain(av.check(ledger).text()).splitlines(),
        "graphs": lambda: {str(e): repr(graph).splitlines() for e, graph in recording.graphs.items()},
        "player": lambda: page(av.play(recording or ledger).to_html()),
        "timeline": lambda: page(av.timeline(ledger).to_html()),
    }
    for name, part in parts.items():
        if name == "graphs" and recording is None:
            continue
        try:
            found[name] = part()
        except Exception as error:
            found[name] = plain(f"{type(error).__name__}: {error}")
    return found


# ---------------------------------------------------------------- running a loop


def recordings_of(loop: dict[str, Any], folder: Path) -> tuple[list[Any], str]:
    """Run a loop in a folder of its own; return the recordings that it opened, and what it raised."""
    import torch

    import accumviz as av

    before, kept = Path.cwd(), set(sys.modules)
    for name, text in loop["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    opened: list[Any] = []
    kind = type(av.record({"w": torch.zeros(1, requires_grad=True)}))
    enter = kind.__enter__

    def entering(recording: Any) -> Any:
        opened.append(recording)
        return enter(recording)

    raised = ""
    kind.__enter__ = entering
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        with warnings.catch_warnings(action="ignore"):
            exec(compile(loop["run"], "main.py", "exec"), {"__name__": "main", "av": av, "torch": torch})
    except BaseException as error:
        raised = type(error).__name__ + "".join(f": {part}" for part in error.args if isinstance(part, str))
    finally:
        kind.__enter__ = enter
        sys.path.remove(str(folder))
        for name in set(sys.modules) - kept:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        os.chdir(before)
        gc.collect()
    return opened, raised.replace(str(folder) + os.sep, "")


def in_rank(loops: list[tuple[str, dict[str, Any]]], folder: str) -> list[tuple[str, str]]:
    """Run loops one after the other in each rank; return for each the file of its first ledger, and what it raised."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    results = []
    for number, (_, loop) in enumerate(loops):
        place = Path(folder) / f"{number}-{dist.get_rank()}"
        place.mkdir(parents=True)
        opened, raised = recordings_of(loop, place)
        file = f"{place}.ledger" if opened else ""
        if opened:
            opened[0].ledger.save(file)
        results.append((file, raised))
        dist.barrier()
    return results


def run_in_ranks(loops: dict[str, dict[str, Any]], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import accumviz as av

    groups = defaultdict(list)
    for name, loop in loops.items():
        groups[name.rsplit("/", 1)[0], loop["ranks"]].append((name, loop))
    for number, ((_, ranks), group) in enumerate(groups.items()):
        place = folder / f"ranks{number}"
        try:
            returned = av.distribute(in_rank, ranks=ranks, loops=group, folder=str(place), timeout=600).returned
        except RuntimeError as error:
            for name, _ in group:
                yield name, {"raised": plain(str(error)).splitlines()[0]}
            continue
        for (name, _), each in zip(group, zip(*returned, strict=True), strict=True):
            ledgers = [av.load(file) for file, _ in each if file]
            described = [describe(ledger) for ledger in ledgers]
            described.append(describe(av.Ledger.merge(ledgers)) if len(ledgers) > 1 else {})
            yield name, {"raised": [raised for _, raised in each], "recordings": described}


def write(out: Path, loops: dict[str, dict[str, Any]]) -> None:
    """Run these loops, and write what each left to a file of its name."""
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    (out / "loops.json").write_text(packed(loops))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        borrowed = folder / "site-packages"  # of which accumviz takes what lies in it for a library
        borrowed.mkdir()
        (borrowed / "sitecustomize.py").write_text(STILL)
        for loop in loops.values():
            for path in [path for path in loop["files"] if path.startswith("site-packages/")]:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(loop["files"].pop(path))
        sys.path.append(str(borrowed))
        os.environ |= {"PYTHONPATH": os.pathsep.join([*sys.path]), "COLUMNS": "120", "MPLBACKEND": "agg"}
        time.perf_counter = lambda: 0.0
        import torch

        torch.set_num_threads(1)
        alone = {name: loop for name, loop in loops.items() if not loop.get("ranks")}
        for number, (name, loop) in enumerate(alone.items()):
            place = folder / str(number)
            place.mkdir()
            opened, raised = recordings_of(loop, place)
            described = [describe(recording.ledger, recording) for recording in opened]
            save(out, name, {"raised": raised, "recordings": described})
        for name, left in run_in_ranks({name: loops[name] for name in loops if name not in alone}, folder):
            save(out, name, left)


def save(out: Path, name: str, left: dict[str, Any]) -> None:
    slug = re.sub(r"[^\w()=,.-]+", "_", name)[:120] + hashlib.sha256(name.encode()).hexdigest()[:6]
    (out / f"{slug}.json").write_text(json.dumps({"loop": name, **left}, indent=1, ensure_ascii=False))


def packed(loops: dict[str, dict[str, Any]]) -> str:
    """Return loops as JSON, each text of a file once."""
    texts: dict[str, int] = {}
    rows = {
        name: loop | {"files": {path: texts.setdefault(text, len(texts)) for path, text in loop["files"].items()}}
        for name, loop in loops.items()
    }
    return json.dumps({"texts": list(texts), "loops": rows}, indent=1)


def unpacked(path: Path) -> dict[str, dict[str, Any]]:
    held = json.loads(path.read_text())
    for loop in held["loops"].values():
        loop["files"] = {name: held["texts"][number] for name, number in loop["files"].items()}
    return held["loops"]


# ---------------------------------------------------------------- comparing two runs


def differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield what differs between two values: where, without the numbers of rows, and how."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            place = f"{at} *" if at.endswith((" parameters", " graphs")) else f"{at} {key}"
            if key not in old or key not in new:
                yield place, "gone" if key in old else "new"
            elif key != "index":  # it follows from the events before
                yield from differences(old[key], new[key], place)
    elif isinstance(old, list) and isinstance(new, list):
        yield from different_rows(old, new, at)
    elif isinstance(old, str) and isinstance(new, str) and GLOO.sub("gloo", old) == GLOO.sub("gloo", new):
        return  # which of two ranks lost the other, and on which port, varies
    elif isinstance(old, int | float) and isinstance(new, int | float) and not isinstance(old, bool):
        if not math.isclose(old, new, rel_tol=CLOSE, abs_tol=1e-9):
            counted = not old or at.endswith((" line", " live"))
            yield at, f"{old} -> {new}" if counted else f"× {new / old:.6g}"
    elif old != new:
        yield at, f"{shortened(old)} -> {shortened(new)}"


def different_rows(old: list[Any], new: list[Any], at: str) -> Iterator[tuple[str, str]]:
    """Yield how two lists differ: rows that say the same of themselves are compared, the others come or go."""
    names = [[title(row) for row in rows] for rows in (old, new)]
    for what, i, j, k, m in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if what == "equal" or (j - i == m - k and at.endswith("live")):
            for one, other in zip(old[i:j], new[k:m], strict=True):
                yield from differences(one, other, at)
        else:
            old_rows, new_rows = (shortened(", ".join(names[n][a:b])) for n, a, b in ((0, i, j), (1, k, m)))
            yield at, f"{old_rows or 'nothing'} -> {new_rows or 'nothing'}"


def title(row: Any) -> str:
    """Return by what a row of a list is known."""
    if isinstance(row, int | float) and not isinstance(row, bool):
        return "a number"
    if isinstance(row, dict):
        return " ".join(str(row[key]) for key in ("kind", "name", "rule", "op", "step", "backward") if key in row)
    return GLOO.sub("gloo", row) if isinstance(row, str) else "a row"


def shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"\b[0-9a-f]{12}\b", "hash", text).replace("\n", "⏎")
    return text if len(text) <= 200 else text[:199] + "…"


def run_in(folder: Path) -> dict[str, Any]:
    held = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "loops.json")
    return {left["loop"]: left for left in held}


def compare(one: Path, other: Path) -> list[str]:
    """Return a line for each difference between two runs: how many loops have it, where, how, and one of them."""
    old, new = run_in(one), run_in(other)
    met: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in {**old, **new}:
        if name not in old or name not in new:
            met["", f"only in {one if name in old else other}"].append(name)
            continue
        for difference in dict.fromkeys(differences(old[name], new[name])):
            met[difference].append(name)
    rows = sorted(met.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{len(names):4} ×{at}: {how}   ({', '.join(names[:2])})" for (at, how), names in rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writes = verbs.add_parser("write")
    writes.add_argument("out", type=Path)
    writes.add_argument("--loops", type=Path, help="a loops.json, instead of the suites")
    writes.add_argument("--only", nargs="+", default=[""], help="loops whose names hold one of these texts")
    compares = verbs.add_parser("compare")
    compares.add_argument("old", type=Path)
    compares.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.verb == "compare":
        lines = compare(asked.old, asked.new)
        print(*lines, sep="\n")
        return int(bool(lines))
    if asked.loops:
        loops = unpacked(asked.loops)
    else:
        from tests.golden_loops import collected

        loops = collected()
    write(asked.out, {name: loops[name] for name in loops if any(text in name for text in asked.only)})
    return 0


if __name__ == "__main__":
    from tests import goldens

    sys.exit(goldens.main())
