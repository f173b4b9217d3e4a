/** Bytes alive during one step: curves of several K, a switch for checkpoints, and a line to drag. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { Moment, PeaksData } from "./types.d.ts" */

import { group, h, KEYS_ARE_MINE, put, range, slide, svg, tell } from "../../views/js/dom.js";
import { clamp } from "../../views/js/numbers.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

const WIDE = 1000;
const MIB = 2 ** 20;
/** The line moves by so many bytes, and is taken from so many pixels away. */
const [NOTCH, NEAR] = [MIB / 8, 18];
/** Names of curves are so far apart, in hundredths of the height. */
const APART = 7;

const LEGEND = [["over", "more than your GPU holds"], ...["forward", "backward", "step"].map((name) => [name, name])];

/** @param {number} bytes */
const size = (bytes) => `${(bytes / MIB).toFixed(1)} MiB`;

/** Bytes of the lowest kinds together, after each operation. @param {Moment[]} run @param {number} [kinds] */
const heights = (run, kinds) => run.map(([, , , alive]) => alive.slice(0, kinds).reduce((sum, one) => sum + one, 0));

/** @param {Moment[]} run */
const peakOf = (run) => Math.max(...heights(run));

/** The picture: what is alive as bands, the other K as lines, and what the device has no room for in another colour. */
function drawing(/** @type {PeaksData} */ { kinds, ks }, /** @type {number} */ top) {
  const up = (/** @type {number} */ bytes) => `bottom: ${(100 * bytes) / top}%`;
  const y = (/** @type {number} */ bytes) => WIDE * (1 - bytes / top);
  const ticks = [];
  for (let at = 0; at <= top; at += 2 * MIB) ticks.push(at);
  const grid = svg("path.av-grid", { d: ticks.map((at) => `M0 ${y(at)}H${WIDE}`).join("") });
  // The highest band is the lowest in the drawing: each covers all that is below it.
  const bands = kinds.map((_, i) => svg(`polygon.av-band-${i}`));
  const room = svg("rect", { width: WIDE });
  const over = svg("polygon.av-over", { "clip-path": "url(#av-peaks-room)" });
  const curves = ks.map(() => svg("polyline"));
  const [line, cursor] = [svg("path.av-gpu"), svg("path.av-cursor")];
  const field = svg("svg", { viewBox: `0 0 ${WIDE} ${WIDE}`, preserveAspectRatio: "none", role: "img",
    "aria-label": "Bytes alive during one step" },
  svg("clipPath", { id: "av-peaks-room" }, room), grid, ...bands.toReversed(), over, ...curves, line, cursor);
  const names = ks.map(() => h("span.av-name"));
  const handle = h("span.av-gpu-name");
  const numbers = ticks.map((at) => h("span.av-tick", { style: up(at) }, `${at / MIB}`));
  const plot = h("div.av-plot", {}, field, ...numbers, ...names, handle);

  /** @param {number[]} bytes */
  const points = (bytes) => bytes.map((one, i) => `${(WIDE * i) / (bytes.length - 1)},${y(one)}`).join(" ");
  /** @param {number[]} bytes */
  const area = (bytes) => `0,${WIDE} ${points(bytes)} ${WIDE},${WIDE}`;

  /** @param {Moment[][]} runs @param {number} k @param {number} gpu */
  function draw(runs, k, gpu) {
    bands.forEach((band, i) => put(band, { points: area(heights(runs[k], i + 1)) }));
    put(over, { points: area(heights(runs[k])) });
    put(room, { height: Math.max(y(gpu), 0) });
    put(line, { d: `M0 ${y(gpu)}H${WIDE}` });
    put(handle, { style: up(gpu) });
    tell(handle, `↕ your GPU: ${size(gpu)}`);
    let lowest = 0;
    for (const i of [...ks.keys()].toReversed()) {
      const peak = peakOf(runs[i]);
      lowest = Math.max(peak, lowest);
      put(curves[i], { points: points(heights(runs[i])), class: i === k ? "av-chosen" : "av-curve" });
      put(names[i], { style: up(lowest), "data-fits": peak <= gpu, "data-chosen": i === k });
      tell(names[i], `K = ${ks[i]}: ${(peak / MIB).toFixed(1)}`);
      lowest += (APART * top) / 100;
    }
  }
  /** @param {number[]} bytes @param {number} at */
  function point(bytes, at) {
    put(cursor, { d: `M${(WIDE * at) / (bytes.length - 1)} ${WIDE}V${y(bytes[at])}` });
  }
  return { plot, field, draw, point };
}

/** Which part of the step runs when: neighbours in one phase of one micro-batch. @param {Moment[]} run */
function strip(run) {
  /** @type {{name: string, of: number, count: number}[]} */
  const parts = [];
  for (const [, phase, of] of run) {
    const name = phase === "recomputed" ? "backward" : phase;
    const last = parts[parts.length - 1];
    if (last?.name === name && last.of === of) last.count += 1;
    else parts.push({ name, of, count: 1 });
  }
  return parts.map(({ name, count }) =>
    h(`span.av-${name}`, { style: `flex-grow: ${count}` }, h("b", {}, name)));
}

/** Which K fit. @param {Moment[][]} runs @param {number[]} ks @param {number} gpu */
function fitting(runs, ks, gpu) {
  const first = runs.findIndex((run) => peakOf(run) <= gpu);
  return first < 0 ? "no K fits" : first === 0 ? "every K fits" : `K\u00a0≥\u00a0${ks[first]} fits`;
}

/** @param {Host} host @returns {Promise<Dispose>} */
async function peaks({ model, el }) {
  const data = /** @type {PeaksData} */ ((await read(model.get("data"))).data);
  const { kinds, ks, runs } = data;
  const top = MIB * Math.ceil((1.08 * Math.max(...runs.flat().map(peakOf))) / MIB);
  let [k, way, gpu] = [0, 0, data.gpu];
  const picture = drawing(data, top);
  const phases = h("div.av-strip", { "aria-hidden": "true" });
  const many = range("K, micro-batches of one step", () => choose(() => { k = Number(many.value); }));
  const checks = h("input", { type: "checkbox", role: "switch", ...KEYS_ARE_MINE,
    change: () => choose(() => { way = Number(checks.checked); }) });
  const holds = range("your GPU", () => choose(() => { gpu = Number(holds.value) * NOTCH; }));
  const scrub = range("operation", () => point(Number(scrub.value)));
  const [shown, room, verdict, fits, operation] = [h("output"), h("output"), h("strong"), h("span"), h("p.av-at")];
  const values = kinds.map(() => h("b"));
  const keys = kinds.map((kind, i) => h("span", {}, h(`i.av-band-${i}`), `${kind} `, values[i]));
  for (const [look, text] of LEGEND) keys.push(h("span", {}, h(`i.av-${look}`), text));
  el.append(h("div.av-tide", group("Memory of one step, for several K"),
    h("p.av-says", { "aria-live": "polite" }, verdict, " ", fits),
    h("p.av-title", {}, "MiB in use after each operation, and each K’s peak"),
    picture.plot, phases, operation, h("p.av-legend", {}, ...keys),
    h("div.av-keys", {}, h("label", {}, "K micro-batches a step ", many, shown),
      h("label", {}, checks, " checkpoints"),
      h("label", {}, "your GPU ", holds, room), h("label", {}, "operation ", scrub))));

  /** @param {() => void} change */
  function choose(change) {
    change();
    const run = runs[way][k];
    picture.draw(runs[way], k, gpu);
    phases.replaceChildren(...strip(run));
    slide(many, k, ks.length - 1, `${ks[k]}`);
    tell(shown, `${ks[k]}`);
    slide(holds, gpu / NOTCH, top / NOTCH, size(gpu));
    tell(room, size(gpu));
    const [bytes, peak] = [heights(run), peakOf(run)];
    tell(verdict, peak > gpu ? `K = ${ks[k]} runs out of memory.` : `K = ${ks[k]} fits.`);
    verdict.classList.toggle("av-fails", peak > gpu);
    const [plain, recomputed] = runs.map((of) => fitting(of, ks, gpu));
    tell(fits, `Your GPU holds ${size(gpu)}: ${plain}; with checkpoints ${recomputed}.`);
    point(peak > gpu ? bytes.findIndex((one) => one > gpu) : bytes.indexOf(peak));
  }
  /** @param {number} at */
  function point(at) {
    const run = runs[way][k];
    const bytes = heights(run);
    const [name, phase, part, alive] = run[at];
    picture.point(bytes, at);
    slide(scrub, at, run.length - 1, `${at + 1} of ${run.length}`);
    const of = part ? `micro-batch ${part} of ${ks[k]}, ` : "";
    tell(operation, `${of}${phase}, after ${name}: ${size(bytes[at])} alive`);
    alive.forEach((one, i) => tell(values[i], size(one)));
  }
  follow(picture, {
    point: (part) => point(Math.round(part * (runs[way][k].length - 1))),
    line: (part) => choose(() => { gpu = Math.round((part * top) / NOTCH) * NOTCH; }),
    height: () => gpu / top,
  });
  choose(() => {});
  return () => {};
}

/**
 * The line is dragged; elsewhere the pointer shows an operation.
 * @param {{plot: HTMLElement, field: Element}} picture
 * @param {{point: (part: number) => void, line: (part: number) => void, height: () => number}} does
 */
function follow({ plot, field }, does) {
  let drags = false;
  /** @param {PointerEvent} event */
  function move({ clientX, clientY }) {
    const { left, bottom, width, height } = field.getBoundingClientRect();
    const x = clamp((clientX - left) / width, 0, 1);
    const up = clamp((bottom - clientY) / height, 0, 1);
    const near = Math.abs(up - does.height()) * height < NEAR;
    if (drags) does.line(up);
    else if (!near) does.point(x);
    plot.classList.toggle("av-drags", drags || near);
    return near;
  }
  put(plot, {
    pointerdown: (/** @type {PointerEvent} */ event) => {
      drags = move(event);
      if (drags) plot.setPointerCapture(event.pointerId);
    },
    pointermove: move,
    pointerup: () => { drags = false; },
    pointercancel: () => { drags = false; },
  });
}

startAll("peaks", peaks, "what it shows in words");
