"""Names and numbers look the same everywhere, and the palette can be told apart."""

import math

from hypothesis import given
from hypothesis import strategies as st

from accumviz.ledger.ledger import KINDS
from accumviz.views import style, words


def test_every_event_kind_has_its_own_colour_and_its_own_line() -> None:
    looks = [style.kind(kind) for kind in KINDS]
    assert len({color for color, _ in looks}) == len(KINDS)
    assert style.kind("none of these") not in looks
    solid = [kind for kind, (_, dashes) in zip(KINDS, looks, strict=True) if not dashes]
    assert set(solid) == {"backward", "step"}
    assert len({dashes for _, dashes in looks}) == len(KINDS) - 1


@given(st.floats(-1e300, 1e300))
def test_a_written_number_reads_back_to_four_digits(value: float) -> None:
    written = style.number(value)
    assert "-" not in written
    assert math.isclose(float(written.replace("−", "-")), value, rel_tol=5.1e-4, abs_tol=5e-324)


@given(st.text(max_size=60), st.integers(3, 30))
def test_a_shortened_name_is_short_printable_and_keeps_both_ends(text: str, limit: int) -> None:
    short = words.shorten(text, limit)
    assert len(short) <= limit
    assert short.isprintable()
    if len(text) > limit:
        assert short[0] == words.literal(text)[0]
        assert short[-1] == words.literal(text)[-1]
        assert "…" in short
