/** The pane of the weight: its way over the curve of the loss, or from step to step. */

/** @import { App } from "./player.js" */
/** @import { At, Station, WeightsData } from "./types.d.ts" */

import { h, pane, put, svg, swatch, tell } from "./dom.js";

/** How many stations have been reached by an event; the first is where the weights began. */
export const reached = (/** @type {Station[]} */ stations, /** @type {number} */ e) =>
  stations.filter(([place]) => place <= e).length;

/**
 * A way; `ring` counts those around the first one, none of which hides another.
 * @param {Station[]} stations @param {string} look @param {string} color
 */
function wayOf(stations, look, color, ring = 0) {
  const stops = stations.map((one, i) => {
    const [, x, y, , beyond] = one;
    // From beyond the edge no line leads anywhere.
    const [, x1, y1] = stations[i - 1]?.[4] === "" ? stations[i - 1] : one;
    return svg("g", {}, svg("line", { x1, y1, x2: x, y2: y }), svg("circle", { cx: x, cy: y, r: beyond ? 0 : 2 }));
  });
  const dot = svg("circle.av-dot", { r: 4.5 + 2.5 * ring });
  const out = svg("text.av-out");
  const mover = svg("g.av-mover", {}, dot, out);
  const el = svg(`g.av-way${look}`, { style: `--av-c: ${color}` }, ...stops, mover);

  /** @param {number} count how many stations have been reached @param {string[]} told at which edges numbers stand */
  function draw(count, told) {
    stops.forEach((stop, i) => stop.classList.toggle("av-ahead", i >= count));
    const [from, here] = [count - 2, count - 1].map((i) => stations[i]);
    mover.toggleAttribute("hidden", !here);
    if (!here) return;
    const [, x, y, , beyond] = here;
    mover.style.transform = `translate(${x}px, ${y}px)`;
    // Of two numbers at one edge neither could be read.
    out.textContent = told.includes(beyond[0]) ? "" : beyond;
    told.push(beyond[0]);
    dot.toggleAttribute("hidden", Boolean(beyond));
    const right = x > 160;
    // On the side of the edge from which its line does not come.
    put(out, { x: right ? -4 : 4, y: from?.[2] < y ? 16 : -5, "text-anchor": right ? "end" : "start" });
  }
  return { el, draw };
}

/** @param {App} _app @param {WeightsData} told */
export function weightsPane(_app, { m, note, arrow, p, name, color = "var(--av-accent)", beside = [] }) {
  const marks = m.map(([name, at, text = ""]) => svg(name, at, text));
  const mine = wayOf(p, "", color);
  const others = beside.map((other, i) => {
    const key = swatch([other.name, "spot.av-beside", other.color]);
    return { key, p: other.p, ...wayOf(other.p, ".av-beside", other.color, i + 1) };
  });
  const ways = [mine, ...others];
  const drawing = svg("svg", { viewBox: "0 0 320 192", "aria-hidden": "true" }, ...marks,
    ...ways.map(({ el }) => el).reverse());
  const here = h("p.av-note.av-weighs");
  const far = h("span", {}, arrow);
  const legend = h("p.av-note", {},
    swatch([name ?? "the weights now", "spot", color]), `${note} `, ...others.map(({ key }) => key), far);

  /** @param {At} state */
  function draw({ e }) {
    const count = reached(p, e);
    /** @type {string[]} */
    const told = [];
    for (const way of ways) way.draw(count, told);
    for (const { key, p } of others) key.classList.toggle("av-ahead", !p[count - 1]);
    far.classList.toggle("av-ahead", !told.some(Boolean));
    tell(here, count ? p[count - 1][3] : "");
  }
  return { ...pane("weights", "Weights", drawing, legend, here), draw };
}
