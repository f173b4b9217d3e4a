"""Every control of every player, explorer and prediction in the book, by mouse.

Nothing is listed here: what a page holds is found on the page, so that what a later chapter brings is driven too.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCOPES = ".av-xtop, .av-frame"
VIEWS = "[data-accumviz-explorer], [data-accumviz-player]"
# Which view of the page a scope is in, and which scope of that view it is: other views may gain and lose theirs.
PLACE = f"""scope => {{
    const view = scope.closest("{VIEWS}"), all = [...document.querySelectorAll("{VIEWS}")];
    return [all.indexOf(view), [...view.querySelectorAll("{SCOPES}")].indexOf(scope)];
}}"""
PREPARE = """() => {
    const parts = "button, a[href], input, select, canvas, .av-row, .av-node, [tabindex='0']";
    const many = /av-no|av-row|av-node/; // one stands for all of these
    const open = element => element.checkVisibility() && element.getBoundingClientRect().width > 0;
    window.controls = scope => {
        const found = new Map();
        const one = scope.querySelector('.av-scrub[max="0"]'); // then no line of code leads to another event
        for (const element of scope.querySelectorAll(parts)) {
            if (one && element.matches('.av-no')) continue;
            const label = element.ariaLabel || element.getAttribute("aria-labelledby") || element.textContent;
            const name = String(element.getAttribute("class")).match(many)?.[0] || `${element.tagName} ${label}`;
            if (open(element) && !element.disabled && !found.has(name)) found.set(name, element);
        }
        return found;
    };
    /** All that a control can change, what is in the page and what fields hold, as a number. */
    window.state = scope => {
        const root = scope.closest("[data-accumviz-explorer]") || scope;
        const fields = [...root.querySelectorAll("input, select")].map(one => `${one.value} ${one.checked}`);
        const all = `${root.innerHTML} ${fields} ${location.hash}`;
        let sum = 0;
        for (let i = 0; i < all.length; i++) sum = (sum * 31 + all.charCodeAt(i)) | 0;
        return sum;
    };
    /** What is said of it without a picture. */
    window.told = scope => [
        ...[".av-say", ".av-count", ".av-in-grad > .av-note", ".av-told"].map(
            name => scope.querySelector(name)?.textContent),
        scope.querySelector(".av-row[aria-selected=true] .av-of")?.title,
        scope.querySelector(".av-line[aria-current]")?.textContent,
    ].join("\\n");
    /** Where slider, count, sentence and permalink do not agree. */
    window.quarrels = scope => {
        const one = name => scope.querySelector(name), scrub = one(".av-scrub"), found = [];
        for (const slider of scope.querySelectorAll("[type=range]:not(.av-scrub)")) {
            const text = slider.getAttribute("aria-valuetext"), beside = slider.parentElement.textContent;
            if (!slider.checkVisibility() || beside.includes(text)) continue;
            found.push(`a slider says ${text}, beside it stands ${beside}`);
        }
        if (!scrub?.checkVisibility() || !one(".av-say")) return found;
        const said = one(".av-say").textContent, at = scrub.getAttribute("aria-valuetext"), link = one(".av-top a");
        const n = link.hash.match(/&n=(-?\\d+)/), event = at.match(/^Event (\\d+)/);
        const count = event ? `event ${event[1]} / ` : "start", forward = n && Number(n[1]) < 0;
        if (!forward && !said.includes(at)) found.push(`the slider says ${at}, the sentence ${said}`);
        const counted = one(".av-count").textContent.replaceAll(",", ""), some = one(".av-sub input")?.max / 2;
        if (!counted.startsWith(count)) found.push(`the count is not ${count}`);
        if (n && Number(n[1]) < some && !/run|builds/.test(said)) found.push(`${n[0]}, but ${said}`);
        return found;
    };
    // A page draws in the next frame, and some of what it draws is measured in the one after.
    const frame = then => requestAnimationFrame(() => requestAnimationFrame(then));
    window.settled = () => new Promise(done => frame(() => setTimeout(done)));
    window.link = scope => (scope.querySelector(".av-top a")?.hash || "").replace(/.*?&/, "");
    window.look = scope => [state(scope), told(scope), link(scope)];
    /** How it looks once it is drawn; where it quarrels; whether it plays. */
    window.lookAgain = async scope => {
        await settled();
        return [look(scope), quarrels(scope), Boolean(scope.querySelector("button[aria-label=pause]"))];
    };
    window.about = control => [control.localName, control.type || "", control.matches("[tabindex]")];
}"""
NTH = "([selector, i]) => document.querySelectorAll(selector)[i]"
SETTLE = "() => settled()"
VERDICT = "> .av-ask > .av-verdict"
LOOK_AGAIN = "scope => lookAgain(scope)"


# Where a hand finds a control that lies open there; None for one that has to be waited or looked for.
SPOT = """(control, across) => {
    control.scrollIntoViewIfNeeded();
    const {x, y, width, height} = control.getBoundingClientRect();
    const spot = [x + width * across, y + height / 2];
    return !control.disabled && control.contains(document.elementFromPoint(...spot)) ? spot : null;
}"""
# Of a group of radios that has this one, another: the one that is chosen does nothing, and is chosen no more then.
ANOTHER = """one => one.type === 'radio' &&
    [...one.closest('[role=radiogroup]').querySelectorAll('input')].find(each => each !== one)"""


class Hand:
    """Someone at a page, with a mouse."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def act(self, control: Any, again: bool, about: tuple[str, str] | None = None) -> None:
        """Use a control as it is used; the second time the other way round."""
        tag, kind = about or control.evaluate("control => [control.localName, control.type || '']")
        if kind == "search":
            control.fill("nothing is called so" if not control.input_value() else "")
        elif tag == "select":  # its list is the browser's own
            control.select_option(index=int(again))
        else:
            across = 0.5 if tag != "canvas" and kind != "range" else 0.1 if again else 0.9
            spot = control.evaluate(SPOT, across)
            if spot is not None:  # a third of what Playwright's own way takes, which looks twice
                self.page.mouse.click(*spot)
                return
            place: dict[str, Any] = {}
            if across != 0.5:
                box = control.bounding_box()
                place = {"position": {"x": box["width"] * across, "y": box["height"] / 2}}
            control.click(**place)

    def named(self, scope: Any, name: str) -> Any:
        return scope.evaluate_handle("(scope, name) => window.controls(scope).get(name)", name).as_element()

    def drive(self, scope: Any) -> Iterator[str]:
        """Use every control of a scope; yields what is wrong."""
        names = scope.evaluate("scope => [...window.controls(scope).keys()]")
        for name in names:
            control = self.named(scope, name)
            if control is None:
                continue
            tag, kind, out = control.evaluate("control => about(control)")
            if out:
                continue
            before, said, link = scope.evaluate("scope => look(scope)")
            for again in (False, True):
                self.act(control, again, (tag, kind))
                (after, says, leads), quarrels, plays = scope.evaluate(LOOK_AGAIN)
                if before != after:
                    break
                self.nudge(scope, names, name)
                control = self.named(scope, name) or control
                (before, said, link), quarrels, plays = scope.evaluate(LOOK_AGAIN)
            else:
                yield f"{name!r} does nothing"
            if kind == "search":
                control.fill("")  # a list without rows has nothing to do, and no selected row to restore
                _, quarrels, plays = scope.evaluate(LOOK_AGAIN)
            if link != leads and said == says:
                yield f"{name!r} leads from {link} to {leads}, and nothing says so: {says[:200]}"
            yield from (f"after {name!r}: {quarrel}" for quarrel in quarrels)
            if plays:
                self.act(scope.query_selector("button[aria-label=pause]"), again=False)
                self.page.evaluate(SETTLE)

    def nudge(self, scope: Any, names: list[str], name: str) -> None:
        """A button that has nothing to do, such as 'previous' at the start, gets something to do."""
        if name.startswith(("INPUT", "SELECT", "CANVAS")):
            chosen = self.named(scope, name)
            other = chosen and chosen.evaluate_handle(ANOTHER).as_element()
            if other is not None:
                self.act(other, again=False)
            return  # the other way round is enough for the rest of these
        what = "moment" if "moment" in name else "event"
        other = f"BUTTON previous {what}" if "next" in name else f"BUTTON next {what}"
        beside = {"BUTTON fit the whole graph": "BUTTON zoom in"}.get(name, other)
        control = self.named(scope, beside if beside in names else names[names.index(name) - 1])
        if control is not None:
            self.act(control, again=False)


def prepared(page: Any) -> Any:
    """The scopes of a page, with all that is folded open."""
    page.evaluate(PREPARE)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    page.evaluate(SETTLE)
    return page.locator(SCOPES)


def driven(watched: Any, scopes: Any) -> list[int]:
    """Use every control of the scopes that are seen; returns which scopes these were."""
    hand, used = Hand(watched.page), []
    for i in range(scopes.count()):
        # Asked of the page itself: Playwright looks for each in all of it, which takes as long as a click.
        scope = watched.page.evaluate_handle(NTH, [SCOPES, i]).as_element()
        if scope is not None and scope.is_visible():
            assert list(hand.drive(scope)) == []
            used.append(i)
    return used


def assert_permalinks_restore(scopes: Any, used: list[int], fresh: Any, address: str) -> None:
    """A first link of each form is followed from outside the page, the others inside it."""
    links = []
    for i in used:
        link = scopes.nth(i).locator(".av-top a") if i < scopes.count() else None
        if link is not None and link.count() and link.is_visible():
            told = scopes.nth(i).evaluate("scope => told(scope)")
            links.append((scopes.nth(i).evaluate(PLACE), link.get_attribute("href"), told))
    forms: set[str] = set()
    for (view, k), link, told in links:
        form = re.sub(r"#[^&]+|=[^&]*", "", link)
        if form in forms:
            fresh.evaluate("link => { location.hash = link; }", link)
        else:
            fresh.goto("about:blank")
            fresh.goto(address + link)
            fresh.evaluate(PREPARE)
        forms.add(form)
        scope = fresh.locator(VIEWS).nth(view).locator(SCOPES).nth(k)
        scope.locator(".av-count, .av-say").first.wait_for(state="attached")
        fresh.evaluate(SETTLE)
        assert scope.evaluate("scope => told(scope)") == told, link


# A prediction is one of a number or of a choice, with a hint or without.
FORMS = """asked => asked.map(root => [".av-field", ".av-hint", ".av-choice"]
    .filter(part => root.querySelector(`:scope > .av-ask ${part}`)).join())"""
SHUT = "[data-answers]:not([data-given]), .av-shut:visible"
EARLY = ":is(.av-recorded, .av-others, [data-answers] > :not(.av-shut)):visible"


STORED = """() => Object.fromEntries(Object.entries(localStorage)
    .filter(([key]) => key.startsWith('accumviz.predict')))"""


def reload_with_what_was_stored(page: Any, answered: int) -> None:
    """Whether a browser takes what a page stores to its next load at once is its own matter: it is given back."""
    stored = page.evaluate(STORED)
    assert len(stored) == answered, f"of {answered} answers these are stored: {sorted(stored)}"
    page.add_init_script(f"for (const [key, said] of Object.entries({json.dumps(stored)})) localStorage[key] ??= said;")
    page.reload()


def answer(root: Any, hand: Hand, number: str, choice: str) -> None:
    """Give a prediction's first answer, or this number."""
    if root.locator("> .av-ask .av-field").count():
        root.locator(".av-field").fill(number)
    else:
        hand.act(root.locator(f"> .av-ask .av-choice {choice}").first.element_handle(), again=False)
    hand.act(root.locator("> .av-ask .av-check").element_handle(), again=False)


def answered_and_asked_again(watched: Any) -> None:
    """Answer predictions and load the page again; be asked again and shown, once for each form that they have."""
    page, hand, states = watched.page, Hand(watched.page), []
    asked = page.locator(".av-predict[data-av-state]")
    for root in asked.all():
        for fold in root.locator("> .av-ask > .av-hint > summary").all():
            hand.act(fold.element_handle(), again=False)
            assert fold.locator("..").get_attribute("open") is not None
        answer(root, hand, "123.456", "input")
        if root.get_attribute("data-av-state") == "retry":
            assert "Try once more" in root.locator(VERDICT).inner_text()
            assert not root.locator("> .av-reveal > .av-recorded").is_visible()
            answer(root, hand, "654.321", "input:enabled")
        states.append((root.get_attribute("data-av-state"), root.locator(VERDICT).inner_text()))
        assert states[-1][0] in {"right", "wrong"}
        assert ("Right." in states[-1][1]) == (states[-1][0] == "right")
        assert ("You said" in states[-1][1]) == (states[-1][0] == "wrong")
        assert root.locator("> .av-reveal > .av-recorded").is_visible()
    assert page.locator(SHUT).count() == 0, "an answer opens all that waits for it"
    reload_with_what_was_stored(page, len(states))
    again = [(root.get_attribute("data-av-state"), root.locator(VERDICT).inner_text()) for root in asked.all()]
    assert again == states, page.evaluate("JSON.stringify({...localStorage})")
    forms = asked.evaluate_all(FORMS)
    for i in {form: i for i, form in enumerate(forms)}.values():
        root = asked.nth(i)
        hand.act(root.locator("> .av-ask > .av-again").element_handle(), again=False)
        assert root.get_attribute("data-av-state") == "asked"
        assert not root.locator("> .av-reveal > .av-recorded").is_visible()
        hand.act(root.locator("> .av-reveal > summary").element_handle(), again=False)
        page.wait_for_function("root => root.dataset.avState === 'skipped'", arg=root.element_handle())
        assert "Shown without a prediction" in root.locator(VERDICT).inner_text()
    assert watched.complaints == []


def test_a_page_obeys_a_mouse_remembers_answers_and_is_restored_by_its_permalinks(
    page_name: str, watch: Any, address: Any, site: Path
) -> None:
    watched, place = watch(), f"{address(page_name, 'file')}?predict"
    watched.page.goto(place)
    asked = watched.page.locator(".av-predict[data-av-state]").count()
    assert watched.page.locator(EARLY).evaluate_all("all => all.map(one => one.outerHTML.slice(0, 120))") == []
    for target in {link.get_attribute("href") for link in watched.page.locator("[data-answers] > .av-shut a").all()}:
        assert watched.page.locator(f".av-predict{target}").count() == 1
    assert asked or watched.page.locator("[data-answers]").count() == 0
    if asked:
        answered_and_asked_again(watched)
    if re.search("data-accumviz|av-predict", (site / page_name).read_text("utf-8")):
        scopes = prepared(watched.page)
        used = driven(watched, scopes)
        assert_permalinks_restore(scopes, used, watch().page, place)
    assert watched.complaints == []
