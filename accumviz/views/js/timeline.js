/** The pane of parameters × events: bars while there is room, else a heat map; a click or a drag leads to an event. */

/** @import { App } from "./player.js" */
/** @import { Geometry } from "./geometry.js" */
/** @import { At, Data } from "./types.d.ts" */
/** @import { Ledger } from "./ledger.js" */

import { h, pane, swatch } from "./dom.js";
import { equation, OWN_SCALES } from "./words.js";
import { geometry } from "./geometry.js";
import { drawHeat } from "./heat.js";
import { drawLanes, WORDY } from "./lanes.js";
import { pointedAt } from "./light.js";
import { clamp } from "./numbers.js";
import { inksOf, penOn } from "./pen.js";
import { drawNames, drawLines, drawSaved } from "./lines.js";

/** The names that stand beside the lanes: those of groups, where there are any. @param {Ledger} ledger */
function namesOf(ledger) {
  const { rows, groups } = ledger;
  return (groups.length ? groups : rows).map((row) => {
    const [start, stop] = row.in ?? [row.p, row.p + 1];
    const write = (/** @type {number} */ limit) => ledger.name(row, limit);
    return { write, letters: row.n.length, start, stop };
  });
}

/** What the legend says in words. @param {Data} data @param {Geometry} place */
const remarks = ({ heat, none, note, bars: scaled }, { bars, column }) =>
  [bars && column < WORDY ? none : "", bars ? scaled : heat?.told, note].join(" ");

/** A line of code may have run thousands of times. */
const MOST_LIT = 60;

/** @param {App} app */
export function timePane(app) {
  const { ledger, data, go, at } = app;
  const { length, count } = ledger;
  const names = namesOf(ledger);
  const saved = Boolean(ledger.events.b);
  const canvas = h("canvas", { role: "img", "aria-label": `Timeline: ${data.about}` });
  const head = h("i.av-playhead");
  const band = h("i.av-band");
  const warm = h("span.av-warmed");
  const plot = h("div.av-plot", {}, canvas, band, head, warm);
  const legend = h("p.av-note");
  /** @type {Geometry | undefined} */
  let place;
  /** @type {Set<number>} */
  let last = new Set();

  function paint() {
    if (!plot.clientWidth) return;
    const letters = Math.max(0, ...names.map((name) => name.letters));
    place = geometry(plot.clientWidth, length, count, letters, saved, data);
    const inks = inksOf(plot, head);
    const pen = penOn(canvas, place.width, place.height, inks);
    if (!place.bars) drawHeat(pen, inks, ledger, place);
    drawNames(pen, inks, place, names);
    if (place.ruled) drawLines(pen, inks, ledger, place);
    if (saved) drawSaved(pen, inks, ledger, place);
    if (place.bars) drawLanes(pen, inks, ledger, place, app.ghost);
    explain(place);
    draw(at());
    light(last);
  }
  /** @param {Geometry} place */
  function explain(place) {
    const { bars, ruled } = place;
    const always = /^(new|bytes|unseen)/;
    const keys = data.keys.filter(([, name]) => (name.startsWith("rule") ? ruled : bars || always.test(name)));
    const scales = bars && ledger.ownScales ? OWN_SCALES : "";
    legend.replaceChildren(...keys.map(swatch), `${scales} ${remarks(data, place)}`.trim());
  }
  /** Put the marks where the player stands. @param {At} state */
  function draw({ e, p }) {
    if (!place) return;
    const { left, width, column, top, lane } = place;
    const x = clamp(left + e * column, left, width - 2);
    head.style.cssText = `width: ${e < 0 ? 2 : Math.max(column, 2)}px; transform: translateX(${x}px)`;
    band.style.cssText = `top: ${top + lane * p}px; height: ${p < 0 ? 0 : Math.max(lane, 3)}px`;
  }
  /** Which event and which row are under a pointer. @param {PointerEvent} event @param {Geometry} place */
  function spot({ clientX, clientY }, { left, top, lane, column }) {
    const box = canvas.getBoundingClientRect();
    return { e: Math.floor((clientX - box.left - left) / column), p: Math.floor((clientY - box.top - top) / lane) };
  }
  /** @param {PointerEvent} event */
  function point(event) {
    if (!place) return;
    const { e, p } = spot(event, place);
    go({ e, ...(event.type !== "pointermove" && p >= 0 && p < count ? { p } : {}) });
  }
  pointing(plot, point);
  /** The event under a pointer, with its bar in words. @param {PointerEvent} event */
  function under(event) {
    if (!place) return undefined;
    const { e, p } = spot(event, place);
    const inside = e >= 0 && e < length;
    const row = ledger.parameters.find((one) => one.p === p);
    plot.title = inside ? [ledger.head(e), ...(row ? [equation(ledger, e, row)] : [])].join(". ") : "";
    return inside ? [e] : undefined;
  }
  pointedAt(app, plot, under);
  /** @param {Set<number>} lit */
  function light(lit) {
    last = lit;
    const { left = 0, column = 0 } = place ?? {};
    warm.replaceChildren(...[...lit].slice(0, MOST_LIT).map((e) =>
      h("i", { style: `left: ${left + e * column}px; width: ${Math.max(column, 2)}px` })));
  }
  return { ...pane("time", "Timeline", plot, legend), paint, draw, light };
}

/**
 * A finger points once it is lifted or moves sideways: one that swipes up or down scrolls the page.
 * @param {HTMLElement} plot @param {(event: PointerEvent) => void} point
 */
function pointing(plot, point) {
  /** @type {number | null} */
  let from = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = event.pointerType === "mouse" ? null : event.clientX;
    plot.setPointerCapture(event.pointerId);
    if (from === null) point(event);
  });
  plot.addEventListener("pointermove", (event) => {
    if (from !== null && Math.abs(event.clientX - from) > 8) from = null;
    if (from === null && plot.hasPointerCapture(event.pointerId)) point(event);
  });
  plot.addEventListener("pointerup", (event) => {
    if (from !== null) point(event);
  });
}
