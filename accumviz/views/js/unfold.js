/** The drawing of a large graph: a folded module opens in its place, and what is drawn is zoomed and panned. */

import { button, h, KEYS_ARE_MINE, own, put } from "./dom.js";
import { zooming } from "./zoom.js";

/** @type {Record<string, number>} */
const ZOOMS = { "+": 1.25, "=": 1.25, "-": 0.8, "0": 0 };
const OPENS = ".av-opens";

/** @param {Element} fold */
const moduleOf = (fold) => fold.getAttribute("data-module") ?? "";

/** @param {string} module @param {string} other */
const isIn = (module, other) => `${module}.`.startsWith(`${other}.`);

/** What is clicked, or under the focus, if it opens. @param {Event} event */
const opened = ({ target }) => /** @type {Element} */ (target).closest(OPENS);

/**
 * The modules that open look and act as buttons.
 * @param {SVGSVGElement} drawing @param {Map<string, unknown>} insides
 */
function offer(drawing, insides) {
  for (const fold of drawing.querySelectorAll("[data-module]")) {
    const label = `unfold ${moduleOf(fold)}`;
    if (!insides.has(moduleOf(fold))) continue;
    fold.classList.add(OPENS.slice(1));
    put(fold, { role: "button", tabindex: 0, "aria-label": label }).querySelector("title")?.replaceChildren(label);
    drawing.setAttribute("role", "group");
  }
}

/** @param {HTMLElement} box @param {Map<string, SVGSVGElement>} insides */
function start(box, insides) {
  const view = zooming(box);
  const path = h("nav.av-path", { "aria-label": "modules" });
  const bar = h("div.av-bar", {}, path, ...view.tools);
  const whole = /** @type {SVGSVGElement} */ (box.firstChild);
  let here = "";
  /** How near and from where a drawing was seen when the reader left it. @type {Map<string, number[]>} */
  const seen = new Map();

  /** The modules around one that open, and itself. @param {string} module */
  const around = (module) => ["", ...insides.keys()].filter((one) => !one || isIn(module, one)).sort();
  /** @param {string} module */
  function draw(module) {
    here = module;
    const drawing = /** @type {SVGSVGElement} */ (insides.get(module)?.cloneNode(true) ?? whole);
    const crumbs = around(module).map((one, i, all) => {
      const part = one.slice(i > 1 ? all[i - 1].length + 1 : 0) || "whole graph";
      return one === module ? h("b", {}, part) : button("up", `back to ${part}`, () => go(one), part);
    });
    const hint = drawing.querySelector(OPENS) ? [h("span.av-hint", {}, "click a module to unfold it")] : [];
    path.replaceChildren(...crumbs, ...hint);
    put(box, { "aria-label": module ? `Inside ${module}, scrollable` : "Autograd graph, scrollable" });
    box.replaceChildren(drawing);
    const { width: w, height: height } = drawing.viewBox.baseVal;
    view.resize({ w, h: height });
    box.style.height = "90vh";
    view.fit();
    box.style.height = `min(90vh, ${height * view.scale() + box.offsetHeight - box.clientHeight}px)`;
    const first = /** @type {Element} */ (drawing.querySelector("g")).getBoundingClientRect();
    const [scale, left, top] = seen.get(module) ?? [view.scale(), box.scrollLeft + first.x + 80 - innerWidth / 2, 0];
    view.zoom(scale / view.scale());
    box.scrollTo(left, top);
  }
  /** Show another module, with the focus where the reader came from. @param {string} module */
  function go(module) {
    const before = here;
    seen.set(before, [view.scale(), box.scrollLeft, box.scrollTop]);
    draw(module);
    const folds = [...box.querySelectorAll(OPENS)];
    const last = /** @type {SVGElement | undefined} */ (folds.find((one) => isIn(before, moduleOf(one))));
    (last ?? box).focus();
    bar.scrollIntoView({ block: "nearest" });
  }

  put(box, {
    ...KEYS_ARE_MINE,
    /** @param {Event} event */
    click(event) {
      const fold = opened(event);
      if (fold && view.isStill()) go(moduleOf(fold));
    },
    /** @param {KeyboardEvent} event */
    keydown(event) {
      const { key } = event;
      const fold = opened(event);
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (fold && /^(Enter| )$/.test(key)) go(moduleOf(fold));
      else if (key in ZOOMS) view.zoom(ZOOMS[key]);
      else if (key === "Escape" && here) go(around(here).at(-2) ?? "");
      else return;
      own(event);
    },
    /** Turned with ctrl, as a pinch is told; else the page scrolls. @param {WheelEvent} event */
    wheel(event) {
      if (!event.ctrlKey) return;
      own(event);
      view.zoom(Math.exp(-event.deltaY / 200));
    },
  });
  box.before(bar);
  draw("");
}

for (const figure of document.querySelectorAll(".av-large:not([data-done])")) {
  put(figure, { "data-done": "" });
  /** @type {Map<string, SVGSVGElement>} */
  const insides = new Map();
  for (const inside of figure.querySelectorAll("[data-inside]")) {
    insides.set(inside.getAttribute("data-inside") ?? "", /** @type {SVGSVGElement} */ (inside.querySelector("svg")));
  }
  figure.querySelector(".av-insides")?.remove();
  for (const drawing of insides.values()) offer(drawing, insides);
  const box = /** @type {HTMLElement} */ (figure.querySelector(".av-scroll"));
  offer(/** @type {SVGSVGElement} */ (box.firstChild), insides);
  start(box, insides);
}
