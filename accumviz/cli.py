"""The command line: `accumviz run`, `check`, `compare`, `view` and `export`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accumviz import __version__

if TYPE_CHECKING:
    from accumviz.checks.report import Report

_FAILED, _MISUSED = 1, 2
# The options of `run` that have a value behind them.
_VALUED = ("--out", "--html", "--fail-on", "--exact")
_WORSE = {"error": ("error",), "warning": ("error", "warning")}


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says; raises `SystemExit` with the exit code where that is not 0."""
    parser = _parser()
    own, script = _apart(sys.argv[1:] if arguments is None else arguments)
    asked, unknown = parser.parse_known_args(own)
    if unknown:
        told = (
            "; the script's own options stand after its name"
            if asked.do is _run
            else ""
        )
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{told}")
    asked.script = script
    with suppress(AttributeError):  # a stream that somebody put there instead
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    asked.do(asked)


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours of a command line, and what `run` is to run, from its name or from `-m` on, as it stands there.

    >>> _apart(["run", "--out", "a.ledger", "-m", "package", "--", "-q"])
    (['run', '--out', 'a.ledger'], ['-m', 'package', '--', '-q'])
    """
    at = len(arguments)
    if arguments[:1] == ["run"]:
        at = 1
        while (
            at < len(arguments)
            and arguments[at].startswith("-")
            and not arguments[at].startswith("-m")
        ):
            if arguments[at] == "--":
                return arguments[:at], arguments[at + 1 :]
            at += 2 if arguments[at] in _VALUED else 1
    return arguments[:at], arguments[at:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "accumviz", description="What every backward() does to every .grad."
    )
    parser.add_argument(
        "--version", action="version", version=f"accumviz {__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="run | check | compare | view | export"
    )

    def command(
        name: str, do: Callable[[Any], None], about: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=about, description=about, allow_abbrev=False
        )
        added.set_defaults(do=do)
        return added

    run = command("run", _run, "Run a script as python would, and record its training.")
    run.usage = "accumviz run [options] (-m MODULE | SCRIPT) [ARGUMENT ...]"
    run.add_argument(
        "--check",
        action="store_true",
        help="print at the end what is wrong with the loop (stderr)",
    )
    run.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the ledger's file (SCRIPT.ledger, in this folder)",
    )
    run.add_argument(
        "--exact",
        type=_count,
        default=64,
        metavar="N",
        help="keep each element of tensors of up to N elements (64), as `compare` needs them",
    )
    _judging(run)
    # For the help alone: what stands from here on is the script's.
    run.add_argument(
        "-m", action="store_true", help="run a module, MODULE, as python -m does"
    )

    check = command(
        "check", _check, "Say what is wrong with the training in these files."
    )
    check.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a ledger; of several ranks, all of them",
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    _judging(check)

    compare = command(
        "compare",
        _compare,
        "Say how far the gradients of two recordings are apart, and why.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="a ledger")
    compare.add_argument(
        "b", type=Path, metavar="B", help="the ledger that the error is relative to"
    )
    compare.add_argument(
        "--json", action="store_true", help="print the comparison as JSON"
    )
    compare.add_argument(
        "--html", type=Path, metavar="FILE", help="write the comparison as a page"
    )

    view = command("view", _view, "Open the player of a ledger in the browser.")
    view.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a ledger; of several ranks, all of them",
    )
    view.add_argument(
        "--no-open", action="store_true", help="write the page, and print its path"
    )

    export = command("export", _export, "Write a ledger in another format.")
    export.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a ledger; of several ranks, all of them",
    )
    export.add_argument(
        "--to", required=True, choices=("csv", "json", "perfetto", "tensorboard")
    )
    export.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write to a file that is not there yet (of tensorboard, a folder)",
    )
    return parser


def _count(text: str) -> int:
    """A whole number from 0 on. Raises `ArgumentTypeError` for anything else."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 0 on")
    return int(text)


def _judging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page"
    )
    parser.add_argument(
        "--fail-on",
        choices=tuple(_WORSE),
        help="exit with 1 when there is a finding of this severity or a worse one, or when nothing could be judged",
    )


# --- files -------------------------------------------------------------------------------------


def _fail(said: object) -> NoReturn:
    print(f"accumviz: {said}", file=sys.stderr)
    raise SystemExit(_MISUSED)


@contextmanager
def _writing() -> Iterator[None]:
    """What is written meanwhile gets there, or it is said why not; that a reader has seen enough is no failure."""
    if sys.stdout is None:  # as Python has it where `>&-` closed it
        _fail("cannot write to the standard output: it is closed")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is left would be written at the end once more, and fail there.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _fail(f"cannot write to the standard output: {error.strerror or error}")


def _warn(said: object) -> None:
    # In one write: other ranks write to the same terminal.
    sys.stderr.write(f"accumviz: {said}\n")


def _say(said: object) -> None:
    with _writing():
        print(said)


def _read(files: list[Path]) -> Iterator[Any]:
    """What is in each file, one after the other; of several, the ledger of each rank once."""
    from accumviz.graph.file import LedgerFileError, load
    from accumviz.ledger.ledger import Ledger

    ranks: list[int] = []
    most = 0
    for file in files:
        try:
            ledger = load(file)
        except LedgerFileError as error:
            _fail(error)
        except OSError as error:
            _fail(
                f"cannot read {str(error.filename or file)!r}: {error.strerror or error}"
            )
        if len(files) > 1:
            if not isinstance(ledger, Ledger):
                _fail(
                    f"{str(file)!r} holds a graph; expected the ledgers of several ranks"
                )
            if "rank" not in ledger.meta:
                _fail(
                    f"{str(file)!r} is no rank's ledger; expected one file, or those of the ranks of one run"
                )
            if ledger.meta["rank"] in ranks:
                _fail(
                    f"{str(file)!r} is of rank {ledger.meta['rank']}, as another file is; expected each rank once"
                )
        if "rank" in getattr(ledger, "meta", {}):
            ranks.append(int(ledger.meta["rank"]))
            most = max(most, int(ledger.meta.get("ranks", 0)))
        yield ledger
        del ledger
    if len(ranks) < most:
        there = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
        said = f"this is {there} of {most}: what the ranks do to each other needs the files of all"
        print(f"accumviz: {said}", file=sys.stderr)


def _load(files: list[Path]) -> Any:
    """The ledger in a file, or that of all ranks in theirs; a graph only where it is alone."""
    from accumviz.ledger.ledger import Ledger

    found = list(_read(files))
    return found[0] if len(found) == 1 else Ledger.merge(found)


def _check(asked: Any) -> None:
    from accumviz.checks.check import check, check_ranks
    from accumviz.ledger.ledger import Ledger

    if len(asked.files) > 1:
        report = check_ranks(_read(asked.files))
    else:
        ledger = _load(asked.files)
        if not isinstance(ledger, Ledger):
            _fail(f"{str(asked.files[0])!r} holds a graph; expected a ledger")
        report = check(ledger)
    if asked.fail_on and report.verdict == "no verdict":
        _warn(f"--fail-on {asked.fail_on} fails: {report.reason}")
    _say(report.to_json() if asked.json else report)
    _page(report, asked.html)
    if _fails(report, asked.fail_on):
        raise SystemExit(_FAILED)


def _compare(asked: Any) -> None:
    from accumviz.checks.compare import compare
    from accumviz.ledger.ledger import Ledger

    found = [_load([file]) for file in (asked.a, asked.b)]
    for file, ledger in zip((asked.a, asked.b), found, strict=True):
        if not isinstance(ledger, Ledger):
            _fail(f"{str(file)!r} holds a graph; expected a ledger")
    try:
        comparison = compare(found[0], found[1])
    except ValueError as error:
        _fail(error)
    _say(comparison.to_json() if asked.json else comparison)
    _page(comparison, asked.html)


def _page(report: Any, file: Path | None) -> None:
    if file is not None:
        from accumviz.show import save_page

        try:
            save_page(file, type(report).__name__, report.to_html())
        except OSError as error:
            _fail(f"cannot write {str(file)!r}: {error.strerror or error}")


def _fails(report: Report, severity: str | None) -> bool:
    """Whether `--fail-on` turns this report into a failure; a gate that saw nothing is not open."""
    if severity is None:
        return False
    severities = {finding.severity for finding in report.findings}
    return report.verdict == "no verdict" or not severities.isdisjoint(_WORSE[severity])


def _view(asked: Any) -> None:
    from accumviz.views.player import play

    player = play(_load(asked.files))
    page = Path(f"{asked.files[0]}.html")
    try:
        player.save(page)
    except OSError:  # a folder that may only be read
        page = Path(tempfile.mkdtemp(prefix="accumviz-")) / page.name
        player.save(page)
    page = page.absolute()
    if asked.no_open or not webbrowser.open(page.as_uri()):
        _say(page)


def _export(asked: Any) -> None:
    from accumviz import export
    from accumviz.ledger.ledger import Ledger

    ledger = _load(asked.files)
    if not isinstance(ledger, Ledger):
        _fail(f"{str(asked.files[0])!r} holds a graph; expected a ledger")
    if asked.to == "tensorboard":
        if asked.out is None:
            _fail(
                "export --to tensorboard writes a folder; name it with --out, for instance --out runs/train"
            )
        try:
            export.to_tensorboard(ledger, asked.out)
        except ImportError as error:
            _fail(error)
        except OSError as error:
            _fail(f"cannot write {str(asked.out)!r}: {error.strerror or error}")
        return
    write = {
        "csv": export.to_csv,
        "json": export.to_json,
        "perfetto": export.to_perfetto,
    }[asked.to]
    if asked.out is None:
        with _writing():
            write(ledger, sys.stdout)
        return
    try:
        with asked.out.open(
            "x", encoding="utf-8", errors="replace", newline=""
        ) as file:
            write(ledger, file)
    except OSError as error:
        _fail(f"cannot write {str(asked.out)!r}: {error.strerror or error}")


# --- run ---------------------------------------------------------------------------------------


def _run(asked: Any) -> None:
    from accumviz.recorder.run import CannotRunError, Script, run

    command = asked.script
    module = bool(command) and command[0].startswith("-m")
    if module:
        command = [command[0][2:], *command[1:]] if command[0] != "-m" else command[1:]
    if not command:
        _fail(
            "run was given no script; expected accumviz run [options] train.py, or accumviz run -m package.module"
        )
    path = _place(asked.out, command[0], module=module)
    page = None if asked.html is None else asked.html.absolute()
    if page is not None and not page.parent.is_dir():
        _fail(
            f"{str(asked.html)!r} cannot be written: there is no folder {str(page.parent)!r}"
        )
    if page is not None and page.is_dir():
        _fail(f"{str(asked.html)!r} cannot be written: it is a folder")
    judged = asked.check or page is not None or asked.fail_on is not None

    def finish(recordings: list[Any], notes: list[str], ended: str) -> int:
        return _finish(recordings, notes, page, asked.fail_on, judged=judged)

    try:
        run(
            Script(command[0], command[1:], module=module),
            path,
            finish,
            exact=asked.exact,
        )
    except CannotRunError as error:
        _fail(error)


def _place(given: Path | None, name: str, *, module: bool) -> Path:
    """Where the ledger goes, whatever folder the script changes to; a file that was asked for may not be there."""
    rank = os.environ.get("RANK", "")
    ranked = (
        f".rank{rank}"
        if rank.isdigit() and os.environ.get("WORLD_SIZE", "").isdigit()
        else ""
    )

    def taken(path: Path) -> bool:
        return path.with_name(f"{path.stem}{ranked}{path.suffix}").exists()

    if given is not None:
        path = given.absolute()
        if taken(path):
            _fail(f"{str(given)!r} exists already; pass another name with --out")
        if not path.parent.is_dir():
            _fail(
                f"{str(given)!r} cannot be written: there is no folder {str(path.parent)!r}"
            )
        return path
    stem = name if module else (Path(name).resolve().stem or "run")
    names = (
        Path.cwd() / f"{stem}{'' if n == 1 else f'-{n}'}.ledger"
        for n in range(1, 100_000)
    )
    return next(path for path in names if not taken(path))


def _finish(
    recordings: list[Any],
    notes: list[str],
    page: Path | None,
    fail_on: str | None,
    *,
    judged: bool,
) -> int:
    """Say on stderr what was recorded, and what is wrong with it; the exit code for a script that ended well."""
    codes = [0]
    if judged and not recordings and not notes:
        notes = ["nothing was recorded: this process did not import torch"]
    if fail_on is not None and not recordings:
        _warn(f"--fail-on {fail_on} fails: {notes[0]}")
        notes, codes = notes[1:], [_FAILED]
    for n, recording in enumerate(recordings):
        _warn(_closing(recording))
        if judged:
            numbered = (
                page.with_stem(f"{page.stem}.model{n + 1}") if page and n else page
            )
            codes.append(_judge(recording, numbered, fail_on))
    for note in notes:
        _warn(note)
    return _FAILED if _FAILED in codes else max(codes)


def _closing(recording: Any) -> str:
    """What was recorded and where it is; of a file that lacks some of it, what it really holds."""
    if recording.file is None or not recording.file.exists():
        return str(recording.counted)
    if recording.is_on_disk():
        return f"{recording.counted} → {_shown(recording.file)}"
    return f"{recording.counted}, of which the file holds {_held(recording.file)} → {_shown(recording.file)}"


def _held(file: Path) -> str:
    from accumviz.graph.file import LedgerFileError, load

    try:
        return f"{len(load(file, repair=True))}, because it was cut short"
    except LedgerFileError as error:
        return f"none ({error})"


def _judge(recording: Any, page: Path | None, fail_on: str | None) -> int:
    """Say what is wrong with one recording; the exit code that follows from it."""
    from accumviz.checks.check import check
    from accumviz.graph.file import LedgerFileError

    try:
        ledger = recording.ledger
    except LedgerFileError as error:
        _warn(f"no verdict: {error}")
        return _FAILED if fail_on else 0
    report = check(ledger)
    if fail_on and report.verdict == "no verdict":
        _warn(f"--fail-on {fail_on} fails: {report.reason}")
    rank = ledger.meta.get("rank")
    if rank:
        # What the ranks have in common would stand on the terminal once for each.
        rules = ", ".join(dict.fromkeys(finding.rule for finding in report.findings))
        _warn(f"rank {rank}: {rules or report.verdict}")
    else:
        sys.stderr.write(f"{report.text(color=_colored())}\n")
    if rank == 0:
        every = (
            _shown(_of_all_ranks(recording.file))
            if recording.file
            else "the files of all ranks"
        )
        sys.stderr.write(
            f"  This is rank 0; all ranks are judged together by: accumviz check {every}\n"
        )
    code = _FAILED if _fails(report, fail_on) else 0
    try:
        _page(report, page)
    except SystemExit:  # said already; the other recordings are still to be judged
        return code or _MISUSED
    return code


def _of_all_ranks(file: Path) -> Path:
    """The files of all ranks, as a shell finds them.

    >>> _of_all_ranks(Path("train.rank0.ledger")).name
    'train.rank*.ledger'
    """
    return file.with_name(re.sub(r"\.rank\d+(\.\w+)$", r".rank*\1", file.name))


def _shown(file: Path) -> str:
    with suppress(ValueError, OSError):
        return str(file.relative_to(Path.cwd()))
    return str(file)


def _colored() -> bool:
    wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return wanted and bool(getattr(sys.stderr, "isatty", bool)())
