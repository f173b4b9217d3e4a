"""The command line: `accumviz run`, `check`, `rules`, `explain`, `compare` and `view`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import webbrowser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accumviz import __version__
from accumviz.checks import report as reports
from accumviz.show import counted, literal, plural

if TYPE_CHECKING:
    from accumviz.checks.report import Report
    from accumviz.ledger.ledger import Ledger

_FAILED, _MISUSED, _UNJUDGED = 1, 2, 3
_EXAMPLES = """examples:
  accumviz run --check train.py --lr 0.1
  accumviz run --check -m package.train
  torchrun --nproc-per-node 2 -m accumviz run train.py
  accumviz check train.rank*.ledger
  accumviz explain loss-not-divided"""


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says; raises `SystemExit` with the exit code where that is not 0."""
    with suppress(AttributeError):  # a stream that was put there instead
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:] if arguments is None else arguments
    words = (each for each in arguments if not each.startswith("-"))
    _refuse_script(next(words, ""), "a command")
    options, unknown = _parser().parse_known_args(arguments)
    if options.do is not _run:  # then the stream is the script's
        with suppress(AttributeError):
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if unknown:
        hint = ""
        if options.do is _run:
            hint = "; the script's own options stand after its name"
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.do(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "accumviz",
        description="What every backward() does to every .grad.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"accumviz {__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        title="commands",
        required=True,
        metavar="run | check | rules | explain | compare | view",
    )

    def command(
        do: Any, name: str, about: str, example: str
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"example: accumviz {name} {example}",
            allow_abbrev=False,
        )
        added.set_defaults(do=do)
        return added

    run = command(
        _run,
        "run",
        "Run a script as python would, and record its training.",
        "--check train.py --lr 0.1",
    )
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
    _add_fail_on(run)
    _add_rules(run)
    run.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run a module, MODULE, as python -m does",
    )
    run.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    check = command(
        _check,
        "check",
        "Say what is wrong with the training in these files.",
        "--fail-on warning train.ledger",
    )
    _add_ledgers(check)
    check.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="print it as text, as JSON, as annotations of GitHub's workflows, or as SARIF",
    )
    _add_fail_on(check)
    _add_rules(check)

    command(_rules, "rules", "List what check looks for.", "")
    explain = command(
        _explain,
        "explain",
        "Say what a rule means: why it matters, an example, and the fix.",
        "loss-not-divided",
    )
    explain.add_argument(
        "rules",
        type=_named,
        metavar="RULE[,RULE]",
        help="as `accumviz rules` lists them",
    )

    compare = command(
        _compare,
        "compare",
        "Say how far the gradients of two recordings are apart, and where they part.",
        "mine.ledger large_batch.ledger",
    )
    compare.add_argument("a", type=Path, metavar="A", help="a ledger")
    compare.add_argument(
        "b", type=Path, metavar="B", help="the ledger that the error is relative to"
    )
    compare.add_argument("--json", action="store_true", help="print it as JSON")

    view = command(
        _view,
        "view",
        "Open the player of a ledger in the browser.",
        "train.ledger",
    )
    _add_ledgers(view)
    view.add_argument(
        "--no-open", action="store_true", help="write the page, and print its path"
    )
    return parser


def _add_ledgers(parser: argparse.ArgumentParser) -> None:
    about = "a ledger; of several ranks, all of them"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=about)


def _add_fail_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-on",
        choices=("error", "warning"),
        help="exit with 1 when there is a finding of this severity or a worse one, "
        "and with 3 when nothing, or not everything, could be judged",
    )
    parser.add_argument(
        "--allow-unjudged",
        action="store_true",
        help="do not fail for what could not be judged",
    )


def _add_rules(parser: argparse.ArgumentParser) -> None:
    for name, about in (
        ("--select", "report the findings of these rules, and count all others"),
        ("--ignore", "only count the findings of these rules"),
    ):
        parser.add_argument(
            name, type=_named, default=frozenset(), metavar="RULE[,RULE]", help=about
        )


def _named(text: str) -> frozenset[str]:
    """Return names of rules. Raises `ArgumentTypeError` for one that there is not."""
    try:
        return reports.rules_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ignored(options: Any) -> frozenset[str]:
    """Return the rules whose findings are only counted."""
    others: frozenset[str] = options.ignore
    if options.select:
        others |= reports.entries().keys() - options.select
    return others


def _count(text: str) -> int:
    """Return a whole number from 0 on. Raises `ArgumentTypeError` for anything else."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 0 on")
    return int(text)


# --- what is said and written ------------------------------------------------------------------


def _fail(why: object) -> NoReturn:
    print(f"accumviz: {why}", file=sys.stderr)
    raise SystemExit(_MISUSED)


def _refuse_script(name: str, expected: str) -> None:
    """Fail where a script was given instead of something else."""
    if name.endswith(".py"):
        script = shlex.quote(literal(name))
        _fail(
            f"{script} is a script; expected {expected}. Did you mean `accumviz run --check {script}`?"
        )


def _warn(line: object) -> None:
    # In one write: other ranks write to the same terminal. A stranger's file may have been read.
    sys.stderr.write(f"accumviz: {literal(str(line))}\n")


def _print(text: object) -> None:
    with _writing_to_stdout():
        print(text)


@contextmanager
def _writing_to_stdout() -> Iterator[None]:
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


def _gate(report: Report, options: Any) -> int:
    """Return the exit code that `--fail-on` makes of a report; a gate that saw nothing is not open."""
    if report.fails(options.fail_on):
        return _FAILED
    return _unjudged(report.reason, options)


def _unjudged(reason: str, options: Any) -> int:
    """Say that `--fail-on` fails for what could not be judged, where it does; return the exit code."""
    if not reason or options.fail_on is None or options.allow_unjudged:
        return 0
    _warn(f"--fail-on {options.fail_on} fails: {reason}")
    return _UNJUDGED


# --- files -------------------------------------------------------------------------------------


def _load(file: Path) -> Ledger:
    from accumviz.ledger.file import LedgerFileError
    from accumviz.ledger.ledger import load

    _refuse_script(str(file), "a ledger")
    try:
        return load(file)
    except LedgerFileError as error:
        _fail(error)
    except OSError as error:
        name = str(error.filename or file)
        _fail(f"cannot read {name!r}: {error.strerror or error}")


def _load_ranks(files: list[Path]) -> list[Ledger]:
    """Return the ledger in a file, or the ledgers of all ranks of one run."""
    ledgers = list(map(_load, files))
    ranks = [ledger.meta.get("rank") for ledger in ledgers]
    if len(ranks) > 1 and (None in ranks or len(set(ranks)) < len(ranks)):
        _fail("expected one file, or those of different ranks of one run")
    count = ledgers[0].meta.get("ranks", 1)
    if ranks != [None] and len(ranks) < count:
        which = f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"
        _warn(
            f"this is {which} of {count}: what the ranks do to each other needs the files of all"
        )
    return ledgers


def _together(ledgers: list[Ledger]) -> Ledger:
    """Return the ledger of a process, or that of all ranks."""
    from accumviz.ledger.ledger import Ledger

    return ledgers[0] if len(ledgers) == 1 else Ledger.merge(ledgers)


def _report(ledgers: list[Ledger], ignore: frozenset[str] = frozenset()) -> Report:
    """Judge one process, or all ranks together."""
    from accumviz.checks.check import check, check_ranks

    if len(ledgers) > 1:
        return check_ranks(ledgers, ignore=ignore)
    return check(*ledgers, ignore=ignore)


def _check(options: Any) -> None:
    ledgers = _load_ranks(options.files)
    report = _report(ledgers, _ignored(options))
    code = _gate(report, options)
    _print(_written(report, options.format, options.files))
    if code:
        raise SystemExit(code)


def _written(report: Report, form: str, files: list[Path]) -> str:
    """Return a report in one of the formats of `check`."""
    match form:
        case "json":
            return report.to_json()
        case "github":
            return reports.github(report)
        case "sarif":
            return reports.sarif(report)
    return f"{report}\n\n{_next(files)}"


def _next(files: Iterable[Path | str]) -> str:
    """Return what to type to look at these files."""
    return f"Look at it: accumviz view {shlex.join(map(literal, map(str, files)))}"


def _rules(options: Any) -> None:
    lines = []
    for name, entry in reports.entries().items():
        _, what, *_ = re.split(r"(?<=\.)\s+(?=[A-Z`])", entry)
        lines.append(f"{name:<28}{literal(what)}")
    _print("\n".join(lines))


def _explain(options: Any) -> None:
    for rule in sorted(options.rules):
        page = reports.address(rule)
        read = f"\nRead: {page}\n" if page else ""
        _print(f"{rule}\n\n{reports.entries()[rule]}\n{read}")


def _compare(options: Any) -> None:
    from accumviz.checks.compare import compare

    mine = _load(options.a)
    reference = _load(options.b)
    try:
        comparison = compare(mine, reference)
    except ValueError as error:
        _fail(error)
    _print(comparison.to_json() if options.json else comparison)


def _view(options: Any) -> None:
    from accumviz import play

    ledgers = _load_ranks(options.files)
    file = options.files[0]
    player = play(_together(ledgers))
    player.report = report = _report(ledgers)
    about = [file.name, *report.steps, *report.losses, report.not_seen]
    player.about = literal(" · ".join(filter(None, about)))
    page = Path(f"{file}.html").absolute()
    try:
        player.save(page)
    except OSError as error:
        _fail(f"cannot write {str(page)!r}: {error.strerror or error}")
    if options.no_open or not webbrowser.open(page.as_uri()):
        _print(page)


# --- run ---------------------------------------------------------------------------------------


def _run(options: Any) -> None:
    from accumviz.recorder.run import CannotRunError, Script, run

    is_module = bool(options.module)
    name, *arguments = _command(options) or [""]
    if not name:
        _fail(
            "run was given no script; expected accumviz run [options] train.py, or accumviz run -m package.module"
        )
    stem = name if is_module else (Path(name).resolve().stem or "run")
    path = Path.cwd() / f"{stem}.ledger"
    if options.out is not None:
        path = options.out.absolute()
        _check_new(path)
    try:
        script = Script(name, arguments, module=is_module)
    except CannotRunError as error:
        _fail(error)
    unreported = 0
    if options.fail_on is not None:
        unreported = _UNJUDGED
    finish = partial(_finish, options=options)
    run(script, path, finish, exact=options.exact, unreported=unreported)


def _command(options: Any) -> list[str]:
    """Return the script, or module, and its arguments."""
    script: list[str] = options.script
    if options.module:
        # From a `--` on, argparse counts arguments of the module as ours.
        return [*options.module, *script]
    return script[1:] if script[:1] == ["--"] else script


def _check_new(path: Path) -> None:
    """Fail for a ledger's file that cannot be made, or is there already."""
    if not path.parent.is_dir():
        _fail(f"{_short(path)!r} cannot be written: there is no such folder")
    if path.exists():
        _fail(f"{_short(path)!r} exists already; pass another name with --out")


def _finish(
    recordings: list[Any], notes: list[str], files: list[Path], options: Any
) -> int:
    """Say on stderr what was recorded, and what is wrong with it; return the exit code for a script that ended well."""
    is_judged = options.check or options.fail_on is not None
    if is_judged and not (recordings or files):
        notes = notes or ["nothing was recorded: this process did not import torch"]
    unjudged = _unjudged(notes[0] if notes else "", options)
    codes = [unjudged]
    for line in (*map(_closing_line, recordings), *map(_line_of_child, files)):
        _warn(line)
    if is_judged:
        codes += [_judge(recording, options) for recording in recordings]
        codes += _judge_children(files, options)
    # The first one is said with the code.
    for note in notes[bool(unjudged) :]:
        _warn(note)
    if not is_judged:
        _say_misplaced(_command(options))
    else:
        _say_next([recording.file for recording in recordings])
    return _FAILED if _FAILED in codes else max(codes)


def _line_of_child(file: Path) -> str:
    """Return what a process that the script started has recorded, and where it is."""
    return f"{counted(len(_load(file)), 'event')} → {_short(file)}"


def _judge_children(files: list[Path], options: Any) -> Iterator[int]:
    """Say what is wrong with what the processes that a script started have recorded; return the exit codes."""
    if not files:
        return
    ledgers = list(map(_load, files))
    # Those of one run are numbered through; others are judged one by one.
    ranks = {ledger.meta.get("rank") for ledger in ledgers}
    together = [ledgers] if len(ranks) == len(ledgers) else [[one] for one in ledgers]
    for judged in together:
        report = _report(judged, _ignored(options))
        yield _gate(report, options)
        sys.stderr.write(f"{report.text(**reports.terminal(sys.stderr))}\n")
    sys.stderr.write(f"\n{_next(map(_short, files))}\n")


def _say_misplaced(command: list[str]) -> None:
    """Say which option for us stood after the script, and so was the script's."""
    name, *arguments = command
    given = {argument.partition("=")[0] for argument in arguments}
    for option in ("--check", "--fail-on"):
        if option in given:
            _warn(
                f"{option} stands after {name}, so the script got it; if it is meant for accumviz, put it before"
            )


def _say_next(files: list[Path | None]) -> None:
    """Say what to type next; of several ranks, the first says it for all."""
    written = [_short(file) for file in files if file is not None and file.exists()]
    if not written:
        return
    ranks = re.sub(r"\.rank0(\.\w+)$", r".rank*\1", written[0])
    if ranks != written[0]:
        sys.stderr.write(f"\nJudge all ranks together: accumviz check {ranks}\n")
        sys.stderr.write(f"Look at it: accumviz view {ranks}\n")
    elif not re.search(r"\.rank\d+\.\w+$", written[0]):
        sys.stderr.write(f"\n{_next(written[:1])}\n")


def _closing_line(recording: Any) -> str:
    """Return what was recorded and where it is."""
    file = recording.file
    events = str(recording.counted)
    if file is None or not file.exists():
        return events
    if not recording.is_on_disk():
        events += ", of which the file holds a part, because it was cut short"
    return f"{events} → {_short(file)}"


def _judge(recording: Any, options: Any) -> int:
    """Say what is wrong with one recording; return the exit code that `--fail-on` makes of it."""
    from accumviz.checks.check import check
    from accumviz.ledger.file import LedgerFileError

    try:
        ledger = recording.ledger
    except LedgerFileError as error:
        _warn(f"no verdict: {error}")
        return _unjudged(str(error), options)
    report = check(ledger, ignore=_ignored(options))
    code = _gate(report, options)
    rank = ledger.meta.get("rank")
    if rank:
        # What the ranks have in common would stand on the terminal once for each.
        rules = ", ".join(dict.fromkeys(finding.rule for finding in report.findings))
        _warn(f"rank {rank}: {rules or report.verdict}")
    else:
        sys.stderr.write(f"{report.text(**reports.terminal(sys.stderr))}\n")
    return code


def _short(file: Path) -> str:
    with suppress(ValueError, OSError):
        return str(file.relative_to(Path.cwd()))
    return str(file)
