"""The table a ledger shows in a notebook: every number, nothing that needs colour, nothing unescaped."""

import re
from typing import Any

import numpy as np

from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.tables import ledger_html
from tests.toys import W, backward, large

ON_LINE_7 = {"line": 7, "source": "loss.backward()"}
TOY: list[dict[str, Any]] = [
    backward(-16, -16, loss=16.0, **ON_LINE_7),
    backward(-4, -20, loss=1.0, **ON_LINE_7),
    {"kind": "step", "line": 8, "source": "optimizer.step()", "details": {"optimizer": "SGD"}, "grad": {"w": -20}},
    {"kind": "zero_grad", "line": 9, "source": "optimizer.zero_grad()"},
]


def rows(html: str) -> list[str]:
    """Each row as text, without tags."""
    return [re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", row)).strip() for row in re.findall(r"<tr.*?</tr>", html)]


def test_each_row_says_event_contribution_grad_loss_line_and_code() -> None:
    assert rows(ledger_html(Ledger.build([W], TOY)))[2:] == [
        "0 backward loss −16 −16 16 7 loss.backward()",
        "1 backward loss −4 −20 1 7 loss.backward()",
        "2 step SGD −20 8 optimizer.step()",
        "3 zero_grad None 9 optimizer.zero_grad()",
    ]


def test_small_vectors_are_written_out_and_large_tensors_as_norms() -> None:
    v, m = Parameter("v", (2,)), Parameter("m", (3, 3))
    added = {"v": [1.5, -2], "m": np.ones(9)}
    html = ledger_html(Ledger.build([v, m], [{"kind": "backward", "contribution": added, "grad": added}]))
    assert "(1.5, −2)" in html
    assert "‖contribution‖" in html
    assert ">3<" in html


def test_what_is_left_out_is_counted() -> None:
    html = ledger_html(large(1000, 150))
    assert len(rows(html)) == 2 + 40
    assert [row.split()[0] for row in rows(html)[2:]] == [*map(str, range(20)), *map(str, range(980, 1000))]
    assert "the first 20 and the last 20 of 1,000 events" in html
    assert "the first 6 of 150 parameters" in html
    assert len(html) < 60_000


def test_every_text_is_escaped() -> None:
    evil = '<script>alert("1")</script>'
    parameter = Parameter(evil, (1,), optimizers=(0,))
    row = {"kind": "backward", "label": evil, "source": evil, "contribution": {evil: 1}, "grad": {evil: 1}}
    second = row | {"label": "other"}
    step = {"kind": "step", "details": {"optimizer": evil}, "within": evil}
    html = ledger_html(Ledger.build([parameter], [row, second, step]))
    assert "<script" not in html
    assert '"1"' not in html


def test_values_that_are_not_finite_are_written() -> None:
    added = {"w": float("inf")}
    html = ledger_html(Ledger.build([W], [{"kind": "backward", "contribution": added, "grad": {"w": float("nan")}}]))
    assert "+∞" in html
    assert "NaN" in html


def test_the_table_has_a_caption_scopes_and_a_box_that_scrolls_by_itself() -> None:
    html = ledger_html(Ledger.build([W], TOY))
    assert html.startswith('<div class="accumviz av-ledger"><style>')
    assert html.count("<caption>") == 1
    assert re.findall(r"<th(?![^>]*scope=)", html.replace("<thead", "")) == []
    assert 'class="av-scroll" tabindex="0"' in html
    assert not re.findall(r"https?://|<script|url\(", html)
