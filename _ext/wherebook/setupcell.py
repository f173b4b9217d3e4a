"""The first cell of a notebook: it installs what the notebook brings, where that is missing.

`NotSetUp`, `lacking`, `wheel` and `set_up` are the cell: their source stands in it as it stands here. So they import
what they need themselves, and leave nothing else behind in the reader's notebook.
"""

from __future__ import annotations

import inspect
import json
import re


class NotSetUp(Exception):  # noqa: N818 - a reader meets it by this name
    def _render_traceback_(self):
        return [f"accumviz could not be set up: {self}"]


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


def set_up(packages, needs, text):
    import base64, importlib, json, lzma, subprocess, sys, tempfile  # noqa: E401, I001
    from importlib import metadata
    from importlib.util import find_spec
    from pathlib import Path

    def is_here(name):
        if not (spec := find_spec(name)) or spec.origin is None:  # a mere folder has none
            return False
        try:
            return metadata.version(name) == packages[name]
        except metadata.PackageNotFoundError:  # on the path, and never installed
            return True

    missing = [name for name in packages if not is_here(name)]
    if not missing:
        return
    if lacks := dict(lacking(needs)):
        said = "\n".join(f"- {name} {what}" for name, what in lacks.items())
        install = " ".join(f'"{name}"' for name in lacks)
        raise NotSetUp(f"\n{said}\nInstall that with `%pip install {install}`, and run this cell again.")
    brought = json.loads(lzma.decompress(base64.b85decode("".join(text.split()))))
    folder = Path(tempfile.mkdtemp())
    wheels = [wheel(folder / name, files) for name, files in brought.items() if name.partition("-")[0] in missing]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", *wheels]
    done = subprocess.run(pip, capture_output=True, text=True)  # noqa: PLW1510
    importlib.invalidate_caches()
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        by_hand = "\n".join(wheels)
        raise NotSetUp(f"pip said\n{said}\nInstall these files in another way, without dependencies:\n{by_hand}")
    if not all(is_here(name) for name in missing):
        raise NotSetUp("it is installed, but this kernel does not see it. Restart the kernel, and run this cell again.")
    print("Installed:", ", ".join(f"{name} {packages[name]}" for name in missing))


CELL = '''#@title Set up accumviz
# This notebook brings {brings}, as the text at the end of this cell.
# What is missing here is installed from it: nothing is downloaded, and no other package is changed.

{code}

set_up({packages}, {needs}, """
{text}
""")'''


def setup_cell(packages: dict[str, str], needs: dict[str, str], text: str) -> str:
    """The cell: packages by name and version, what the packages need, and all of it as text.

    >>> print(setup_cell({"accumviz": "0.1.0"}, {"torch": "2.4"}, "aGVsbG8=")[:66])
    #@title Set up accumviz
    # This notebook brings accumviz 0.1.0, as
    """
    brings = [f"{name} {version}" for name, version in packages.items()]
    code = "\n\n".join(inspect.getsource(part).strip() for part in (NotSetUp, lacking, wheel, set_up))
    return CELL.format(
        brings=" and ".join([", ".join(brings[:-1]), brings[-1]] if brings[1:] else brings),
        code=re.sub(r"  # noqa.*", "", code),
        packages=json.dumps(packages),
        needs=json.dumps(needs),
        text=text,
    )
