"""The role `at`: words of a page that move a figure to the state they speak of, and light up while it is there.

    {at}`−20 <fig-loop:1>`                       a player: event 1
    {at}`−20 <1>`                                the nearest player above: event 1
    {at}`two graphs <fig-ways:3, way=accumulation>`   an explorer: event 3 of the run that these controls choose
    {at}`the product <fig-by-hand:MulBackward0>`   a drawn graph: the node of this title

Figures are named by a label before them, or by their own name. On a page the words are a link that leads to that state
without a script, too; elsewhere they are just the words.
"""

from __future__ import annotations

import base64
import html
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

logger = logging.getLogger(__name__)

SAID = re.compile(r"(?P<words>.+?)\s*<(?P<target>[^<>]+)>", re.DOTALL)
TARGET = re.compile(r"(?:(?P<name>[a-z][\w-]*):)?\s*(?P<state>.*)", re.DOTALL)
VIEW = re.compile(
    r'data-accumviz-(?P<kind>player|explorer)="(?P<id>[\w-]+)".*?'
    r'<script type="application/json">(?P<data>.*?)</script>',
    re.DOTALL,
)
CARD = re.compile(
    r'<g class="av-[\w -]*"[^>]*>(?:(?!</g>).)*?<text class="av-title"[^>]*>(?P<title>[^<]*)</text>', re.DOTALL
)
STYLE = """<style>
.av-at { background: color-mix(in srgb, var(--pst-color-primary, #0072b2) 9%, transparent); border-radius: 0.2rem;
  padding: 0 0.15em; text-decoration-style: dotted; }
.av-at.av-lit { background: color-mix(in srgb, var(--pst-color-primary, #0072b2) 24%, transparent);
  text-decoration-style: solid; }
.accumviz svg .av-pointed > rect { stroke: var(--pst-color-primary, #0072b2) !important; stroke-width: 4 !important; }
@media print { .av-at { background: none !important; } }
</style>
"""
SCRIPT = Path(__file__).with_suffix(".js")


class TargetError(ValueError):
    """What the words point at is not there."""


class At(nodes.Inline, nodes.TextElement):
    """The words, until every figure of the page is there."""


class Role(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        said = SAID.fullmatch(self.text)
        if said is None:
            told = self.inliner.reporter.error(  # type: ignore[attr-defined]
                f"{{at}}`{self.text}` names no state; expected words and a target, as in {{at}}`−20 <fig-loop:1>`",
                line=self.lineno,
            )
            return [nodes.Text(self.text)], [told]
        words = At(self.rawtext, said["words"], target=" ".join(said["target"].split()))
        self.set_source_info(words)
        return [words], []


@dataclass(frozen=True)
class View:
    """One thing on a page that has states."""

    kind: str
    id: str
    data: dict[str, Any]
    place: nodes.raw | None = None


def decoded(text: str) -> dict[str, Any]:
    """What `accumviz.views.payload.encode` wrote, without its columns of bytes.

    >>> decoded('{"v":1}')
    {'v': 1}
    """
    data: dict[str, Any] = json.loads(text)
    if set(data) == {"z"}:
        raw = zlib.decompress(base64.b64decode(data["z"]))
        (size,) = struct.unpack_from("<I", raw)
        data = json.loads(raw[4 : 4 + size])
    return data


def views(node: nodes.Node) -> Iterator[View]:
    for raw in node.findall(nodes.raw):
        for found in VIEW.finditer(raw.astext()):
            yield View(found["kind"], found["id"], decoded(found["data"]), raw)


def event(view: View, state: str, events: int | None) -> int:
    if not re.fullmatch(r"\d+", state):
        raise TargetError(f"{state!r} is no event; expected its number, counted from 0")
    if events is not None and int(state) >= events:
        raise TargetError(f"there is no event {state}: this {view.kind} has {events}, counted from 0")
    return int(state)


def at_player(view: View, state: str) -> str:
    """The address of a player's state.

    >>> at_player(View("player", "av1", {"e": {"k": [0, 0, 1]}}), "2")
    '#av1&e=2'
    """
    told = view.data.get("e", {})
    return f"#{view.id}&e={event(view, state, (told.get('i') or [len(told.get('k', ()))])[-1] + bool(told.get('i')))}"


def at_explorer(view: View, state: str) -> str:
    """The address of an explorer's state: what is not chosen stays as the explorer begins.

    >>> controls = [{"name": "K", "labels": ["1", "2"]}, {"name": "way", "labels": ["a", "b"]}]
    >>> view = View("explorer", "av1", {"controls": controls, "start": [0, 0]})
    >>> at_explorer(view, "3, way=b"), at_explorer(view, "K=2")
    ('#av1&side=a&a=0.1&e=3', '#av1&side=a&a=1.0')
    """
    choice, moment = list(view.data["start"]), ""
    names = [control["name"] for control in view.data["controls"]]
    for part in filter(None, (part.strip() for part in state.split(","))):
        name, sign, label = (piece.strip() for piece in part.partition("="))
        if not sign:
            moment = f"&e={event(view, name, None)}"
            continue
        if name not in names:
            raise TargetError(f"there is no control {name!r}; there are {', '.join(names)}")
        labels = view.data["controls"][names.index(name)]["labels"]
        if label not in labels:
            raise TargetError(f"{name} is never {label!r}; it is one of {', '.join(labels)}")
        choice[names.index(name)] = labels.index(label)
    return f"#{view.id}&side=a&a={'.'.join(map(str, choice))}{moment}"


def card(place: nodes.Node, title: str) -> int:
    """Which of the drawn nodes bears a title."""
    titles = [html.unescape(one["title"]) for raw in place.findall(nodes.raw) for one in CARD.finditer(raw.astext())]
    if titles.count(title) != 1:
        how = "no node" if title not in titles else "more than one node"
        listed = ", ".join(titles) or "none: a picture has no states, only players, explorers and drawn graphs have"
        raise TargetError(f"{how} is called {title!r}; there are {listed}")
    return titles.index(title)


def named(app: Sphinx, doctree: nodes.document, docname: str, name: str) -> nodes.Element:
    where, anchor = app.env.domaindata["std"]["anonlabels"].get(name, ("", ""))
    if where and where != docname:
        raise TargetError(f"{name!r} is on another page ({where}); words move figures of their own page")
    found: Any = next((node for node in doctree.findall(nodes.Element) if anchor and anchor in node["ids"]), None)
    if isinstance(found, nodes.target):  # a label before a cell
        found = found.next_node(nodes.Element, descend=False, siblings=True)
    if found is None:
        raise TargetError(f"there is no figure {name!r}")
    return found  # type: ignore[no-any-return]


def link(app: Sphinx, doctree: nodes.document, docname: str, words: At) -> tuple[str, str, nodes.raw | None]:
    """Address that the words lead to, and the drawn node ("" for none) or where the view stands."""
    target = TARGET.fullmatch(words["target"])
    assert target is not None
    name, state = target["name"], target["state"].strip()
    if name:
        place = named(app, doctree, docname, name)
        view = next(views(place), None)
        if view is None:
            return f"#{place['ids'][0] if place['ids'] else name}", str(card(place, state)), None
    else:
        view = above(doctree, words)
    return (at_player if view.kind == "player" else at_explorer)(view, state), "", view.place


def above(doctree: nodes.document, words: At) -> View:
    last = None
    for node in doctree.findall():
        if node is words:
            break
        if isinstance(node, nodes.raw):
            last = next(views(node), last)
    if last is None:
        raise TargetError("no player stands above; name the figure, as in <fig-loop:1>")
    return last


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for words in list(doctree.findall(At)):
        text = html.escape(words.astext())
        try:
            address, drawn, view = link(app, doctree, docname, words)
        except TargetError as problem:
            logger.warning("{at}`%s <%s>`: %s", words.astext(), words["target"], problem, location=words)
            words.replace_self(nodes.Text(words.astext()))
            continue
        about = f' data-card="{drawn}"' if drawn else ""
        if view is not None:  # without a script, no view answers to the address: it is that of the view's place
            spot = nodes.raw("", f'<noscript><span id="{html.escape(address[1:])}"></span></noscript>', format="html")
            view.parent.insert(view.parent.index(view), spot)
        written = f'<a class="av-at" href="{html.escape(address)}"{about}>{text}</a>'
        words.replace_self(nodes.raw("", written, format="html") if app.builder.format == "html" else nodes.Text(text))


def add_script(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if 'class="av-at"' in context.get("body", ""):
        context["body"] = f'{STYLE}{context["body"]}<script type="module">{SCRIPT.read_text("utf-8")}</script>'


def setup(app: Sphinx) -> None:
    app.add_node(At)
    app.add_role("at", Role())
    app.connect("doctree-resolved", resolve, priority=400)  # before what it points at is wrapped
    app.connect("html-page-context", add_script)
