"""Every page of the built book in a browser: as a file and from a server, light and dark, wide and narrow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

Open = Callable[..., Any]
Address = Callable[[str, str], str]


def test_a_page_asks_no_other_host_and_complains_about_nothing(
    page_name: str, scheme: str, mode: str, watch: Open, address: Address
) -> None:
    watched = watch(mode)
    watched.page.goto(address(page_name, scheme), wait_until="networkidle")
    assert watched.foreign == []
    assert watched.complaints == []
    watched.page.wait_for_function("mode => document.documentElement.dataset.theme === mode", arg=mode)


def test_a_narrow_page_does_not_scroll_sideways(page_name: str, watch: Open, address: Address) -> None:
    watched = watch(width=375, has_touch=True)
    watched.page.goto(address(page_name, "file"))
    for width in (375, 320, 600, 760):
        watched.page.set_viewport_size({"width": width, "height": 900})
        widths = watched.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] <= widths[1], outgrowing(watched.page)


def test_a_bar_on_a_phone_is_seen_to_its_end(page_name: str, watch: Open, address: Address) -> None:
    page = watch(width=375).page
    page.goto(address(page_name, "file"))
    bars = page.locator(".av-measured .av-bar")
    if not bars.count():
        pytest.skip("nothing was measured on this page")
    end = "element => element.getBoundingClientRect().right"
    cut = f"bars => bars.map(bar => ({end})(bar) > ({end})(bar.closest('.av-scroll')))"
    assert not any(bars.evaluate_all(cut))


def outgrowing(page: Any) -> list[str]:
    """What reaches over the right edge outside any box that scrolls."""
    return page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(element => {
            if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
            for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
                if (getComputedStyle(box).overflowX !== 'visible') return false;
            return true;
        }).map(element => element.outerHTML.slice(0, 120))"""
    )


CONTRAST = """() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgba = color => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
    };
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
    const ground = element => {
        const layers = [];
        for (let box = element; box; box = box.parentElement) layers.push(rgba(getComputedStyle(box).backgroundColor));
        return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
    };
    const found = [];
    for (const element of document.querySelectorAll('article *')) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        const box = element.getBoundingClientRect(), style = getComputedStyle(element);
        if (!own || !box.width || style.visibility === 'hidden' || style.opacity === '0') continue;
        if (element.closest('svg, script, style, .headerlink, .copybtn, [aria-hidden=true]')) continue;
        const under = ground(element), text = over(rgba(style.color), under);
        const [high, low] = [light(under), light(text)].sort((a, b) => b - a);
        const ratio = (high + 0.05) / (low + 0.05);
        const what = `${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 40)}`;
        if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${what}`);
    }
    return [...new Set(found)];
}"""


def test_text_is_readable_on_what_it_stands_on(page_name: str, mode: str, watch: Open, address: Address) -> None:
    watched = watch(mode)
    watched.page.goto(address(page_name, "file"))
    assert watched.page.evaluate(CONTRAST) == []


def test_outputs_stand_on_the_pages_own_ground_in_the_dark(page_name: str, watch: Open, address: Address) -> None:
    watched = watch("dark")
    watched.page.goto(address(page_name, "file"))
    pale = watched.page.evaluate(
        """() => [...document.querySelectorAll('.cell_output .text_html, .cell_output .output, .cell_output .accumviz')]
            .flatMap(output => [output, ...output.querySelectorAll('div, figure, table, svg, details')])
            .filter(element => {
                const [r, g, b, a = 1] = getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).map(Number);
                return a > 0.5 && (r + g + b) / 3 > 140;
            }).map(element => element.outerHTML.slice(0, 120))"""
    )
    assert pale == []


def test_every_picture_says_what_it_shows(page_name: str, watch: Open, address: Address) -> None:
    watched = watch()
    watched.page.goto(address(page_name, "file"))
    silent = watched.page.evaluate(
        """() => [...document.querySelectorAll('article img, article svg:not(svg svg), article canvas')]
            .filter(picture => {
            if (picture.closest('button, summary, .headerlink, [aria-hidden=true]')) return false;
            const holder = picture.alt ? picture : picture.closest('[aria-label], [aria-labelledby]') || picture;
            const pointed = document.getElementById(holder.getAttribute('aria-labelledby') || '-');
            const inner = picture.querySelector(':scope > title, :scope > desc');
            const text = [picture.alt, holder.getAttribute('aria-label'), pointed?.textContent, inner?.textContent]
                .find(words => words?.trim()) || '';
            return !text || /\\.(png|svg|jpe?g|gif)$/i.test(text.trim());
        }).map(picture => picture.outerHTML.slice(0, 160))"""
    )
    assert silent == []


def test_the_keyboard_reaches_search_theme_notebook_and_text(watch: Open, address: Address) -> None:
    watched = watch()
    page = watched.page
    page.goto(address("chapters/01_graphs.html", "file"))
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached |= set(
            page.evaluate(
                """() => { const on = document.activeElement, style = getComputedStyle(on); return [
                    on.matches('.btn-download-notebook') && 'notebook',
                    on.matches('.theme-switch-button') && 'theme',
                    on.matches('.search-button__button, .search-button-field, .search-button') && 'search',
                    on.closest('article') && 'text', on.closest('.bd-sidebar-primary nav') && 'chapters',
                    on !== document.body && style.outlineStyle === 'none' && 'unseen: ' + on.outerHTML.slice(0, 80),
                ].filter(Boolean); }"""
            )
        )
    assert {"notebook", "theme", "search", "text", "chapters"} <= reached
    assert [what for what in reached if what.startswith("unseen")] == []


def test_the_theme_button_turns_the_page_dark_and_the_page_remembers(watch: Open, address: Address) -> None:
    page = watch("light").page
    page.goto(address("index.html", "http"))
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
        page.locator(".theme-switch-button").first.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_search_finds_a_page_without_a_network(scheme: str, watch: Open, address: Address) -> None:
    watched = watch()
    watched.page.goto(address("search.html", scheme) + "?q=accumulation")
    watched.page.wait_for_selector("#search-results ul.search li a")
    links = watched.page.locator("#search-results ul.search li a").evaluate_all("links => links.map(a => a.href)")
    assert any("glossary" in link for link in links)
    watched.page.wait_for_load_state("networkidle")
    assert watched.foreign == []
    assert watched.complaints == []


def test_the_search_dialog_leads_from_a_chapter_to_the_results(watch: Open, address: Address) -> None:
    page = watch().page
    page.goto(address("chapters/01_graphs.html", "file"))
    page.keyboard.press("Control+k")
    page.keyboard.type("ledger")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search li a")
    assert "search.html" in page.url


def test_motion_stops_for_readers_who_ask(watch: Open, address: Address) -> None:
    page = watch(reduced_motion="reduce").page
    page.goto(address("chapters/01_graphs.html", "file"))
    moving = page.evaluate(
        """() => [...document.querySelectorAll('*')].filter(element => {
            const style = getComputedStyle(element);
            const times = style.transitionDuration.split(',').map(parseFloat);
            return style.animationName !== 'none' || times.some(time => time > 0);
        }).map(element => element.outerHTML.slice(0, 80))"""
    )
    assert moving == []


def test_a_printed_page_keeps_its_text_and_leaves_out_the_controls(watch: Open, address: Address) -> None:
    page = watch().page
    page.goto(address("chapters/01_graphs.html", "file"))
    page.emulate_media(media="print")
    assert page.locator("article p").first.is_visible()
    assert not page.locator(".btn-download-notebook").first.is_visible()
    assert not page.locator(".bd-sidebar-primary").first.is_visible()


def test_a_dark_page_is_printed_light_and_then_dark_again(watch: Open, address: Address) -> None:
    page = watch("dark").page
    page.goto(address("chapters/01_graphs.html", "file"))
    theme = "document.documentElement.dataset.theme"
    seen = [page.evaluate(f"dispatchEvent(new Event('{moment}')), {theme}") for moment in ("beforeprint", "afterprint")]
    assert seen == ["light", "dark"]


def test_equations_are_drawn_as_math_and_numbered(watch: Open, site: Path, address: Address) -> None:
    with_math = [page for page in site.glob("chapters/*.html") if "<math" in page.read_text()]
    assert with_math, "no chapter has an equation"
    for path in with_math:
        page = watch().page
        page.goto(path.as_uri())
        assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px \"Book Math\"'))")
        heights = page.locator("math").evaluate_all("all => all.map(math => math.getBoundingClientRect().height)")
        assert min(heights) > 5


def test_the_download_link_leads_to_a_notebook_without_outputs(watch: Open, site: Path) -> None:
    pages = list(site.glob("chapters/*.html"))
    assert pages
    for path in pages:
        page = watch().page
        page.goto(path.as_uri())
        link = page.locator("a.btn-download-notebook")
        assert "Download notebook" in link.text_content()
        target = (path.parent / link.get_attribute("href")).resolve()
        notebook = nbformat.read(target, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert code
        assert not any(cell.outputs or cell.execution_count for cell in code)
        assert json.loads(target.read_text())["metadata"]["kernelspec"]["name"] == "python3"
