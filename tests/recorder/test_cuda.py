"""What recording must keep to on a CUDA device; benchmarks/cuda.py has the checks, and measures what it costs."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import cuda

pytestmark = [
    pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing()),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("check", cuda.CHECKS, ids=lambda check: check.__name__)
def test_on_cuda(check: Callable[[], list[dict[str, Any]]]) -> None:
    rows = check()
    assert rows
    assert [row for row in rows if row["holds"] is False] == []
