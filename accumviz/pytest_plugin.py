"""The fixture `expect` for pytest. It is loaded whenever pytest starts: nothing heavy is imported until it is used."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(name="expect")
def expect_of_training() -> Any:
    """`accumviz.expect`: a training loop that does not do what is expected of it fails the test with the report."""
    from accumviz import expect

    return expect
