"""Ask a question before a figure; the right answer is computed from the recording, never typed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from accumviz import arguments
from accumviz.ledger.ledger import PRESENT, Event, recorded
from accumviz.show import Displayed, literal, marked
from accumviz.views import style

Value: TypeAlias = "float | bool | str | None"

_ZERO = 1e-9
# This runs before the answer is drawn: a module runs only after the page, which would have shown it. On a page of
# the book all stands open until its reader chooses to predict first; in a notebook a question comes first.
_SHUT = (
    "{const all=document.documentElement;"
    'if(!("avBook"in all.dataset)||"avPredicts"in all.dataset)'
    '{document.currentScript?.parentElement.setAttribute("data-av-state","asked");all.classList.add("av-asks")}}'
)


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Displayed):
    """A question that is answered before its figure is seen; `answer` is what was recorded.

    `predict` makes it, and says what the other fields are.
    """

    question: str
    answer: Value
    choices: tuple[Value, ...]
    because: tuple[tuple[Value, str], ...]
    why: str
    hint: str
    reveal: Any
    tolerance: float

    def to_html(self) -> str:
        """Return the question, and in a fold the recorded answer, the misconceptions and the figure.

        Scripts shut the fold as it is read, and turn the question into a form that opens it;
        without them it is open.
        """
        css = style.CSS + style.static("predict.css", __file__)
        script = style.static("predict.js", __file__)
        return (
            f'<div class="accumviz av-predict" data-av-predict="{_payload(self)}"><script>{_SHUT}</script>'
            f'<style>{css}</style><div class="av-ask"><p class="av-tag">Predict</p>'
            f'<p class="av-question">{marked(self.question)}</p>{_choices_html(self)}</div>'
            f'<details class="av-reveal" open><summary>Show me</summary>{_answer_html(self)}'
            f'</details><script type="module">{script}</script></div>'
        )

    def __repr__(self) -> str:
        lines = [f"Prediction: {literal(self.question)}"]
        lines += [f"  - {_text(choice)}" for choice in self.choices]
        if self.hint:
            lines.append(f"  Hint: {literal(self.hint)}")
        return "\n".join([*lines, "  (.answer is what was recorded)"])


def predict(
    question: str,
    answer_from: Any,
    *,
    choices: Iterable[Any] | None = None,
    because: Mapping[Any, str] | None = None,
    why: str = "",
    hint: str = "",
    reveal: Any = None,
    tolerance: float = 0.005,
) -> Prediction:
    """Ask for a prediction, and show a figure once the reader has committed to an answer.

    `answer_from` is what was recorded: a number or a tensor of one element, None (which is not 0),
    a bool (asked as yes or no), one of the `choices`, or `(ledger, event, parameter)`: what that
    `.grad` held after that event.

    `because` maps wrong answers to the misconception behind each, `why` explains the right one,
    and `reveal` is anything that notebooks display, or a text; `hint` may be opened before
    answering. Numbers count as right within the relative `tolerance`, 0 only as 0. In every text,
    what stands between backticks is code, and nothing else is markup.

    Raises `ValueError` and `TypeError` for what cannot be asked or answered so, among them a key
    of `because` that is the right answer.

    >>> import accumviz as av
    >>> from accumviz.ledger.ledger import Parameter
    >>> ledger = av.Ledger.build([Parameter("w", (1,))], [
    ...     dict(kind="backward", contribution={"w": -16}, grad={"w": -16}),
    ...     dict(kind="backward", contribution={"w": -4}, grad={"w": -20}),
    ... ])
    >>> question = "What is `w.grad` after the second backward?"
    >>> because = {-4: "`backward` adds to what is there."}
    >>> av.predict(question, (ledger, 1, "w"), because=because).answer
    -20.0
    >>> because = {-20: "It was overwritten."}
    >>> av.predict(question, (ledger, 1, "w"), because=because)
    Traceback (most recent call last):
    ValueError: because has the key -20, but that is the right answer (recorded: −20)...
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"question={question!r:.80}; expected a text such as 'What is `w.grad` after the second backward?'"
        )
    arguments.mapping("because", because, "{wrong answer: 'why people think so'}")
    arguments.above_zero(
        "tolerance", tolerance, "how far off a number may be, as 0.005"
    )
    answer = _recorded(answer_from)
    offered = _offered(choices, answer, tolerance)
    reasons = _reasons(because or {}, answer, offered, tolerance)
    return Prediction(
        question, answer, offered, reasons, why, hint, reveal, float(tolerance)
    )


# --- the answer, and the wrong ones -------------------------------------------------------------


def _recorded(source: Any) -> Value:
    if isinstance(source, tuple):
        return _from_ledger(*source)
    answer = _value(source, "answer_from")
    if isinstance(answer, float) and math.isnan(answer):
        raise ValueError(
            "the answer is NaN, which in ledger.values stands where there is no .grad; "
            "pass answer_from=(ledger, event, parameter), which tells None from NaN"
        )
    return answer


def _from_ledger(source: Any, event: Any, parameter: str | int) -> Value:
    ledger = recorded(source, "predict")
    column = ledger.index(parameter)
    row = ledger[event.index if isinstance(event, Event) else event].index
    if not ledger.state[row, column] & PRESENT:
        return None
    name = ledger.parameters[column].name
    return _value(ledger.values(column)[row], f"grad of {name!r}")


def _value(source: Any, name: str) -> Value:
    """Return a plain value: tensors and arrays of one element give theirs."""
    if source is None or isinstance(source, (bool, str)):
        return source
    try:
        plain = source.item() if hasattr(source, "item") else source
        return plain if isinstance(plain, bool) else float(plain)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name} is {arguments.a(source)}; expected one number, None, a bool or one of the choices: "
            "pick one element, as in ledger.values('w')[1][0]"
        ) from None


def _offered(
    choices: Iterable[Any] | None, answer: Value, tolerance: float
) -> tuple[Value, ...]:
    """Return the choices, among which the answer is once; nothing for a number that is typed."""
    if choices is None and not isinstance(answer, str):
        return (True, False) if isinstance(answer, bool) else ()
    if not isinstance(choices, Iterable):
        raise TypeError(f"choices={choices!r:.80}; expected some, as in choices=[0, 1]")
    offered = tuple(_value(choice, "a choice") for choice in choices)
    right = sum(_same(choice, answer, tolerance) for choice in offered)
    texts = list(map(_text, offered))
    if right != 1 or len(set(texts)) < len(texts):
        raise ValueError(
            f"the choices are {', '.join(texts)}; expected different ones, and the recorded answer, "
            f"{_text(answer)}, among them once: fix the choices, or the program that was recorded"
        )
    return offered


def _reasons(
    because: Mapping[Any, str],
    answer: Value,
    offered: tuple[Value, ...],
    tolerance: float,
) -> tuple[tuple[Value, str], ...]:
    """Return wrong answers with what lies behind each; raise `ValueError` for one that cannot be given, or is right."""
    reasons: list[tuple[Value, str]] = []
    for key, text in because.items():
        value = _value(key, "a key of because")
        if _same(value, answer, tolerance):
            raise ValueError(
                f"because has the key {key!r}, but that is the right answer (recorded: {_text(answer)}); "
                "`why` explains the right one"
            )
        can_be_given = not isinstance(value, (bool, str))
        if offered:
            can_be_given = _among(value, offered, tolerance)
        earlier = [one for one, _ in reasons]
        if not can_be_given or _among(value, earlier, tolerance):
            raise ValueError(
                f"because has the key {key!r}; expected each wrong answer once, as it can be given"
            )
        reasons.append((value, text))
    return tuple(reasons)


def _among(value: Value, others: Iterable[Value], tolerance: float) -> bool:
    return any(_same(value, other, tolerance) for other in others)


def _same(value: Value, answer: Value, tolerance: float) -> bool:
    """Return whether an answer counts as another one; the page's script decides in the same way."""
    if not isinstance(value, float) or not isinstance(answer, float):
        return type(value) is type(answer) and value == answer
    if not math.isfinite(answer):
        return str(value) == str(answer)
    room = (tolerance + 1e-12) * abs(answer) or _ZERO
    return abs(value - answer) <= room


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "Yes" if value else "No"
    return style.number(value) if isinstance(value, float) else literal(str(value))


# --- the page -----------------------------------------------------------------------------------


def _choices_html(prediction: Prediction) -> str:
    items = ""
    for choice in prediction.choices:
        items += f"<li>{marked(_text(choice))}</li>"
    choices = f"<ul>{items}</ul>" if items else ""
    if not prediction.hint:
        return choices
    hint = f"<summary>Hint</summary><p>{marked(prediction.hint)}</p>"
    return f'{choices}<details class="av-hint">{hint}</details>'


def _answer_html(prediction: Prediction) -> str:
    answer = f"Recorded: <b>{_veiled(_text(prediction.answer))}</b>"
    if prediction.why:
        answer += f"<br>{_veiled(prediction.why)}"
    answer = f'<p class="av-recorded">{answer}</p>'
    if prediction.reveal is not None:
        answer += f'<div class="av-shown">{_figure(prediction.reveal)}</div>'
    rows = ""
    for value, text in prediction.because:
        rows += f'<tr><th scope="row">{_veiled(_text(value))}</th><td>{_veiled(text)}</td></tr>'
    if not rows:
        return answer
    head = '<tr><th scope="col">If you said …</th><th scope="col">Why not</th></tr>'
    return f'{answer}<table class="av-others"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _veiled(text: str) -> str:
    """Write a text so that a reader of the page's source does not meet the answer."""
    return marked(text, veiled=True)


def _payload(prediction: Prediction) -> str:
    """Return what the script grades with, in a form that no eye reads in passing."""
    wrong = [value for value, _ in prediction.because]
    answer: dict[str, Any] = {
        "right": _key(prediction, prediction.answer),
        "keys": [_key(prediction, value) for value in wrong],
    }
    if not prediction.choices:
        answer["tolerance"] = prediction.tolerance
    offered = list(map(_text, prediction.choices))
    asked = json.dumps([prediction.question, offered, answer])
    answer["id"] = hashlib.sha256(asked.encode()).hexdigest()[:16]
    return base64.b64encode(json.dumps(answer).encode()).decode()


def _key(prediction: Prediction, value: Value) -> int | str:
    """Return an answer's place among the choices, or its text.

    JSON has no NaN, and the script reads texts as it reads what the reader types.
    """
    if not prediction.choices:
        return str(value)
    same = [_same(value, one, prediction.tolerance) for one in prediction.choices]
    return same.index(True)


def _figure(reveal: Any) -> str:
    """Return as HTML what a notebook would display."""
    if isinstance(reveal, str):
        return f"<p>{marked(reveal)}</p>"
    bundle = {}
    if hasattr(reveal, "_repr_mimebundle_"):
        bundle = reveal._repr_mimebundle_()
    elif hasattr(reveal, "_repr_html_"):
        bundle = {"text/html": reveal._repr_html_()}
    plain = bundle.get("text/plain") or repr(reveal)
    return bundle.get("text/html") or f"<pre>{html.escape(plain)}</pre>"
