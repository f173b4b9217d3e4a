"""Ask a question before a figure; the right answer is computed from the recording, never typed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from accumviz import arguments
from accumviz.ledger.ledger import CONTRIBUTED, PRESENT, Event, ledger_of
from accumviz.show import Displayed, literal, marked, save_page
from accumviz.views import style

Value: TypeAlias = "float | bool | str | None"

_ZERO = 1e-9
# This runs before the answer is drawn: a module runs only after the page, which would have shown it.
_SHUT = (
    'document.currentScript?.parentElement.setAttribute("data-av-state","asked");'
    'document.documentElement.classList.add("av-asks")'
)
_REPRS = ("_repr_mimebundle_", "_repr_html_", "_repr_svg_")


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

    def __repr__(self) -> str:
        lines = [f"Prediction: {literal(self.question)}"]
        lines += [f"  - {_text(choice)}" for choice in self.choices]
        if self.hint:
            lines.append(f"  Hint: {literal(self.hint)}")
        return "\n".join([*lines, "  (.answer is what was recorded)"])

    def save(self, path: str | Path) -> None:
        """Write a self-contained page that asks, and remembers, without Python."""
        save_page(path, "Prediction", self.to_html())


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
    a bool (asked as yes or no), one of the `choices`, a function that returns one of these (called
    once), or `(ledger, event, parameter)`: what that `.grad` held after that event, to which
    `"contribution"` may be added as a fourth.

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
    texts = {"question": question, "why": why, "hint": hint}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(
                f"{name}={text!r}; expected a text, with `code` in backticks"
            )
    if not question.strip():
        raise ValueError(
            "the question is empty; expected a text such as 'What is `w.grad` after the second backward?'"
        )
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise ValueError(
            f"tolerance={tolerance!r}; expected a share of the answer from 0 to below 1, as in 0.005"
        )
    if reveal is not None and not _is_shown(reveal):
        raise TypeError(
            f"reveal is {arguments.a(reveal)}, which shows no HTML ({', '.join(_REPRS)}); "
            "expected something like accumviz.timeline(ledger), or a text"
        )
    answer = _recorded(answer_from)
    offered = _offered(choices, answer, tolerance)
    reasons = _reasons(because, answer, offered, tolerance)
    return Prediction(
        question, answer, offered, reasons, why, hint, reveal, float(tolerance)
    )


def _is_shown(reveal: Any) -> bool:
    return isinstance(reveal, str) or any(hasattr(reveal, name) for name in _REPRS)


def _recorded(source: Any) -> Value:
    if callable(source) and not hasattr(source, "item"):
        source = source()
        if callable(source):
            raise TypeError(
                f"answer_from returned {arguments.a(source)}; expected a function that returns a value"
            )
    if isinstance(source, tuple):
        return _from_ledger(source)
    answer = _value(source, "answer_from")
    if isinstance(answer, float) and math.isnan(answer):
        raise ValueError(
            "the answer is NaN, which in ledger.values stands where there is no .grad; "
            "pass answer_from=(ledger, event, parameter), which tells None from NaN"
        )
    return answer


def _from_ledger(source: tuple[Any, ...]) -> Value:
    given, event, parameter, what = (*source, *[None] * 4)[:4]
    ledger, what = ledger_of(given), what or "grad"
    if (
        ledger is None
        or len(source) not in (3, 4)
        or what not in ("grad", "contribution")
    ):
        kinds = ", ".join(type(part).__name__ for part in source) or "nothing"
        raise TypeError(
            f"answer_from is a tuple of {kinds}; expected (ledger, event, parameter), "
            "and perhaps 'contribution', as in (ledger, 1, 'w')"
        )
    column = ledger.index(parameter)
    try:
        row = range(len(ledger))[event.index if isinstance(event, Event) else event]
    except (IndexError, TypeError):
        raise ValueError(
            f"answer_from asks for event {event!r}; the ledger has {len(ledger)}, counted from 0"
        ) from None
    if not ledger.state[row, column] & (PRESENT if what == "grad" else CONTRIBUTED):
        return None
    name = ledger.parameters[column].name
    return _value(ledger.values(column, what)[row], f"{what} of {name!r}")


def _value(source: Any, name: str) -> Value:
    """Return a plain value: tensors and arrays of one element give theirs."""
    if source is None or isinstance(source, (bool, str)):
        return source
    try:
        plain = source.item() if hasattr(source, "item") else float(source)
        return plain if isinstance(plain, bool) else float(plain)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(source.shape)}" if hasattr(source, "shape") else ""
        raise TypeError(
            f"{name} is {arguments.a(source)}{shape}; expected one number, None, a bool or one of the choices: "
            "pick one element, as in ledger.values('w')[1][0]"
        ) from None


def _offered(
    choices: Iterable[Any] | None, answer: Value, tolerance: float
) -> tuple[Value, ...]:
    if choices is None:
        if isinstance(answer, str):
            raise ValueError(
                f"the answer is the text {answer!r}; expected choices=[...] with it among them"
            )
        return (True, False) if isinstance(answer, bool) else ()
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Iterable):
        raise TypeError(
            f"choices={choices!r:.80} is {arguments.a(choices)}; expected a list of answers, as in choices=[0, 1]"
        )
    offered = tuple(_value(choice, "a choice") for choice in choices)
    texts = ", ".join(map(_text, offered))
    if len(set(map(_text, offered))) < max(2, len(offered)):
        raise ValueError(
            f"choices are {texts or 'nothing'}; expected two or more that differ"
        )
    right = sum(_same(choice, answer, tolerance) for choice in offered)
    if right != 1:
        how = "is more than one of" if right else "is not among"
        raise ValueError(
            f"the recorded answer, {_text(answer)}, {how} the choices: {texts}; "
            "fix the choices, or the program that was recorded"
        )
    return offered


def _reasons(
    because: Mapping[Any, str] | None,
    answer: Value,
    offered: tuple[Value, ...],
    tolerance: float,
) -> tuple[tuple[Value, str], ...]:
    if because is not None and not isinstance(because, Mapping):
        raise TypeError(
            f"because is {arguments.a(because)}; expected {{wrong answer: what lies behind it}}"
        )
    reasons: list[tuple[Value, str]] = []
    for key, text in (because or {}).items():
        if not isinstance(text, str) or not text.strip():
            raise TypeError(
                f"because[{key!r}] is {text!r}; expected a text that names the misconception"
            )
        value = _value(key, "a key of because")
        wrong = _wrong_key(value, answer, offered, tolerance)
        if any(_same(value, earlier, tolerance) for earlier, _ in reasons):
            wrong = f"and another key within the tolerance of {tolerance:g}; keep one"
        if wrong:
            raise ValueError(f"because has the key {key!r}, {wrong}")
        reasons.append((value, text))
    return tuple(reasons)


def _wrong_key(
    value: Value, answer: Value, offered: tuple[Value, ...], tolerance: float
) -> str:
    """Say why a value is no wrong answer to the question ("": it is one)."""
    if _same(value, answer, tolerance):
        return (
            f"but that is the right answer (recorded: {_text(answer)}); "
            "`why` explains the right one"
        )
    if not offered and isinstance(value, (bool, str)):
        return "but the answer is a number or None"
    if offered and not any(_same(value, choice, tolerance) for choice in offered):
        return f"which is no choice: {', '.join(map(_text, offered))}"
    return ""


def _same(value: Value, answer: Value, tolerance: float) -> bool:
    """Return whether an answer counts as another one; the page's script decides in the same way."""
    if type(value) is not type(answer):
        return False
    if not isinstance(value, float) or not isinstance(answer, float):
        return value == answer
    if not math.isfinite(answer) or not math.isfinite(value):
        return value == answer or (math.isnan(value) and math.isnan(answer))
    room = (tolerance + 1e-12) * abs(answer) or _ZERO
    return abs(value - answer) <= room


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "Yes" if value else "No"
    return style.number(value) if isinstance(value, float) else literal(str(value))


def prediction_html(prediction: Prediction) -> str:
    """Show a prediction: the question, and in a fold the recorded answer, the misconceptions and the figure.

    Scripts shut the fold as it is read, and turn the question into a form that opens it; without them it is open.

    >>> "<code>w.grad</code>" in prediction_html(predict("What is `w.grad`?", -20, reveal="It is the sum."))
    True
    """
    css = style.static("predict.css", __file__)
    script = style.static("predict.js", __file__)
    return (
        f'<div class="accumviz av-predict" data-av-predict="{_payload(prediction)}"><script>{_SHUT}</script>'
        f"<style>{style.CSS}{css}</style>"
        f'<div class="av-ask"><p class="av-tag">Predict</p><p class="av-question">{marked(prediction.question)}</p>'
        f'{_choices_html(prediction)}<p class="av-space"></p></div>'
        f'<details class="av-reveal" open><summary>Show me</summary>{_answer_html(prediction)}'
        f'</details><script type="module">{script}</script></div>'
    )


def _choices_html(prediction: Prediction) -> str:
    items = "".join(f"<li>{marked(_text(one))}</li>" for one in prediction.choices)
    choices = f"<ul>{items}</ul>" if items else ""
    if not prediction.hint:
        return choices
    hint = f"<summary>Hint</summary><p>{marked(prediction.hint)}</p>"
    return f'{choices}<details class="av-hint">{hint}</details>'


def _answer_html(prediction: Prediction) -> str:
    recorded = f"Recorded: <b>{_veiled(_text(prediction.answer))}</b>"
    if prediction.why:
        recorded += f"<br>{_veiled(prediction.why)}"
    parts = [f'<p class="av-recorded">{recorded}</p>']
    if prediction.reveal is not None:
        parts.append(f'<div class="av-shown">{_figure(prediction.reveal)}</div>')
    if prediction.because:
        head = '<tr><th scope="col">Another answer</th><th scope="col">What lies behind it</th></tr>'
        rows = "".join(
            f'<tr><th scope="row">{_veiled(_text(value))}</th><td>{_veiled(text)}</td></tr>'
            for value, text in prediction.because
        )
        parts.append(
            f'<table class="av-others"><thead>{head}</thead><tbody>{rows}</tbody></table>'
        )
    return "".join(parts)


def _veiled(text: str) -> str:
    """Write a text so that a reader of the page's source does not meet the answer."""
    return marked(text, veiled=True)


def _payload(prediction: Prediction) -> str:
    """Return what the script grades with, in a form that no eye reads in passing."""
    p = prediction
    answer: dict[str, Any]
    if p.choices:
        answer = {"right": _place(p, p.answer)}
        answer["keys"] = [_place(p, value) for value, _ in p.because]
    else:
        # As texts: JSON has no NaN, and the script reads them as it reads what the reader types.
        answer = {"right": str(p.answer)}
        answer["keys"] = [str(value) for value, _ in p.because]
        answer["tolerance"] = p.tolerance
    asked = json.dumps([p.question, [_text(choice) for choice in p.choices], answer])
    answer["id"] = hashlib.sha256(asked.encode()).hexdigest()[:16]
    return base64.b64encode(json.dumps(answer).encode()).decode()


def _place(prediction: Prediction, value: Value) -> int:
    same = [_same(value, one, prediction.tolerance) for one in prediction.choices]
    return same.index(True)


def _figure(reveal: Any) -> str:
    if isinstance(reveal, str):
        return f"<p>{marked(reveal)}</p>"
    bundle: Any = {}
    if hasattr(reveal, "_repr_mimebundle_"):
        bundle = reveal._repr_mimebundle_()
        bundle = bundle[0] if isinstance(bundle, tuple) else bundle or {}
    for mime, method in (("text/html", "_repr_html_"), ("image/svg+xml", "_repr_svg_")):
        markup = bundle.get(mime) or getattr(reveal, method, lambda: None)()
        if markup:
            return str(markup)
    text = str(bundle.get("text/plain") or repr(reveal))
    if "image/png" in bundle:
        data = html.escape(str(bundle["image/png"]).strip())
        return f'<img alt="{html.escape(literal(text))}" src="data:image/png;base64,{data}">'
    return f"<pre>{html.escape(text)}</pre>"
