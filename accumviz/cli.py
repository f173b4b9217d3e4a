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
    ours, script = _apart(sys.argv[1:] if arguments is None else arguments)
    asked, unknown = parser.parse_known_args(ours)
    if unknown:
        said = f"unrecognized arguments: {' '.join(unknown)}"
        if asked.do is _run:
            said += "; the script's own options stand after its name"
        parser.error(said)
    asked.script = script
    with suppress(AttributeError):  # a stream that somebody put there instead
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    asked.do(asked)


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what is ours of a command line, and what `run` is to run, from its name or from `-m` on.

    >>> _apart(["run", "--out", "a.ledger", "-m", "package", "--", "-q"])
    (['run', '--out', 'a.ledger'], ['-m', 'package', '--', '-q'])
    """
    if arguments[:1] != ["run"]:
        return arguments, []
    at = 1
    while at < len(arguments) and arguments[at].startswith("-"):
        if arguments[at] == "--":
            return arguments[:at], arguments[at + 1 :]
        if arguments[at].startswith("-m"):
            break
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
    """Return a whole number from 0 on. Raises `ArgumentTypeError` for anything else."""
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
    """Have what is written meanwhile get there, or say why not; a reader that has seen enough is no failure."""
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


@contextmanager
def _writing_to(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _fail(f"cannot write {str(file)!r}: {error.strerror or error}")


def _ledger(file: Path) -> Any:
    """Return the ledger in a file."""
    from accumviz.ledger.container import LedgerFileError
    from accumviz.ledger.ledger import load

    try:
        return load(file)
    except LedgerFileError as error:
        _fail(error)
    except OSError as error:
        name = str(error.filename or file)
        _fail(f"cannot read {name!r}: {error.strerror or error}")


def _ranks(files: list[Path]) -> Iterator[Any]:
    """Yield the ledger of each rank, one after the other; of one file, whatever ledger it holds."""
    met: list[int] = []
    ranks = 0
    for file in files:
        ledger = _ledger(file)
        rank = ledger.meta.get("rank")
        if len(files) > 1 and rank is None:
            _fail(
                f"{str(file)!r} is no rank's ledger; expected one file, or those of the ranks of one run"
            )
        if rank in met:
            _fail(
                f"{str(file)!r} is of rank {rank}, as another file is; expected each rank once"
            )
        if rank is not None:
            met.append(int(rank))
            ranks = max(ranks, int(ledger.meta.get("ranks", 0)))
        yield ledger
        del ledger
    if len(met) < ranks:
        known = ", ".join(map(str, sorted(met)))
        which = f"rank{'s' * (len(met) > 1)} {known}"
        _warn(
            f"this is {which} of {ranks}: what the ranks do to each other needs the files of all"
        )


def _merged(files: list[Path]) -> Any:
    """Return the ledger in a file, or that of all ranks in theirs."""
    from accumviz.ledger.ledger import Ledger

    ledgers = list(_ranks(files))
    return ledgers[0] if len(ledgers) == 1 else Ledger.merge(ledgers)


def _check(asked: Any) -> None:
    from accumviz.checks.check import check, check_ranks

    several = len(asked.files) > 1
    report = (
        check_ranks(_ranks(asked.files)) if several else check(_merged(asked.files))
    )
    _say_why_it_fails(report, asked.fail_on)
    _say(report.to_json() if asked.json else report)
    _page(report, asked.html)
    if _fails(report, asked.fail_on):
        raise SystemExit(_FAILED)


def _compare(asked: Any) -> None:
    from accumviz.checks.compare import compare

    ledgers = [_merged([file]) for file in (asked.a, asked.b)]
    try:
        comparison = compare(*ledgers)
    except ValueError as error:
        _fail(error)
    _say(comparison.to_json() if asked.json else comparison)
    _page(comparison, asked.html)


def _page(report: Any, file: Path | None) -> None:
    if file is not None:
        from accumviz.show import save_page

        with _writing_to(file):
            save_page(file, type(report).__name__, report.to_html())


def _say_why_it_fails(report: Report, severity: str | None) -> None:
    if severity is not None and report.verdict == "no verdict":
        _warn(f"--fail-on {severity} fails: {report.reason}")


def _fails(report: Report, severity: str | None) -> bool:
    """Return whether `--fail-on` turns this report into a failure; a gate that saw nothing is not open."""
    if severity is None:
        return False
    severities = {finding.severity for finding in report.findings}
    return report.verdict == "no verdict" or not severities.isdisjoint(_WORSE[severity])


def _view(asked: Any) -> None:
    from accumviz import play

    one = len(asked.files) == 1
    player = play(_ledger(asked.files[0]) if one else _merged(asked.files))
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

    ledger, out = _merged(asked.files), asked.out
    if asked.to == "tensorboard":
        if out is None:
            _fail(
                "export --to tensorboard writes a folder; name it with --out, for instance --out runs/train"
            )
        try:
            with _writing_to(out):
                export.to_tensorboard(ledger, out)
        except ImportError as error:
            _fail(error)
        return
    write = getattr(export, f"to_{asked.to}")
    if out is None:
        with _writing():
            write(ledger, sys.stdout)
        return
    with (
        _writing_to(out),
        out.open("x", encoding="utf-8", errors="replace", newline="") as file,
    ):
        write(ledger, file)


# --- run ---------------------------------------------------------------------------------------


def _run(asked: Any) -> None:
    from accumviz.recorder.run import CannotRunError, Script, run

    command = asked.script
    module = bool(command) and command[0].startswith("-m")
    if module:  # `-m name` or `-mname`
        command = [command[0][2:], *command[1:]] if command[0] != "-m" else command[1:]
    if not command:
        _fail(
            "run was given no script; expected accumviz run [options] train.py, or accumviz run -m package.module"
        )
    path = _place(asked.out, command[0], module=module)
    page = _checked_page(asked.html)
    judged = asked.check or page is not None or asked.fail_on is not None

    def finish(recordings: list[Any], notes: list[str], ended: str) -> int:
        return _finish(recordings, notes, page, asked.fail_on, judged=judged)

    try:
        script = Script(command[0], command[1:], module=module)
        run(script, path, finish, exact=asked.exact)
    except CannotRunError as error:
        _fail(error)


def _checked_page(given: Path | None) -> Path | None:
    if given is None:
        return None
    page, cannot = given.absolute(), f"{str(given)!r} cannot be written"
    if not page.parent.is_dir():
        _fail(f"{cannot}: there is no folder {str(page.parent)!r}")
    if page.is_dir():
        _fail(f"{cannot}: it is a folder")
    return page


def _place(given: Path | None, name: str, *, module: bool) -> Path:
    """Return where the ledger goes, whatever folder the script changes to; one that was asked for may not exist."""
    if given is None:
        stem = name if module else (Path(name).resolve().stem or "run")
        return Path.cwd() / f"{stem}.ledger"
    path, rank = given.absolute(), os.environ.get("RANK", "")
    if not path.parent.is_dir():
        _fail(
            f"{str(given)!r} cannot be written: there is no folder {str(path.parent)!r}"
        )
    if rank.isdigit() and os.environ.get("WORLD_SIZE", "").isdigit():
        taken = path.with_name(f"{path.stem}.rank{rank}{path.suffix}").exists()
    else:
        taken = path.exists()
    if taken:
        _fail(f"{str(given)!r} exists already; pass another name with --out")
    return path


def _finish(
    recordings: list[Any],
    notes: list[str],
    page: Path | None,
    fail_on: str | None,
    *,
    judged: bool,
) -> int:
    """Say on stderr what was recorded, and what is wrong with it; return the exit code for a script that ended well."""
    if judged and not recordings and not notes:
        notes = ["nothing was recorded: this process did not import torch"]
    codes = [0]
    if fail_on is not None and not recordings:
        _warn(f"--fail-on {fail_on} fails: {notes[0]}")
        notes, codes = notes[1:], [_FAILED]
    for n, recording in enumerate(recordings):
        _warn(_closing(recording))
        if judged:
            codes.append(_judge(recording, _numbered(page, n), fail_on))
    for note in notes:
        _warn(note)
    return _FAILED if _FAILED in codes else max(codes)


def _numbered(page: Path | None, n: int) -> Path | None:
    return page.with_stem(f"{page.stem}.model{n + 1}") if page and n else page


def _closing(recording: Any) -> str:
    """Return what was recorded and where it is; of a file that lacks some of it, what it really holds."""
    file, counted = recording.file, str(recording.counted)
    if file is None or not file.exists():
        return counted
    if not recording.is_on_disk():
        counted += f", of which the file holds {_held(file)}"
    return f"{counted} → {_shown(file)}"


def _held(file: Path) -> str:
    from accumviz.ledger.container import LedgerFileError
    from accumviz.ledger.ledger import load

    try:
        return f"{len(load(file, repair=True))}, because it was cut short"
    except LedgerFileError as error:
        return f"none ({error})"


def _judge(recording: Any, page: Path | None, fail_on: str | None) -> int:
    """Say what is wrong with one recording; return the exit code that follows from it."""
    from accumviz.checks.check import check
    from accumviz.ledger.container import LedgerFileError

    try:
        ledger = recording.ledger
    except LedgerFileError as error:
        _warn(f"no verdict: {error}")
        return _FAILED if fail_on else 0
    report = check(ledger)
    _say_why_it_fails(report, fail_on)
    rank = ledger.meta.get("rank")
    if rank:
        # What the ranks have in common would stand on the terminal once for each.
        rules = ", ".join(dict.fromkeys(finding.rule for finding in report.findings))
        _warn(f"rank {rank}: {rules or report.verdict}")
    else:
        sys.stderr.write(f"{report.text(color=_colored())}\n")
    if rank == 0:
        every = _shown(_of_all_ranks(recording.file))
        sys.stderr.write(
            f"  This is rank 0; all ranks are judged together by: accumviz check {every}\n"
        )
    code = _FAILED if _fails(report, fail_on) else 0
    try:
        _page(report, page)
    except SystemExit:  # said already; the other recordings are still to be judged
        return code or _MISUSED
    return code


def _of_all_ranks(file: Path | None) -> Path:
    """Return the files of all ranks, as a shell finds them.

    >>> _of_all_ranks(Path("train.rank0.ledger")).name
    'train.rank*.ledger'
    """
    if file is None:
        return Path("the files of all ranks")
    return file.with_name(re.sub(r"\.rank\d+(\.\w+)$", r".rank*\1", file.name))


def _shown(file: Path) -> str:
    with suppress(ValueError, OSError):
        return str(file.relative_to(Path.cwd()))
    return str(file)


def _colored() -> bool:
    wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return wanted and bool(getattr(sys.stderr, "isatty", bool)())
