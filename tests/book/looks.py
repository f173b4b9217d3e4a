"""What is asked of every page of the book, wide or narrow, light or dark: each look returns what is wrong."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from tests.contrast import CONTRAST

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
# All rules that axe runs unasked, and one of its experiments: a button is called what is written on it.
# It would ask for the style sheets again, which a page from a file may not.
AUDIT = """async options => {
    const rules = {"label-content-name-mismatch": {enabled: true}, ...options.rules};
    const {violations} = await axe.run(
        document, {resultTypes: ["violations"], preload: false, rules, ...options.only});
    return violations.flatMap(({id, nodes}) => nodes.map(({html}) => `${id}: ${html.slice(0, 160)}`));
}"""
# axe takes seconds for the thousands of coloured words in a page's code, whose elements say nothing but their colour:
# one of each look stays an element, the others become text of what they stand in.
ALIKE = """() => {
    // All is read before anything is changed: else each look would be worked out for the whole page again.
    const grounds = new Map(), seen = new Set(), alike = [];
    const ground = element => {
        if (!element) return "";
        if (!grounds.has(element)) {
            const {backgroundColor, backgroundImage, opacity, position, filter} = getComputedStyle(element);
            const own = [backgroundColor, backgroundImage, opacity, position, filter].join(" ");
            const over = own === "rgba(0, 0, 0, 0) none 1 static none" ? "" : `|${own}`;
            grounds.set(element, ground(element.parentElement) + over);
        }
        return grounds.get(element);
    };
    for (const element of document.querySelectorAll("pre span, dt span")) {
        if (element.getAttributeNames().some(name => name !== "class") || element.children.length) continue;
        if (!element.checkVisibility({visibilityProperty: true})) continue;
        const {color, fontSize, fontWeight, visibility, textShadow} = getComputedStyle(element);
        const look = [color, fontSize, fontWeight, visibility, textShadow, ground(element)].join(";");
        // Of a single letter, axe says nothing.
        if (seen.has(look) || element.textContent.trim().length < 2) alike.push(element);
        else seen.add(look);
    }
    // Shapes have neither words nor roles.
    const bare = element => element.getAttributeNames().every(name => !/^(role|tabindex|id|aria-)/.test(name));
    const shapes = [...document.querySelectorAll(":is(path, rect, line, circle, ellipse, polyline, polygon, use)")]
        .filter(shape => bare(shape) && !shape.children.length);
    for (const element of alike) element.replaceWith(element.textContent);
    for (const shape of shapes) shape.remove();
    document.body.normalize();
}"""
UNREADABLE = (
    f"() => {{ {CONTRAST}"
    """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const known = new Map(), grounds = new Map();
    const read = color => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
    };
    const rgba = color => known.get(color) || known.set(color, read(color)).get(color);
    const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
    const ground = element => {
        if (!element) return [255, 255, 255, 1];
        if (!grounds.has(element))
            grounds.set(element, over(rgba(getComputedStyle(element).backgroundColor), ground(element.parentElement)));
        return grounds.get(element);
    };
    const found = [];
    for (const element of document.querySelectorAll('article *')) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        const box = element.getBoundingClientRect(), style = getComputedStyle(element);
        if (!own || !box.width || style.visibility === 'hidden' || style.opacity === '0') continue;
        if (element.closest('svg, script, style, .headerlink, .copybtn, [aria-hidden=true]')) continue;
        const under = ground(element), text = over(rgba(style.color), under);
        const ratio = contrast(under, text);
        const what = `${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 40)}`;
        if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${what}`);
    }
    return [...new Set(found)];
}"""
)
PALE = """() => [...document.querySelectorAll('.cell_output .text_html, .cell_output .output, .cell_output .accumviz')]
    .flatMap(output => [output, ...output.querySelectorAll('div, figure, table, svg, details')])
    .filter(element => {
        const [r, g, b, a = 1] = getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).map(Number);
        return a > 0.5 && (r + g + b) / 3 > 140;
    }).map(element => element.outerHTML.slice(0, 120))"""
# A ground that a drawing brings along: as pale as a sheet of paper, and larger than any mark. What is folded, or waits
# for an answer, has no size where it stands.
PAPER = """() => [...document.querySelectorAll('article svg:not(svg svg)')].flatMap(drawing => {
    const box = document.createElement('div'), copy = drawing.cloneNode(true);
    box.className = 'accumviz';
    box.append(copy);
    document.body.append(box);
    const pale = [...copy.querySelectorAll('path, rect, polygon, circle, ellipse')].filter(shape => {
        const {fill, fillOpacity, opacity} = getComputedStyle(shape), {width, height} = shape.getBoundingClientRect();
        const [r, g, b, a = 1] = (fill.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
        return Math.min(r, g, b) > 200 && a * fillOpacity * opacity > 0.5 && Math.min(width, height) > 40;
    }).map(shape => `${drawing.getAttribute('aria-label')?.slice(0, 80)}: ${shape.outerHTML.slice(0, 80)}`);
    box.remove();
    return pale;
})"""
SILENT = """() => [...document.querySelectorAll('article img, article svg:not(svg svg), article canvas')]
    .filter(picture => {
        if (picture.closest('button, summary, .headerlink, [aria-hidden=true]')) return false;
        const holder = picture.alt ? picture : picture.closest('[aria-label], [aria-labelledby]') || picture;
        const pointed = document.getElementById(holder.getAttribute('aria-labelledby') || '-');
        const inner = picture.querySelector(':scope > title, :scope > desc');
        const text = [picture.alt, holder.getAttribute('aria-label'), pointed?.textContent, inner?.textContent]
            .find(words => words?.trim()) || '';
        return !text || /\\.(png|svg|jpe?g|gif)$/i.test(text.trim());
    }).map(picture => picture.outerHTML.slice(0, 160))"""
# What reaches over the right edge outside any box that scrolls.
OUTGROWING = """() => document.documentElement.scrollWidth <= document.documentElement.clientWidth ? []
    : ["the page scrolls sideways", ...[...document.querySelectorAll('body *')].filter(element => {
        if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
        for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
            if (getComputedStyle(box).overflowX !== 'visible') return false;
        return true;
    }).map(element => element.outerHTML.slice(0, 120))]"""
MOVING = """() => [...document.querySelectorAll('*')].filter(element => {
    const style = getComputedStyle(element);
    const times = style.transitionDuration.split(',').map(parseFloat);
    return style.animationName !== 'none' || times.some(time => time > 0);
}).map(element => element.outerHTML.slice(0, 80))"""
UNDRAWN = """async () => {
    const waits = math => math.closest('[data-answers]:not([data-given])');
    const all = [...document.querySelectorAll('math')].filter(math => !waits(math));
    await document.fonts.ready;
    if (all.length && !document.fonts.check('16px "Book Math"')) return ['the font of equations is not there'];
    return all.filter(math => math.getBoundingClientRect().height <= 5).map(math => math.outerHTML.slice(0, 120));
}"""
# Code that a reader has to move sideways to read; on a narrow screen, where nothing says so or no key does it.
SIDEWAYS = """() => {
    const folded = [...document.querySelectorAll('details:not([open])')];
    for (const one of folded) one.open = true;
    const cut = [...document.querySelectorAll('article pre')].filter(pre => pre.scrollWidth > pre.clientWidth + 1)
        .map(pre => `${pre.scrollWidth - pre.clientWidth} px of ${pre.textContent.trim().slice(0, 80)}`);
    for (const one of folded) one.open = false;
    return cut;
}"""
# Of whatever scrolls sideways, folded and shut or not.
UNSAID = """async () => {
    const folded = [...document.querySelectorAll('article details:not([open])')];
    const shut = [...document.querySelectorAll('[data-answers]:not([data-given])')];
    const asked = [...document.querySelectorAll('.av-predict')].map(one => [one, one.dataset.avState]);
    for (const [one] of asked) one.dataset.avState = 'skipped';
    for (const one of folded) one.open = true;
    for (const one of shut) one.dataset.given = '';
    // what watches the width of a box is told after a frame
    for (let frame = 0; frame < 3; frame += 1) await new Promise(done => requestAnimationFrame(done));
    const found = [...document.querySelectorAll('article *')].filter(box => {
        const {overflowX, backgroundAttachment} = getComputedStyle(box);
        return /auto|scroll/.test(overflowX) && box.scrollWidth > box.clientWidth + 1 && box.checkVisibility()
            && !(backgroundAttachment.includes('local') && (box.tabIndex === 0 || box.tagName !== 'PRE'));
    }).map(box => `${box.tagName}.${box.className}: ${box.textContent.trim().slice(0, 80)}`);
    for (const one of folded) one.open = false;
    for (const one of shut) delete one.dataset.given;
    for (const [one, state] of asked) one.dataset.avState = state;
    return found;
}"""
# A typewriter's apostrophe, quotation mark or minus among a figure's words; what it names of code stays as it is.
TYPED = """() => [...document.querySelectorAll('article svg text')].filter(text => {
    const words = text.textContent.trim();
    return !/mono/i.test(getComputedStyle(text).fontFamily) && /['"]|(^|[\\s(,])-\\d|\\d-\\d/.test(words);
}).map(text => text.textContent.trim())"""
# A sign of an icon font that is not there: a box.
UNDRAWABLE = """() => [...document.querySelectorAll('body *')].filter(element => {
    const own = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data);
    const made = ['::before', '::after'].map(part => getComputedStyle(element, part).content);
    return [...own, ...made].some(text => /[\\ue000-\\uf8ff]/.test(text)) && !element.closest('script, style');
}).map(element => element.outerHTML.slice(0, 120))"""
# A name in a table that goes on in the next line where it has no mark.
SPLIT = """() => [...document.querySelectorAll('article table code')].filter(code => {
    const range = document.createRange(), walk = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    for (let text; (text = walk.nextNode());) for (const word of text.data.matchAll(/[^\\s.,_(=\\/…-]+/g)) {
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        const tops = [...range.getClientRects()].filter(({width}) => width > 0).map(({top}) => Math.round(top));
        if (new Set(tops).size > 1) return true;
    }
    return false;
}).map(code => code.textContent)"""
# What was printed in columns and is wrapped, so that they are none.
WRAPPED = """() => [...document.querySelectorAll('article .cell_output div.highlight pre')].filter(pre => {
    const text = pre.textContent.trim();
    return /^.*\\S {2,}\\S/m.test(text) && text.includes('\\n') && getComputedStyle(pre).whiteSpace !== 'pre';
}).map(pre => pre.textContent.trim().slice(0, 80))"""
# An equation beside its number where there is no room for both.
MET = """() => [...document.querySelectorAll('.math-block:has(.eqno)')].filter(block => {
    const box = block.querySelector('.math-scroll'), number = block.querySelector('.eqno').getBoundingClientRect();
    const {right, bottom} = box.getBoundingClientRect(), {backgroundAttachment, overflowX} = getComputedStyle(box);
    if (number.right > innerWidth || (number.left < right && number.top < bottom - 1)) return true;
    const cut = box.scrollWidth > box.clientWidth + 1;
    return cut && (number.top < bottom - 1 || overflowX !== 'auto' || !backgroundAttachment.includes('local'));
}).map(block => block.textContent.slice(0, 80))"""
# A number that goes on in the next line.
BROKEN = """() => [...document.querySelectorAll('.av-figures dd, .av-others tbody th')].filter(cell => {
    const range = document.createRange(), walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let text; (text = walk.nextNode());) for (const word of text.data.matchAll(/[\\d.,−]+/g)) {
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        if (range.getClientRects().length > 1) return true;
    }
    return false;
}).map(cell => cell.textContent)"""
# A figure that has to be moved sideways on a phone: it is there in a phone's width, or is no timeline of many events.
MOVED = """() => [...document.querySelectorAll('.av-timeline .av-scroll')].filter(box => {
    const narrow = box.querySelector('.av-narrow'), moved = box.scrollWidth > box.clientWidth + 1;
    if (!box.checkVisibility()) return false;
    if (narrow) return moved || !narrow.checkVisibility();
    return moved && !/^\\d+ parameters? × /.test(box.querySelector('.av-figure')?.getAttribute('aria-label'));
}).map(box => box.textContent.trim().slice(0, 80))"""
# Buttons and choices that a finger would miss.
SMALL = """() => [...document.querySelectorAll('.accumviz :is(.av-b:not(.av-b-more), .av-segments label,'
    + ' .av-radios label, .av-switch, .av-compare, .av-restart, select)')]
    .filter(one => one.checkVisibility() && Math.min(one.offsetWidth, one.offsetHeight) < 44)
    .map(one => one.outerHTML.slice(0, 120))"""
# A mark of a legend that does not stand beside its words.
ASTRAY = """() => [...document.querySelectorAll('.av-key')].filter(key => {
    const box = key.getBoundingClientRect(), mark = key.querySelector('.av-swatch')?.getBoundingClientRect();
    return mark && key.checkVisibility() && (mark.width === 0 || mark.top < box.top - 4 || mark.bottom > box.bottom + 4
        || mark.left < box.left - 4 || mark.right > box.right + 4);
}).map(key => key.textContent)"""
# Of paragraphs of three lines or more, how many letters stand on their full lines.
MEASURE = """() => {
    const counts = [];
    for (const p of document.querySelectorAll('article section > p')) {
        const box = p.getBoundingClientRect(), high = parseFloat(getComputedStyle(p).lineHeight);
        const lines = Math.round(box.height / high);
        if (lines >= 3 && !p.querySelector('math')) counts.push(p.innerText.length / (lines - 0.5));
    }
    if (counts.length < 3) return [];
    const middle = counts.sort((a, b) => a - b)[counts.length >> 1];
    return middle >= 56 && middle <= 76 ? [] : [`${middle.toFixed(0)} letters on a line`];
}"""
# Figures speak of the lines where something happens by number.
UNNUMBERED = """() => [...document.querySelectorAll('article .cell_input pre')].filter(pre => {
    const text = pre.textContent.trim();
    const spoken = /\\.(backward|step|zero_grad)\\(/.test(text) && text.split('\\n').length > 2;
    return spoken && !text.includes('av.predict(') && !pre.querySelector('.linenos');
}).map(pre => pre.textContent.trim().slice(0, 80))"""
# What answers a prediction that nobody has answered, and a bar above one that shows its source.
EARLY = """() => [...document.querySelectorAll(':is([data-av-state=asked], [data-av-state=retry]) .av-recorded,'
    + ' [data-answers]:not([data-given]) > :not(.av-shut), .cell:has(.av-predict) :is(details.hide, .cell_input)')]
    .filter(one => one.checkVisibility()).map(one => one.outerHTML.slice(0, 120))"""
# How far a reader of a chapter, which is a page with a number, goes on without anything to look at or to do.
STRETCHES = """() => {
    const article = document.querySelector('article'), most = 2400;
    if (!parseInt(article.querySelector('h1 .section-number')?.textContent, 10)) return [];
    const rests = '.accumviz, figure, table, svg, img, section#exercises';
    const boxes = [...article.querySelectorAll(rests)].filter(element => element.checkVisibility())
        .map(element => element.getBoundingClientRect()).filter(({width, height}) => width > 24 && height > 24)
        .sort((one, other) => one.top - other.top);
    const edge = article.getBoundingClientRect(), found = [];
    const headings = [...article.querySelectorAll('h1, h2, h3')].filter(element => element.checkVisibility());
    let bottom = edge.top;
    for (const box of [...boxes, {top: edge.bottom, bottom: edge.bottom}]) {
        if (box.top - bottom > most) {
            const above = headings.findLast(one => one.getBoundingClientRect().top <= bottom + 1) ?? headings[0];
            found.push(`${Math.round(box.top - bottom)} px of text in or after ${above.textContent.trim()}`);
        }
        bottom = Math.max(bottom, box.bottom);
    }
    return found;
}"""
# A chapter shows what it is about within two screens; the audit, which is a list, on a large screen only.
LATE = """() => {
    const article = document.querySelector('article'), narrow = innerWidth <= 640;
    const number = parseInt(article.querySelector('h1 .section-number')?.textContent, 10);
    if (!number || (narrow && article.querySelector('figure.claims'))) return [];
    const tops = [...article.querySelectorAll('.accumviz:not(.av-predict), figure, svg, img')]
        .filter(element => element.checkVisibility()).map(element => element.getBoundingClientRect())
        .filter(({height}) => height > 60).map(({top}) => top - document.body.getBoundingClientRect().top);
    const first = Math.round(Math.min(...tops));
    return first <= 2 * (narrow ? 812 : 900) ? [] : [`the first picture begins at ${first} px`];
}"""
# A great picture that a reader has to scroll while moving it: a screen is 720 px high, a phone's 812.
OUTGROWN = """() => {
    const kinds = ['opening', 'streams', 'peaks', 'plumbing', 'overlap', 'sharding'].map(kind => `.av-${kind}`);
    const most = innerWidth > 640 ? 720 : 812;
    return [...document.querySelectorAll(`article .accumviz:is(${kinds})`)].filter(one => one.offsetHeight > most)
        .map(one => `${one.className}: ${one.offsetHeight} px`);
}"""
# Of the pictures of a chapter those that a reader has to open first, where they are more than one in five.
SHUT = """() => {
    const article = document.querySelector('article');
    if (!parseInt(article.querySelector('h1 .section-number')?.textContent, 10)) return [];
    const pictures = [...article.querySelectorAll('.accumviz:not(.av-predict, .av-report)')]
        .filter(picture => !picture.parentElement.closest('.accumviz:not(.av-predict)'));
    const shut = pictures.filter(picture => !picture.checkVisibility());
    return shut.length > pictures.length / 5 ? shut.map(picture => picture.outerHTML.slice(0, 120)) : [];
}"""
UNFOLD = "document.querySelectorAll('details').forEach(details => { details.open = true; })"
# As long as a page that has loaded may still begin to ask for something.
LINGER = "performance.now() > performance.getEntriesByType('navigation')[0].loadEventEnd + 500"

Look = Callable[[Any], list[str]]


def script(text: str) -> Look:
    return lambda watched: list(watched.page.evaluate(text))


def theme(mode: str) -> Look:
    """The page stands in the mode that its reader's system asks for."""

    def look(watched: Any) -> list[str]:
        wanted = "mode => document.documentElement.dataset.theme === mode"
        watched.page.wait_for_function(wanted, arg=mode)
        return []

    return look


def axe(**options: Any) -> Look:
    """All that axe finds, or what `options` ask it for; changes how the page's code is made, not what it looks like."""

    def look(watched: Any) -> list[str]:
        watched.page.evaluate(ALIKE)
        watched.page.evaluate(f"{AXE}; 0")
        return list(watched.page.evaluate(AUDIT, options))

    return look


def narrow(watched: Any) -> list[str]:
    found = []
    for width in (320, 600, 760, 375):
        watched.page.set_viewport_size({"width": width, "height": 900})
        found += [f"at {width} px: {one}" for one in watched.page.evaluate(OUTGROWING)]
    return found


def unfolded(**options: Any) -> Look:
    """What axe finds, in all that is folded, too."""

    def look(watched: Any) -> list[str]:
        watched.page.evaluate(UNFOLD)
        return axe(**options)(watched)

    return look


def quiet(watched: Any) -> list[str]:
    """It asked no other host, and complained about nothing."""
    watched.page.wait_for_function(LINGER, polling=50)  # asked at each frame, the page would draw all that time
    return [*watched.foreign, *watched.complaints]


def follows(mode: str) -> Look:
    """The page turns with its reader's system."""

    def look(watched: Any) -> list[str]:
        watched.page.emulate_media(color_scheme=mode)
        return theme(mode)(watched)

    return look


NO_CONTRAST = {"color-contrast": {"enabled": False}}
FOLLOWED: dict[str, Look] = {"the reader's mode": follows("light"), "complaints": quiet}
# Each visit with what is looked at, in this order.
LIGHT: dict[str, Look] = {
    "the theme": theme("light"),
    # As pages open: who predicts first has shut pictures by choice.
    "pictures that are shut": script(SHUT),
    "long stretches": script(STRETCHES),
    "pictures that come late": script(LATE),
    "pictures that outgrow the screen": script(OUTGROWN),
    "text on its ground": script(UNREADABLE),
    "pictures without words": script(SILENT),
    "what moves": script(MOVING),
    "equations": script(UNDRAWN),
    "length of lines": script(MEASURE),
    "marks that went astray": script(ASTRAY),
    "lines without numbers": script(UNNUMBERED),
    "signs without a font": script(UNDRAWABLE),
    "signs of a typewriter": script(TYPED),
    "code that is cut": script(SIDEWAYS),
    "axe": unfolded(),
    "complaints": quiet,
}
DARK: dict[str, Look] = {
    "the theme": theme("dark"),
    "answers before their time": script(EARLY),
    "text on its ground": script(UNREADABLE),
    "pale outputs": script(PALE),
    "paper in the dark": script(PAPER),
    "axe on contrast": axe(only={"runOnly": ["color-contrast"]}),
    **FOLLOWED,
}
PHONE: dict[str, Look] = {
    "pictures that come late": script(LATE),
    "what outgrows the page": narrow,
    "pictures that outgrow the screen": script(OUTGROWN),
    "boxes that hide their end": script(UNSAID),
    "names that are split": script(SPLIT),
    "columns that are wrapped": script(WRAPPED),
    "equations on their numbers": script(MET),
    "numbers that are broken": script(BROKEN),
    "figures that are moved": script(MOVED),
    "buttons for no finger": script(SMALL),
    "axe when narrow": unfolded(rules=NO_CONTRAST),
    "complaints": quiet,
}
# axe takes longest of all, and pages are made of the same parts. All that it knows is asked of these; of the others,
# what `text on its ground` does not see already, and when narrow the one rule that a page's width decides.
WHOLLY = (
    "index.html",
    "api.html",
    "chapters/01_graphs.html",
    "chapters/03_accumulation.html",
    "chapters/13_audit.html",
)
BRIEFLY: dict[str, Look] = {
    "axe": unfolded(rules=NO_CONTRAST),
    "axe when narrow": unfolded(only={"runOnly": ["scrollable-region-focusable"]}),
}


def brief(looks: dict[str, Look]) -> dict[str, Look]:
    return {name: BRIEFLY.get(name, look) for name, look in looks.items() if name != "axe on contrast"}


def findings(looks: dict[str, Look], watched: Any) -> dict[str, list[str]]:
    """What each look found, where it found something."""
    return {name: found for name, look in looks.items() if (found := look(watched))}
