"""Find a Chromium for the browser tests, or get one: what is there, else Debian's, else Playwright's own.

The one without a window is asked for first: it reads and draws pages as the other does, without the tabs and buttons
around each, which nobody looks at and which take a quarter of the time of tests that open pages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """The Chromium named by the variable CHROMIUM, or one on the PATH, or the one Playwright keeps."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named)
    candidates = [shutil.which(name) for name in NAMES] + [place for place in PLACES if Path(place).exists()]
    return next((found for found in candidates if found), None) or playwright_own()


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
    path = find() or (install() if "--install" in sys.argv and not os.environ.get("CHROMIUM") else None)
    print(f"Browser: {path}" if path else HELP, file=sys.stdout if path else sys.stderr)
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
