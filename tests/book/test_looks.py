"""Each look at a page finds the fault that it is for: a page with all of them, and one without."""

from pathlib import Path
from typing import Any

import pytest

from tests.book import looks

PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><meta charset="utf-8"><title>A page</title>
<meta name="viewport" content="width=device-width"><script>
const dark = matchMedia('(prefers-color-scheme: dark)'), follows = () => {{
    document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light'; }};
if ('{follows}') dark.onchange = follows;</script><style>.fade {{ transition: color 1s }}</style>
<body><main><article><h1>A page</h1>{body}</article></main></body></html>"""
NUMBERED = "<h1><span class='section-number'>3. </span>A chapter</h1>"
TALL, SEEN = "<div style='height: 1500px'>text</div>", "<figure style='height: 40px; margin: 0'>a figure</figure>"
DOT = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E"
RIGHT = (
    f"<p>Words</p><pre><span>a</span> <span>b</span></pre><img alt='A dot' src=\"{DOT}\">"
    "<details><summary>More</summary><input aria-label='A number'></details>"
)
FAULTS = {
    "text on its ground": "<p style='color: #999; background: #fff'>pale words</p>",
    "pictures without words": f"<img role='presentation' src=\"{DOT}\">",
    "what moves": "<p class='fade'>slow words</p>",
    "answers before their time": "<div class='av-predict' data-av-state='asked'><p class='av-recorded'>20</p></div>",
    "equations": "<math style='display: none'><mi>x</mi></math>",
    "axe": "<details><summary>More</summary><input></details>",
    "axe on contrast": "<pre><span>some</span> <span style='color: #999; background: #fff'>(</span>"
    "<span style='color: #999; background: #fff'>pale</span></pre>",
    "complaints": "<script>setTimeout(() => console.error('late'), 400)</script>",
    "pale outputs": "<div class='cell_output'><div class='output' style='background: #fff'>1</div></div>",
    "paper in the dark": "<details><summary>More</summary><svg role='img' aria-label='Bars' width='90' height='60'>"
    "<path d='M 0 0 L 80 0 L 80 50 L 0 50 Z' style='fill: #ffffff'/></svg></details>",
    "what outgrows the page": "<p style='width: 330px'>wide words</p>",
    "columns that are wrapped": "<div class='cell_output'><div class='highlight'>"
    "<pre style='white-space: pre-wrap'>a  1\nb  2</pre></div></div>",
    "equations on their numbers": "<div class='math-block' style='display: flex'><div class='math-scroll' "
    "style='overflow: auto'><div style='width: 600px'>x</div></div><span class='eqno'>(1)</span></div>",
    "numbers that are broken": "<dl class='av-figures'><dd><div style='overflow-wrap: anywhere; width: 3ch'>"
    "0.2562</div></dd></dl>",
    "figures that are moved": "<div class='av-timeline'><div class='av-scroll' style='overflow: auto' tabindex='0'>"
    "<div class='av-narrow'><div style='width: 400px'>bars</div></div></div></div>",
    "buttons for no finger": "<div class='accumviz'><button class='av-b'>play</button></div>",
    "axe when narrow": "<details><summary>More</summary><input></details>"
    f"<div style='width: 90px; height: 40px; overflow: auto'>{'<p>wide words</p>' * 9}</div>",
    "length of lines": 3
    * f"<section style='width: 70rem'><p style='line-height: 20px'>{'some words ' * 60}</p></section>",
    "marks that went astray": "<span class='av-key' style='position: relative'>"
    "<i class='av-swatch' style='position: absolute; top: -90px; width: 9px; height: 3px'></i>end</span>",
    "lines without numbers": "<div class='cell_input'><pre>a\nb.backward()\nc</pre></div>",
    "code that is cut": "<details><summary>More</summary>"
    "<pre style='overflow: auto; width: 50px'>long_code_here()</pre></details>",
    "pictures that are shut": f"{NUMBERED}<details><summary>More</summary><div class='accumviz'>bars</div></details>",
    "long stretches": f"{NUMBERED}{TALL}{TALL}",
    "pictures that come late": f"{NUMBERED}{TALL}{TALL}<figure style='height: 90px'>a figure</figure>",
    "pictures that outgrow the screen": "<div class='accumviz av-peaks' style='height: 813px'>bands</div>",
    "boxes that hide their end": "<details><summary>More</summary>"
    "<div tabindex='0' style='overflow: auto; width: 50px'>long_code_here()</div></details>",
    "names that are split": "<table style='width: 90px; table-layout: fixed'><tr><td>"
    "<code style='overflow-wrap: anywhere'>retain_graphs_for_ever</code></td></tr></table>",
    "signs without a font": "<p>\uf09b a name</p>",
    "signs of a typewriter": "<svg role='img' aria-label='A number'><text>-3</text></svg>",
}
VISITS: dict[str, Any] = {
    "light": looks.LIGHT,
    "dark": looks.DARK,
    "phone": looks.PHONE,
    "light, briefly": looks.brief(looks.LIGHT),
    "phone, briefly": looks.brief(looks.PHONE),
}


def visited(visit: str, body: str, watch: Any, folder: Path) -> Any:
    watched = watch("dark" if visit == "dark" else "light", **({"width": 375} if "phone" in visit else {}))
    (folder / "page.html").write_text(
        PAGE.format(theme="dark" if visit == "dark" else "light", follows="yes", body=body), "utf-8"
    )
    watched.page.goto((folder / "page.html").as_uri())
    return watched


def look(name: str, visit: str, body: str, watch: Any, folder: Path) -> list[str]:
    return list(VISITS[visit][name](visited(visit, body, watch, folder)))


@pytest.mark.parametrize(
    ("visit", "name"),
    [
        (visit, name)
        for visit, all_looks in VISITS.items()
        for name in all_looks
        if name in FAULTS and ("briefly" not in visit or name in looks.BRIEFLY)
    ],
)
def test_a_look_finds_its_fault(visit: str, name: str, watch: Any, tmp_path: Path) -> None:
    assert look(name, visit, FAULTS[name], watch, tmp_path) != []


@pytest.mark.parametrize("visit", VISITS)
def test_the_looks_of_a_visit_find_nothing_on_a_page_without_faults(visit: str, watch: Any, tmp_path: Path) -> None:
    assert looks.findings(VISITS[visit], visited(visit, RIGHT, watch, tmp_path)) == {}


def test_every_look_has_its_fault() -> None:
    in_modes = {"the theme", "the reader's mode"}
    assert {name for visit in VISITS.values() for name in visit} - in_modes == FAULTS.keys()


def test_a_request_to_another_host_is_a_complaint(watch: Any, tmp_path: Path) -> None:
    late = "<script>setTimeout(() => fetch('http://192.0.2.1/').catch(() => 0), 300)</script>"
    assert "http://192.0.2.1/" in look("complaints", "light", late, watch, tmp_path)


@pytest.mark.parametrize(
    "early",
    [
        "<div data-answers='prediction-1'><p class='av-shut'>Opens</p><p>20</p></div>",
        "<div class='cell'><details class='hide'><summary>Code</summary></details><p class='av-predict'></p></div>",
    ],
)
def test_whatever_says_an_answer_early_is_found(early: str, watch: Any, tmp_path: Path) -> None:
    assert look("answers before their time", "dark", early, watch, tmp_path) != []
