"""The first and the last cell of a notebook: the first installs, from the last, what is missing.

A wheel is long: at the end it stands in nobody's way where a notebook is only read. `NotSetUp`, `missing`, `last_cell`
and `set_up` are the first cell, `NotSetUp`, `missing`, `lacking`, `wheel` and `install` the last: their source stands
there as it stands here. So they import what they need themselves.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from typing import Any


class NotSetUp(Exception):  # noqa: N818 - a reader meets it by this name
    def _render_traceback_(self):
        return [f"accumviz could not be set up: {self}"]


def missing(packages):
    from importlib import metadata
    from importlib.util import find_spec

    def is_here(name):
        if not (spec := find_spec(name)) or spec.origin is None:  # a mere folder has none
            return False
        try:
            return metadata.version(name) == packages[name]
        except metadata.PackageNotFoundError:  # on the path, and never installed
            return True

    return [name for name in packages if not is_here(name)]


def last_cell(title):
    import json
    from contextlib import suppress
    from pathlib import Path

    def notebooks():
        for path in Path().glob("*.ipynb"):  # Jupyter and VS Code run in the notebook's folder
            with suppress(OSError, ValueError):
                yield json.loads(path.read_text("utf-8"))
        with suppress(Exception):
            from google.colab import _message

            yield _message.blocking_request("get_ipynb", timeout_sec=60)["ipynb"]

    for notebook in notebooks():
        with suppress(LookupError, TypeError):
            source = "".join(notebook["cells"][-1]["source"])
            if source.startswith(title):
                return source
    raise NotSetUp("this notebook cannot read itself here. Run its last cell, then go on with the next one.")


def set_up(title, packages):
    if missing(packages):
        exec(last_cell(title), {"__name__": "set_up"})  # noqa: S102 - the reader's own notebook, as it would run it


def lacking(needs):
    import re
    from importlib import metadata, util

    def number(version):
        return [int(part) for part in re.findall(r"\d+", version)[:2]]

    for name, least in needs.items():
        wanted = f"{name}>={least}".removesuffix(">=0")
        if not util.find_spec(name):
            yield wanted, "is missing"
        elif number(metadata.version(name)) < number(least):
            yield wanted, f"is needed, and {metadata.version(name)} is here"


def wheel(path, files):
    import base64, hashlib, zipfile  # noqa: E401, I001

    record = next(name for name in files if name.endswith(".dist-info/METADATA")).replace("METADATA", "RECORD")
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in ((name, text.encode()) for name, text in files.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            rows.append(f"{name},sha256={digest},{len(data)}\n")
            archive.writestr(name, data)
        archive.writestr(record, "".join([*rows, f"{record},,\n"]))
    return str(path)


def install(packages, needs, text):
    import base64, importlib, json, lzma, subprocess, sys, tempfile  # noqa: E401, I001
    from pathlib import Path

    names = missing(packages)
    if not names:
        return
    if lacks := dict(lacking(needs)):
        said = "\n".join(f"- {name} {what}" for name, what in lacks.items())
        install = " ".join(f'"{name}"' for name in lacks)
        raise NotSetUp(f"\n{said}\nInstall that with `%pip install {install}`, and run this cell again.")
    brought = json.loads(lzma.decompress(base64.b85decode("".join(text.split()))))
    folder = Path(tempfile.mkdtemp())
    wheels = [wheel(folder / name, files) for name, files in brought.items() if name.partition("-")[0] in names]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", *wheels]
    done = subprocess.run(pip, capture_output=True, text=True)  # noqa: PLW1510
    importlib.invalidate_caches()
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        by_hand = "\n".join(wheels)
        raise NotSetUp(f"pip said\n{said}\nInstall these files in another way, without dependencies:\n{by_hand}")
    if missing(packages):
        raise NotSetUp("it is installed, but this kernel does not see it. Restart the kernel, and run this cell again.")
    print("Installed:", ", ".join(f"{name} {packages[name]}" for name in names))


FIRST = """#@title Set up accumviz
# What is missing here of {brings} is installed from the last cell: nothing is downloaded.

{code}

set_up({title}, {packages})"""

LAST = '''{title}
# The first cell reads this one, which holds the packages as text. No other package is changed.

{code}

install({packages}, {needs}, """
{text}
""")'''


def setup_cells(packages: dict[str, str], needs: dict[str, str], text: str) -> tuple[str, str]:
    """Both cells, from packages by name and version, what the packages need, and all of it as text.

    >>> first, last = setup_cells({"accumviz": "0.1.0"}, {"torch": "2.4"}, "aGVsbG8=")
    >>> print(first[:66])
    #@title Set up accumviz
    # What is missing here of accumviz 0.1.0 i
    >>> print("\\n".join(last.splitlines()[:2]))
    #@title What the first cell installs
    # accumviz 0.1.0, 333d6b3a
    """
    brings = " and ".join(f"{name} {version}" for name, version in packages.items())
    # Two builds may have one version.
    which = hashlib.sha256(text.encode()).hexdigest()[:8]
    title = f"#@title What the first cell installs\n# {brings}, {which}"
    here = json.dumps(packages)
    first = FIRST.format(
        brings=brings, title=json.dumps(title), packages=here, code=_code(NotSetUp, missing, last_cell, set_up)
    )
    last = LAST.format(
        title=title,
        packages=here,
        needs=json.dumps(needs),
        text=text,
        code=_code(NotSetUp, missing, lacking, wheel, install),
    )
    return first, last


def _code(*parts: Any) -> str:
    code = "\n\n".join(inspect.getsource(part).strip() for part in parts)
    return re.sub(r"  # noqa.*", "", code)
