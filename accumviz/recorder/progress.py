"""How far a recording is, as one line of a terminal that is never in the way of what the script says itself."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_EACH = 0.5  # seconds
_ERASE = "\r\x1b[K"


class Progress:
    """A line on stderr, drawn anew twice a second where the cursor stands at the beginning of one, until `close`.

    `tell` gives its text, "" for none. Where stderr is no terminal, nothing happens at all.
    """

    def __init__(self, tell: Callable[[], str]) -> None:
        self._tell, self._process, self._over = tell, os.getpid(), threading.Event()
        self._stream: Any = sys.stderr
        self._lock, self._shown, self._free = threading.RLock(), False, True
        self._hooked: list[tuple[Any, Any]] = []
        with suppress(Exception):
            if self._stream.isatty() and os.environ.get("TERM") != "dumb":
                for stream in (sys.stdout, sys.stderr):
                    self._hook(stream)
                threading.Thread(
                    target=self._draw, name="accumviz progress", daemon=True
                ).start()

    def _hook(self, stream: Any) -> None:
        """Make room before the script writes; what it left unfinished, such as a bar of its own, stays as it is."""
        if not stream.isatty():
            return
        write = stream.write

        def writes(text: str, *rest: Any) -> Any:
            if not self._over.is_set() and os.getpid() == self._process:
                with self._lock:
                    self._erase()
                    self._free = str(text).endswith("\n") if text else self._free
                    return write(text, *rest)
            return write(text, *rest)

        stream.write = writes
        self._hooked.append((stream, writes))

    def _draw(self) -> None:
        while not self._over.wait(_EACH):
            with suppress(Exception), self._lock:
                told = self._tell() if self._free and not self._over.is_set() else ""
                if told:
                    width = os.get_terminal_size(self._stream.fileno()).columns or 80
                    self._put(f"{_ERASE}{told[: max(width - 1, 0)]}")
                    self._shown = True

    def _erase(self) -> None:
        if self._shown:
            self._put(_ERASE)
            self._shown = False

    def _put(self, text: str) -> None:
        os.write(self._stream.fileno(), text.encode(errors="replace"))

    def close(self) -> None:
        """Leave the terminal, and both streams, as they were."""
        self._over.set()
        with suppress(Exception), self._lock:
            if os.getpid() == self._process:
                self._erase()
        for stream, writes in self._hooked:
            with suppress(Exception):
                if stream.__dict__.get("write") is writes:
                    del stream.write
