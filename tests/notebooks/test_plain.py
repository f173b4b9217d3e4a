"""A chapter's text in plain Markdown: nothing of MyST is left, nothing that was said is lost."""

import pytest
from wherebook.plain import PlainError, plain


class Book:
    """A book in which every figure is the second of chapter 5."""

    def figure(self, label: str) -> str:
        return {"fig-saved": "Fig. 5.2"}[label]

    def equation(self, label: str) -> str:
        return {"eq-sum": "(3.1)"}[label]

    def citation(self, keys: str, kind: str) -> str:
        return {"p": "(Chen et al., 2016)", "t": "Chen et al. (2016)"}[kind] if keys == "chen2016" else keys

    def link(self, text: str, target: str) -> str:
        return f"{text} <{target}>"

    def claim(self, number: int) -> str:
        return f"**verdict {number}**"

    def described(self, lines: list[str]) -> str:
        return f"{len(lines)} lines of reference"


@pytest.mark.parametrize(
    ("myst", "expected"),
    [
        ("See {numref}`fig-saved`.", "See Fig. 5.2."),
        ("By {eq}`eq-sum`, the", "By (3.1), the"),
        ("{term}`window` and {term}`windows <window>`", "window and windows"),
        ("so {cite:p}`chen2016`, and {cite:t}`chen2016`", "so (Chen et al., 2016), and Chen et al. (2016)"),
        (r"a share {math}`1 / \sqrt{K}` of", r"a share $1 / \sqrt{K}$ of"),
        ("[here](#sec-x) and [`zero` there](02_zero.md)", "here <#sec-x> and `zero` there <02_zero.md>"),
        ("[a {term}`leak`](#sec-leak)", "a leak <#sec-leak>"),
        ("(sec-none)=\n## None is not zero", "## None is not zero"),
        ("one\n% a remark\ntwo", "one\ntwo"),
        ("| a | b |\n|---|---|\n| {numref}`fig-saved` | $x$ |", "| a | b |\n|---|---|\n| Fig. 5.2 | $x$ |"),
        ("leaf\n: What nothing made.", "- **leaf**: What nothing made."),
        ("```{eval-rst}\n.. autoclass:: X\n```", "1 lines of reference"),
        ("````{tip}\n```python\nx = 1\n```\nAfter.\n````", "> **Tip**\n>\n> ```python\n> x = 1\n> ```\n>\n> After."),
        ("(claim-1)=", ""),
    ],
)
def test_what_refers_to_the_book_is_said_in_words(myst: str, expected: str) -> None:
    assert plain(myst, Book()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "`{term}` is a role, ``a ` b`` is code",
        r"a formula $f_{\text{a}} [x](y)$ stays",
        "```python\nx = {1: 2}  # {numref}`no`\n(a)=\n```",
        "- a list\n  - in a list\n\n1. and *one* with **numbers**",
        "x[0] and [this] and {braces}",
        "> a quotation",
    ],
)
def test_plain_markdown_stays_as_it_is(text: str) -> None:
    assert plain(text, Book()) == text


def test_an_admonition_is_a_quotation_with_a_bold_title() -> None:
    myst = ":::{admonition} Predict, by {math}`x`\n:class: predict\nHow {term}`many`?\n\n- one\n- two\n:::\nNext."
    assert plain(myst, Book()) == "> **Predict, by $x$**\n>\n> How many?\n>\n> - one\n> - two\n\nNext."


@pytest.mark.parametrize(
    ("myst", "named"),
    [
        ("a {guilabel}`file <x>`", r"the role \{guilabel\}"),
        ("```{mermaid}\ngraph\n```", r"the directive \{mermaid\}"),
        (":::\nno name\n:::", "names no directive"),
        ("```{note}\nnever closed", "never closed"),
        ("![a picture](x.png)", "a picture"),
        ("[words]{.class}", "words"),
        ("[empty]()", "empty"),
        ("<project:#sec-x>", "project"),
    ],
)
def test_what_has_no_plain_form_is_named(myst: str, named: str) -> None:
    with pytest.raises(PlainError, match=named):
        plain(myst, Book())
