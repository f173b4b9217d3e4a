"""How much is tried: a telling part at each push; with `THOROUGH=1`, each night and before publishing, all of it."""

import os

THOROUGH = os.environ.get("THOROUGH", "") not in ("", "0")


def examples(count: int) -> int:
    """Of so many examples that hypothesis makes up, those that are tried now: at a push a third, never the same."""
    return count if THOROUGH else -(-count // 3)
