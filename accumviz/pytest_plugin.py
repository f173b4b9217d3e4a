"""The fixture `expect` for pytest. It is loaded whenever pytest starts: nothing heavy is imported until it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from accumviz.expectation import Expectation


@pytest.fixture(name="expect")
def expect_of_training() -> Callable[..., AbstractContextManager[Expectation]]:
    """`accumviz.expect`: a training loop that does not do what is expected of it fails the test with the report."""

    @contextmanager
    def expect(*objects: Any, **wanted: Any) -> Iterator[Expectation]:
        from accumviz.expectation import expect as expecting

        expectation = expecting(*objects, **wanted)
        expectation.__enter__()
        try:
            yield expectation
        except BaseException as error:
            expectation.__exit__(type(error), error, error.__traceback__)
            raise
        try:
            expectation.__exit__(None, None, None)
        except AssertionError as unmet:
            report = str(unmet)
        else:
            return
        # Outside: inside, it would be shown as what came of the other one.
        pytest.fail(report, pytrace=False)

    return expect
