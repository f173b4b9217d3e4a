"""Run every benchmark, say each row as a line of JSON, then all in one table, and fail if a bar does not hold.

A benchmark is a module here with `run(quick: bool = False) -> list[dict]`, whose rows have name, value, unit, bar
and holds. Values are ratios taken inside one run wherever speed is meant: machines differ, ratios less so. Where its
`missing() -> str`, if it has one, says what this machine lacks, it is left out: an error if it was asked for by name.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import platform
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
FIELDS = ("name", "value", "unit", "bar", "holds")


def modules() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules([str(HERE)]) if not module.name.startswith("_"))


def machine() -> dict[str, Any]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows under one another; a row without a bar is there to compare with.

    >>> print(table([{"name": "recording", "value": 1.02, "unit": "×", "bar": "≤ 1.03", "holds": True}]))
    recording  1.02 ×  ≤ 1.03  holds
    """
    cells = [
        (
            str(row["name"]),
            f"{row['value']:.4g} {row['unit']}" if isinstance(row["value"], float) else f"{row['value']} {row['unit']}",
            "" if row["bar"] is None else str(row["bar"]),
            "" if row["holds"] is None else ("holds" if row["holds"] else "DOES NOT HOLD"),
        )
        for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(3)] if cells else []
    return "\n".join(
        "  ".join((name.ljust(widths[0]), value.rjust(widths[1]), bar.ljust(widths[2]), holds)).rstrip()
        for name, value, bar, holds in cells
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed and size, as ratios.")
    parser.add_argument("only", nargs="*", help=f"of: {', '.join(modules())}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: whether it runs, not how fast it is")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only) - set(modules()))
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(modules())}")

    kept: dict[str, Any] = {**machine(), "quick": options.quick, "benchmarks": {}}
    for name in options.only or modules():
        started = time.monotonic()
        benchmark = import_module(f"benchmarks.{name}")
        lacking = benchmark.missing() if hasattr(benchmark, "missing") else ""
        if lacking:
            print(f"{name} is left out: {lacking}", file=sys.stderr, flush=True)
            continue
        rows = [{field: row.get(field) for field in FIELDS} for row in benchmark.run(options.quick)]
        kept["benchmarks"][name] = rows
        for row in rows:
            print(json.dumps(row, ensure_ascii=False, default=float), flush=True)
        print(f"{name} took {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if not kept["benchmarks"]:
        return 2
    print(f"\n{table([row for rows in kept['benchmarks'].values() for row in rows])}")
    RESULTS.write_text(json.dumps(kept, indent=2, ensure_ascii=False, default=float) + "\n")
    print(f"\nKept in {RESULTS.name}: {kept['cpus']} CPUs, torch {kept['torch']}, {kept['date']}")
    if set(options.only) - kept["benchmarks"].keys():
        return 2
    return int(any(row["holds"] is False for rows in kept["benchmarks"].values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
