"""The command line: what it runs is as without it, what it says is what was recorded, and bad input is told so."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accumviz as av
from accumviz.checks.check import RULES
from accumviz.cli import main
from accumviz.ledger.events import Parameter
from tests.by_hand import term
from tests.light import LIGHT
from tests.toys import W, backward

ROOT = Path(__file__).resolve().parents[1]
# A right loop in windows of two; every script ends with its weights on stdout, to the last bit.
HEAD = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)

def make():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.1), torch.nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def train(model, optimizer, epochs=1, **how):
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    for _ in range(epochs):
        for i, (x, y) in enumerate(DataLoader(data, batch_size=4, shuffle=True, **how)):
            loss = torch.nn.functional.mse_loss(model(x), y) / 2
            loss.backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

def tell(model):
    print([v.hex() for p in model.parameters() for v in p.detach().double().flatten().tolist()])

"""
SCRIPTS = {
    "plain": """
m, o = make()
train(m, o)
tell(m)
def f(x: int): ...
print(sys.argv, __name__, __file__, sys.path[0], sys.stdin.read(), sys.modules['__main__'].m is m, f.__annotations__)
""",
    "exits": "m, o = make()\ntrain(m, o)\ntell(m)\nsys.exit(3)",
    "raises": "def f():\n    m, o = make()\n    train(m, o)\n    tell(m)\n    raise ValueError('no')\nf()",
    "forks": """
m, o = make()
train(m, o)
child = os.fork()
train(m, o)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
else:
    sys.exit(7)
tell(m)
""",
    "has workers": "m, o = make()\ntrain(m, o, num_workers=1)\ntell(m)",
    "deletes its model": "m, o = make()\ntrain(m, o)\ntell(m)\ndel m, o\nm, o = make()\ntrain(m, o)\ntell(m)",
    "trains nothing": "print('nothing')",
    "has two models and replaces step": """
a, o = make()
b, p = make()
step = torch.optim.AdamW.step
torch.optim.AdamW.step = lambda self, *args: (print('step'), step(self, *args))[1]
train(a, o)
train(b, p)
tell(a)
tell(b)
""",
    "changes its folder and catches the interrupt": """
m, o = make()
os.mkdir('a')
os.chdir('a')
try:
    train(m, o)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print('caught', os.getcwd())
tell(m)
""",
    "is interrupted": "m, o = make()\ntrain(m, o)\ntell(m)\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "is killed": """
m, o = make()
train(m, o)
tell(m)
sys.stdout.flush()
time.sleep(0.6)
train(m, o)
os.kill(os.getpid(), signal.SIGKILL)
""",
}
NAMED = "loss-not-divided"
# backward, step and zero_grad of one training, loader's beginning and end with them
WHOLE = ["loader", *["backward", "backward", "step", "zero_grad"] * 2, "loader"]


def start(folder: Path, *command: str, **env: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    pipe: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Whoever runs the tests in the background has had them ignore it.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = (sys.executable, *command)
    return subprocess.Popen(command, cwd=folder, env=os.environ | env, text=True, preexec_fn=heed, **pipe)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate("typed", timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def ran(folder: Path, *command: str, **env: str) -> tuple[int, str, str]:
    return ended(start(folder, *command, **env))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="scripts fork, and end each other by signals")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_does_without_us_and_leaves_its_ledger(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((HEAD if name == "plain" else LIGHT + HEAD) + SCRIPTS[name])
    arguments = ("../train.py", "--lr", "1", "--check")
    plain = start(tmp_path / "plain", *arguments)
    watched = start(tmp_path / "watched", "-m", "accumviz", "run", "--check", "--out", "a.ledger", *arguments)
    expected, got = ended(plain), ended(watched)
    assert got[0] == expected[0], got[2]
    assert got[1].replace("watched", "plain") == expected[1]
    # What Python itself says stands first, without frames of ours.
    assert got[2].replace("watched", "plain").startswith(expected[2])
    assert "accumviz/recorder/run.py" not in got[2]
    assert "could not" not in got[2]
    file = tmp_path / "watched" / "a.ledger"
    if name == "trains nothing":
        assert "nothing was recorded" in got[2]
        assert not file.exists()
        return
    ledger = av.load(file)
    kinds = [event.kind for event in ledger]
    killed = name == "is killed"
    assert ledger.complete is not killed
    if killed:  # at most its last half second is lost
        assert kinds[: len(WHOLE)] == WHOLE
    else:
        assert kinds == WHOLE * (2 if name in ("forks", "has two models and replaces step") else 1)
        assert "accumviz: " in got[2]
        # Once for each recording: a forked child says nothing.
        assert got[2].count("Report: ") == (2 if name == "deletes its model" else 1)
        how = {
            "raises": "ValueError: no",
            "is interrupted": "KeyboardInterrupt: ",
            "exits": "SystemExit: 3",
            "deletes its model": "closed",
        }
        assert ledger.meta["ended"] == how.get(name, "exit")
    if name == "deletes its model":  # what was made later has a ledger of its own
        assert [event.kind for event in av.load(file.with_name("a.model2.ledger"))] == WHOLE
    if "two models" in name:
        assert {p.group for p in ledger.parameters} == {"a", "b"}
    elif name == "plain":
        assert [p.name for p in ledger.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert ledger.meta["optimizers"] == ["optimizer"]


def test_a_script_that_is_not_there_or_no_python_ends_as_pythons_do(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "empty").mkdir()
    assert ran(tmp_path, "-m", "accumviz", "run", "empty")[0] == 2
    missing = ran(tmp_path, "-m", "accumviz", "run", "none.py")
    assert missing[0] == ran(tmp_path, "none.py")[0] == 2
    assert "can't open file" in missing[2]
    assert "none.py" in missing[2]
    code, out, err = ran(tmp_path, "-m", "accumviz", "run", "bad.py")
    expected = ran(tmp_path, "bad.py")
    assert (code, out) == expected[:2] == (1, "")
    assert err.startswith(expected[2])
    assert ran(tmp_path, "-m", "accumviz", "run", "-m", "no_such_module")[0] != 0
    for usage in (["run"], ["run", "--fail-on", "all", "bad.py"], ["run", "--exact", "few", "bad.py"], []):
        assert ran(tmp_path, "-m", "accumviz", *usage)[0] == 2


def test_what_cannot_be_done_is_said_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    code, out, err = ran(tmp_path, "-m", "accumviz", "run", "--out", "none/x.ledger", "train.py")
    assert (code, out) == (2, "")
    assert "'none/x.ledger' cannot be written: there is no such folder" in err
    code, out, err = ran(tmp_path, "-m", "accumviz", "run", "--check", "train.py")
    assert (code, out) == (0, "ran\n")
    assert "nothing was recorded: this process did not import torch" in err
    code, out, err = ran(tmp_path, "-m", "accumviz", "run", "--epochs", "3", "train.py")
    assert (code, out) == (2, "")
    assert "unrecognized arguments: --epochs; the script's own options stand after its name" in err


def test_a_module_runs_as_with_dash_m(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    said = "import sys\nfrom .other import x\nprint(x, sys.argv, __package__, __spec__.name, sys.path[0])\n"
    for name, text in (("__init__", ""), ("other", "x = 5\n"), ("go", said)):
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    expected = ran(tmp_path, "-m", "pack.go", "--a", "--", "b")
    got = ran(tmp_path, "-m", "accumviz", "run", "-m", "pack.go", "--a", "--", "b")
    assert expected[0] == 0 and got[:2] == expected[:2]


UNDIVIDED = LIGHT + HEAD.replace(" / 2", "") + SCRIPTS["plain"]


def test_a_finding_fails_the_run_where_that_was_asked_for_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNDIVIDED)
    code, out, err = ran(tmp_path, "-m", "accumviz", "run", "--fail-on", "warning", "train.py")
    assert code == 1, err
    assert "loss-not-divided" in err
    line = UNDIVIDED.splitlines().index("            loss.backward()") + 1
    shown = rf"  train\.py:{line}\n  {line - 2} \| .*\n  .*\n  {line} \| ( *)loss\.backward\(\)\n +\| \1\^{{15}}\n"
    assert re.search(shown, err), err
    assert err.endswith("\n\nLook at it: accumviz view train.ledger\n"), "what to type next is the last line"
    assert "loss-not-divided  at event 1, 2 times" in err, "an index among events is not the number of a step"
    assert "train.ledger" in err
    # The next run takes the next name, and without being asked judges nothing.
    again = ran(tmp_path, "-m", "accumviz", "run", "train.py")
    assert (again[0], again[1]) == (0, out)
    assert "train-2.ledger" in again[2]
    assert "Report" not in again[2]
    misplaced = ran(tmp_path, "-m", "accumviz", "run", "train.py", "--fail-on=warning")
    assert misplaced[0] == 0
    assert "--fail-on stands after train.py, so the script got it" in misplaced[2]
    taken = ran(tmp_path, "-m", "accumviz", "run", "--out", "train.ledger", "train.py")
    assert taken[0] == 2
    assert "exists already" in taken[2]
    assert taken[1] == ""


def test_runs_that_begin_together_in_one_folder_each_keep_their_recording(tmp_path: Path) -> None:
    # Each chose its name before the other's file was there.
    meets = "import pathlib\npathlib.Path(sys.argv[1]).touch()\nwhile not pathlib.Path(sys.argv[2]).exists(): pass\n"
    (tmp_path / "train.py").write_text(LIGHT + HEAD + meets + SCRIPTS["plain"])
    both = [start(tmp_path, "-m", "accumviz", "run", "train.py", *names) for names in ("ab", "ba")]
    shown = [ended(process)[2] for process in both]
    assert sorted(text.rpartition("→ ")[2] for text in shown) == ["train-2.ledger\n", "train.ledger\n"]
    for file in ("train.ledger", "train-2.ledger"):
        assert [event.kind for event in av.load(tmp_path / file)] == WHOLE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits as POSIX has them")
def test_the_closing_line_says_what_a_file_that_was_cut_short_holds(tmp_path: Path) -> None:
    limit = "import resource\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\nm, o = make()\ntrain(m, o, 200)"
    (tmp_path / "train.py").write_text(LIGHT + HEAD + limit)
    code, _, err = ran(tmp_path, "-m", "accumviz", "run", "train.py")
    assert code == 0
    holds = len(av.load(tmp_path / "train.ledger", repair=True))
    closing = "accumviz: 2000 events × 4 parameters, of which the file holds a part, because it was cut short"
    assert f"{closing} → train.ledger\n" in err
    assert holds < 2000


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing
def go(rank=0, store="", fails=()):
    spawned = dict(init_method=f"file://{os.path.abspath(store)}", rank=rank, world_size=2)
    dist.init_process_group("gloo", **(spawned if store else {}))
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(6):
        model(torch.randn(2, 4)).square().mean().backward()
        if n % 2:
            optimizer.step()
            optimizer.zero_grad()
    print(f"{model.module.weight.sum().item():.9f}")
    dist.destroy_process_group()
    if fails:
        raise ValueError("of the script")
if __name__ == "__main__":
    go() if "RANK" in os.environ else torch.multiprocessing.spawn(go, args=(sys.argv[1], sys.argv[2:]), nprocs=2)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="gloo meets in a file")
def test_processes_that_torch_spawns_are_recorded_and_judged_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    plain = ran(tmp_path, "train.py", "a")
    code, out, err = ran(tmp_path, "-m", "accumviz", "run", "--fail-on", "warning", "train.py", "b")
    assert (plain[0], code) == (0, 1), err
    # Two processes write into one pipe, and a line of one may come inside that of another.
    weights, weights_without = (re.findall(r"-?\d+\.\d{9}", text) for text in (out, plain[1]))
    assert weights == weights_without
    assert len(weights) == 2
    assert err.count("Report: ") == 1
    assert "loss-not-divided" in err
    assert err.endswith("\n\nLook at it: accumviz view train.rank0.ledger train.rank1.ledger\n")
    assert [av.load(tmp_path / f"train.rank{rank}.ledger").meta["rank"] for rank in (0, 1)] == [0, 1]
    code, _, err = ran(tmp_path, "-m", "accumviz", "run", "train.py", "c", "fails")
    assert code == 1
    assert "ValueError: of the script" in err
    assert "Report" not in err
    assert av.load(tmp_path / "train-2.rank1.ledger").meta["ended"] == "ValueError: of the script"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torchrun's store, as POSIX has it")
def test_under_torchrun_each_rank_has_its_file_and_check_judges_them_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(LIGHT + SPAWNED)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = (*torchrun, "-m", "accumviz", "run", "--check", "train.py")
    code, _, err = ran(tmp_path, *run, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert code == 0, err
    files = [tmp_path / f"train.rank{rank}.ledger" for rank in (0, 1)]
    assert [av.load(file).meta["rank"] for file in files] == [0, 1]
    assert err.count("Report: ") == 1, "what the ranks have in common is said once"
    assert "accumviz: rank 1: loss-not-divided\n" in err
    assert "Judge all ranks together: accumviz check train.rank*.ledger\n" in err
    code, out, err = said(capsys, "check", "--format", "json", *files)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(f["rule"], f["times"]) for f in report["findings"]] == [("loss-not-divided", 6)]
    assert report["counts"]["backwards"] == 12


UNSEEN = {
    "torch is not imported": ("print('done')", "this process did not import torch"),
    "nothing is trained": ("import torch", "no model or optimizer was seen training in this process"),
    "a child trains": ("import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'])", "start each under"),
    "a spawned child trains": (
        """
import multiprocessing, child
if __name__ == '__main__':
    process = multiprocessing.get_context('spawn').Process(target=child.go)
    process.start()
    process.join()
""",
        "no model or optimizer was seen training in this process",
    ),
    "a launcher trains": ("-m torch.distributed.run --nproc-per-node 1 child.py", "no model or optimizer was seen"),
    "nothing steps": (HEAD + "m, o = make()\nm(torch.ones(1, 4)).sum().backward()", "no optimizer stepped"),
    "the second of two models never steps": (
        HEAD + "m, o = make()\ntrain(m, o)\ndel m, o\nm, o = make()\nm(torch.ones(1, 4)).sum().backward()",
        "no optimizer stepped",
    ),
}


@pytest.mark.parametrize("how", UNSEEN)
def test_fail_on_fails_with_its_reason_first_where_nothing_could_be_judged(how: str, tmp_path: Path) -> None:
    script, reason = UNSEEN[how]
    (tmp_path / "train.py").write_text(script)
    training = "".join(f"    {line}\n" for line in (HEAD + "m, o = make()\ntrain(m, o)").splitlines())
    (tmp_path / "child.py").write_text(f"{LIGHT}def go():\n{training}\nif __name__ == '__main__':\n    go()\n")
    command = script.split() if script.startswith("-m") else ["train.py"]
    gate = ("-m", "accumviz", "run", "--fail-on", "error")
    code, _, err = ran(tmp_path, *gate, *command)
    assert code == 3, err
    told = [line for line in err.splitlines() if line.startswith("accumviz: --fail-on error fails: ")]
    assert len(told) == 1
    assert reason in told[0]
    assert ran(tmp_path, *gate, "--allow-unjudged", *command)[0] == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_narrow_encoding_ends_no_command(encoding: str, tmp_path: Path) -> None:
    script = (
        LIGHT
        + HEAD.replace(" / 2", "").replace("loss =", "ℓ =").replace("loss.b", "ℓ.b")
        + "m, o = make()\ntrain(m, o)\n"
    )
    (tmp_path / "train.py").write_text(script, "utf-8")
    for command in ("run --check train.py", "check", "compare train.ledger"):
        asked = [sys.executable, "-m", "accumviz", *command.split()]
        if command != "run --check train.py":
            asked.append("train.ledger")
        done = subprocess.run(
            asked, cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, check=True
        )
        assert b"Error" not in done.stderr, command


def ledger(rank: int | None = None, *, wrong: bool = False, comment: str = "") -> av.Ledger:
    """Three windows of two; wrong ones are not divided."""
    known = {"terms": [term(4, 1.0 if wrong else 0.5, op="MseLossBackward0")]}
    about = {"file": "train.py", "line": 3, "source": f"loss.backward(){comment}", "details": known}
    details = {"optimizer": "o", "optimizer_index": 0, "lr": [0.1]}
    rows = [backward(1.0, k, **about) for k in (1.0, 2.0)]
    rows.append({"kind": "step", "label": "o", "details": details, "grad": {"w": 2.0}})
    rows.append({"kind": "zero_grad", "label": "o"})
    meta = {"optimizers": ["o"]} | ({} if rank is None else {"rank": rank, "ranks": 2})
    return av.Ledger.build([W], rows * 3, meta=meta)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    out = capsys.readouterr()
    return code, out.out, out.err


def test_check_judges_the_files_of_all_ranks_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"run.rank{rank}.ledger" for rank in (0, 1)]
    for rank, file in enumerate(files):
        ledger(rank).save(file)
    code, out, err = said(capsys, "check", *files)
    assert (code, err) == (0, "") and "12 backwards" in " ".join(out.split())
    code, out, err = said(capsys, "check", files[1])
    assert code == 0 and "rank 1 of 2" in err and "6 backwards" in " ".join(out.split())
    assert said(capsys, "check", files[0], files[0])[0] == 2


def test_a_comment_that_ignores_no_rule_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger(wrong=True, comment="  # accumviz: ignore[loss-not-divide]").save(tmp_path / "x.ledger")
    out = said(capsys, "check", tmp_path / "x.ledger")[1]
    assert "No rule is called 'loss-not-divide', as the comment on this line has it." in " ".join(out.split())


@pytest.mark.parametrize(
    ("comment", "options"),
    [
        ("", ("--ignore", f"tail-dropped,{NAMED}")),
        ("", ("--select", "tail-dropped")),
        ("  # meant  # accumviz: ignore[tail-dropped, loss-not-divided]", ()),
    ],
)
def test_what_is_ignored_is_counted_and_leaves_a_condition(
    comment: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.ledger"
    ledger(wrong=True, comment=comment).save(file)
    code, out, _ = said(capsys, "check", "--fail-on", "warning", *options, file)
    assert code == 0
    assert out.startswith("Report: healthy, if what is ignored is meant, and if a sum of 2 is meant ")
    ignored = f"1 finding ignored: {NAMED} (train.py:3)"
    assert ignored in out
    assert said(capsys, "check", "--format", "github", *options, file)[1].endswith(f"::{ignored}\n")
    report = json.loads(said(capsys, "check", "--format", "json", *options, file)[1])
    assert report["findings"] == []
    assert [finding["rule"] for finding in report["ignored"]] == [NAMED]
    (run,) = json.loads(said(capsys, "check", "--format", "sarif", *options, file)[1])["runs"]
    assert [result["suppressions"] for result in run["results"]] == [[{"kind": "external"}]]
    assert (ignored in av.check(av.load(file)).to_html()) == bool(comment)


@pytest.mark.parametrize(
    ("comment", "options"),
    [("  # accumviz: ignore[tail-dropped]", ()), ("", ("--ignore", "tail-dropped")), ("", ("--select", NAMED))],
)
def test_other_findings_are_not_ignored_and_fail_where_asked_to(
    comment: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.ledger"
    ledger(wrong=True, comment=comment).save(file)
    for asked, fails in (((), 0), (("--fail-on", "error"), 0), (("--fail-on", "warning"), 1)):
        code, out, _ = said(capsys, "check", *asked, *options, file)
        assert code == fails
        assert NAMED in out and "ignored" not in out.replace(comment, "")


@pytest.mark.parametrize("command", ["check --ignore", "check --select", "run --ignore", "explain"])
def test_a_rule_that_there_is_not_is_misuse_with_the_nearest_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capsys, *command.split(), "tail-droped", "x.ledger")
    assert code == 2
    assert "there is no rule 'tail-droped'; nearest: tail-dropped" in err


def test_rules_are_listed_in_a_line_each_and_each_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "rules")[1].splitlines()
    names = [line.split()[0] for line in lines]
    assert sorted(names) == sorted(rule.name for rule in RULES)
    code, out, _ = said(capsys, "explain", ",".join(names))
    assert code == 0
    assert [line for line in out.splitlines() if line in names] == sorted(names)
    assert out.count("\nWhat. ") == out.count("\nWhy. ") == out.count("\nFix. ") == len(names)
    assert [mark for mark in ("**", "](#", "```", "(rule-") if mark in out] == []


@pytest.mark.parametrize("before", [[], ["--check"], ["check"]])
def test_a_script_in_the_wrong_place_is_asked_about(before: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, *before, "train.py", "--fail-on", "error")
    assert code == 2
    assert err.endswith("Did you mean `accumviz run --check train.py`?\n")


def test_files_that_cannot_be_judged_are_told_from_those_that_are_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole.ledger"
    ledger().save(whole)
    cut = tmp_path / "cut.ledger"
    cut.write_bytes(whole.read_bytes()[:-8])
    code, out, _ = said(capsys, "check", cut)
    assert code == 0 and "no verdict" in out and "incomplete" in out
    code, _, err = said(capsys, "check", "--fail-on", "error", cut)
    assert code == 3 and err.startswith("accumviz: --fail-on error fails: ")
    newer = tmp_path / "newer.ledger"
    _, _, rest = whole.read_bytes().partition(b"\n")
    newer.write_bytes(b"accumviz 99\n" + rest)
    (tmp_path / "text.ledger").write_text("no ledger")
    for bad in (newer, tmp_path / "text.ledger", tmp_path / "none.ledger", tmp_path):
        for command in (["check"], ["view", "--no-open"]):
            code, out, err = said(capsys, *command, bad)
            assert (code, out) == (2, ""), bad
            assert err.startswith("accumviz: ") and "Traceback" not in err
    assert said(capsys, "check", whole, cut)[0] == 2  # neither is a rank's


FORGED = "x\x1b]0;t\x07\x9b2J\u202e\r\n+++ evil.py\n+ rm"
STRANGERS = {
    "names": {"name": FORGED},
    "a path outside the folder": {"file": "/etc/passwd"},
    "a path that leads out": {"file": "../../etc/passwd"},
    "code": {"source": f"loss.backward() # {FORGED}", "file": FORGED},
    "how it ended": {"ended": f"ValueError: {FORGED}"},
}
COMMANDS = (
    "check --fail-on error",
    "check --format json",
    "check --format github",
    "check --format sarif",
    "view --no-open",
)
_opened: list[str] = []


@functools.cache
def _watch_opened_files() -> None:
    sys.addaudithook(lambda event, args: _opened.append(str(args[0])) if event == "open" else None)


@pytest.mark.parametrize("how", STRANGERS)
def test_of_a_strangers_file_nothing_raw_is_written_and_nothing_it_names_is_opened(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said_by_file = {"name": "w", "ended": "exit"} | STRANGERS[how]
    name, ended_by = said_by_file.pop("name"), said_by_file.pop("ended")
    details = {"optimizer": name, "optimizer_index": 0, "lr": [0.1]}
    about = {"label": name, "line": 1, "source": "loss.backward()", **said_by_file}
    added = {"kind": "backward", **about, "details": {"terms": [term(4, 1.0, op=name)]}, "contribution": {name: 1.0}}
    stepped = {"kind": "step", **about, "details": details, "grad": {name: 2.0}}
    rows = [row | {"grad": {name: 1.0}} for row in (added, added, stepped, {"kind": "zero_grad"})] * 3
    meta = {"optimizers": [name], "ended": ended_by, "notes": [name]}
    file = tmp_path / "x.ledger"
    av.Ledger.build([Parameter(name, (1,), optimizers=(0,))], rows, meta=meta).save(file)
    _watch_opened_files()
    for command in COMMANDS:
        _opened.clear()
        _, out, err = said(capsys, *command.split(), file)
        assert not any(path.endswith(("passwd", "evil.py\n+ rm")) for path in _opened), command
        lines = [*out.splitlines(), *err.splitlines()]
        assert lines and all(map(str.isprintable, lines)), command
        assert not any(line.lstrip().startswith(("+++ evil", "+ rm")) for line in lines), command


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("command", ["check --fail-on warning", "compare x.ledger"])
@pytest.mark.parametrize(("into", "why"), [("> /dev/full", "No space left on device"), (">&-", "it is closed")])
def test_what_cannot_be_written_is_said_in_one_line(command: str, into: str, why: str, tmp_path: Path) -> None:
    ledger(wrong=True).save(tmp_path / "x.ledger")
    shell = f"{sys.executable} -m accumviz {command} x.ledger {into}"
    end = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (2, f"accumviz: cannot write to the standard output: {why}\n")


@pytest.mark.parametrize(("asked", "code"), [("check --fail-on warning", 1), ("compare x.ledger", 0)])
def test_a_reader_that_has_seen_enough_changes_nothing(asked: str, code: int, tmp_path: Path) -> None:
    ledger(wrong=True).save(tmp_path / "x.ledger")
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "accumviz", *asked.split(), "x.ledger"]
    end = subprocess.run(command, cwd=tmp_path, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (end.returncode, end.stderr) == (code, "")


def test_view_writes_the_player_beside_the_file_and_opens_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    file, page = tmp_path / "x.ledger", tmp_path / "x.ledger.html"
    ledger().save(file)
    assert said(capsys, "view", file) == (0, "", "")
    assert opened == [page.as_uri()]
    assert said(capsys, "view", "--no-open", file)[:2] == (0, f"{page}\n")
    player = av.play(av.load(file))
    player.report = report = av.check(player.ledger)
    (steps,), (loss,) = report.steps, report.losses
    player.about = " · ".join(filter(None, ["x.ledger", steps, loss, report.not_seen]))
    assert player.to_html() in page.read_text("utf-8")


def test_compare_says_how_far_two_files_are_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.ledger", tmp_path / "b.ledger"]
    for file, grad in zip(files, (2.0, 1.0), strict=True):
        av.Ledger.build([W], [backward(grad, grad), {"kind": "step", "grad": {"w": grad}}]).save(file)
    assert "the gradient is off by 100 % at step 1" in said(capsys, "compare", *files)[1]
    assert json.loads(said(capsys, "compare", *files, "--json")[1])["relative"] == 1.0
    code, _, err = said(capsys, "compare", files[0], tmp_path / "none.ledger")
    assert code == 2 and "none.ledger" in err
