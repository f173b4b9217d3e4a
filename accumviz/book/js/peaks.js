/** Bytes alive during one step: curves of several K, a switch for checkpoints, and a line to drag. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { PeaksData, PeaksRun } from "./types.d.ts" */

import { group, h, put, range, slide, svg, tell } from "../../views/js/dom.js";
import { clamp } from "../../views/js/numbers.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

const WIDE = 1000;
const MIB = 2 ** 20;
const NEAR = 18;
/** The line moves by so many bytes. */
const NOTCH = MIB / 8;

/** @param {number} bytes */
const size = (bytes) => `${(bytes / MIB).toFixed(1)} MiB`;

/** @param {PeaksRun} run */
function totals({ alive }) {
  return alive[0].map((_, i) => alive.reduce((sum, kind) => sum + kind[i], 0));
}

/** The picture: what is alive as bands, the other K as lines, and what no device has room for in another colour. */
function drawing(/** @type {PeaksData} */ { kinds, ks, top }, /** @type {Element} */ still) {
  const y = (/** @type {number} */ bytes) => WIDE * (1 - bytes / top);
  const ticks = [];
  for (let at = 0; at <= top / MIB; at += 2) ticks.push(at);
  const grid = svg("path.av-grid", { d: ticks.map((at) => `M0 ${y(at * MIB)}H${WIDE}`).join("") });
  const bands = kinds.map((_, i) => svg(`path.av-band-${i}`));
  const room = svg("rect", { width: WIDE, height: 0 });
  const over = svg("path.av-over", { "clip-path": "url(#av-peaks-room)" });
  const others = ks.map(() => svg("polyline.av-curve"));
  const [curve, line, cursor] = [svg("polyline.av-chosen"), svg("path.av-gpu"), svg("path.av-cursor")];
  const el = svg("svg", { viewBox: `0 0 ${WIDE} ${WIDE}`, preserveAspectRatio: "none", role: "img",
    "aria-label": "Bytes alive during one step" },
  svg("clipPath", { id: "av-peaks-room" }, room), grid, ...bands, over, ...others, curve, line, cursor);
  const names = ks.map(() => h("span.av-name"));
  const numbers = ticks.map((at) => h("span.av-tick", { style: `bottom: ${(100 * at * MIB) / top}%` }, `${at}`));
  const dot = h("i.av-dot");
  const handle = h("span.av-gpu-name");
  const plot = h("div.av-plot", {}, el, ...numbers, ...names, handle, dot);
  still.replaceWith(plot);

  /** @param {number[]} low @param {number[]} high */
  const area = (low, high) => {
    const at = (/** @type {number} */ i) => (WIDE * i) / (low.length - 1);
    const there = high.map((bytes, i) => `${at(i)} ${y(bytes)}`);
    const back = low.map((bytes, i) => `${at(i)} ${y(bytes)}`).reverse();
    return `M${[...there, ...back].join("L")}Z`;
  };
  /** @param {number[]} heights */
  const points = (heights) => heights.map((bytes, i) => `${(WIDE * i) / (heights.length - 1)},${y(bytes)}`).join(" ");

  /** @param {PeaksRun[]} runs @param {number} k @param {number} gpu */
  function draw(runs, k, gpu) {
    let low = runs[k].alive[0].map(() => 0);
    runs[k].alive.forEach((kind, i) => {
      const high = kind.map((bytes, at) => bytes + low[at]);
      put(bands[i], { d: area(low, high) });
      low = high;
    });
    put(over, { d: area(low.map(() => 0), low) });
    put(curve, { points: points(low) });
    put(room, { height: Math.max(y(gpu), 0) });
    put(line, { d: `M0 ${y(gpu)}H${WIDE}` });
    runs.forEach((run, i) => {
      const heights = totals(run);
      const peak = Math.max(...heights);
      put(others[i], { points: points(heights) });
      put(names[i], { style: `bottom: ${run.label}%`, "data-fits": peak <= gpu, "data-chosen": i === k });
      tell(names[i], `K = ${ks[i]}: ${size(peak)}`);
    });
    put(handle, { style: `bottom: ${(100 * gpu) / top}%` });
    tell(handle, `↕ your GPU: ${size(gpu)}`);
  }
  /** @param {number[]} heights @param {number} at */
  function point(heights, at) {
    const x = (WIDE * at) / (heights.length - 1);
    put(cursor, { d: `M${x} ${WIDE}V${y(heights[at])}` });
    put(dot, { style: `left: ${x / 10}%; bottom: ${(100 * heights[at]) / top}%` });
  }
  return { plot, svg: el, draw, point };
}

/** Which part of the step runs when. */
function strip() {
  const el = h("div.av-strip", { "aria-hidden": "true" });
  /** @param {PeaksRun} run */
  function draw({ phase, phases, part }) {
    /** @type {[string, number, number][]} */
    const parts = [];
    phase.forEach((p, i) => {
      const name = phases[p] === "recomputed" ? "backward" : phases[p];
      const last = parts[parts.length - 1];
      if (last?.[0] === name && last[1] === part[i]) last[2] += 1;
      else parts.push([name, part[i], 1]);
    });
    const most = parts.reduce((sum, [, , count]) => sum + count, 0);
    el.replaceChildren(...parts.map(([name, , count]) =>
      h(`span.av-${name}`, { style: `flex-grow: ${count}` }, count > most / 9 ? name : "")));
  }
  return { el, draw };
}

/** What fits below the line. @param {PeaksData} data @param {number} gpu */
function fitting({ ks, runs }, gpu) {
  const says = runs.map((way) => {
    const first = way.findIndex((run) => Math.max(...totals(run)) <= gpu);
    return first < 0 ? "no K fits" : first === 0 ? "every K fits" : `K ≥ ${ks[first]} fits`;
  });
  return `${size(gpu)}: ${says[0]}; with checkpoints ${says[1]}.`;
}

/** @param {Host} host @returns {Promise<Dispose>} */
async function peaks({ model, el }) {
  const data = /** @type {PeaksData} */ ((await read(model.get("data"))).data);
  const still = /** @type {Element} */ (el.parentElement?.querySelector(".av-still"));
  let [k, way, gpu, at] = [0, 0, data.gpu, 0];
  const picture = drawing(data, still);
  const phases = strip();
  const ks = range("K, micro-batches of one step", () => choose(() => { k = Number(ks.value); }));
  const checks = h("input", { type: "checkbox", role: "switch",
    change: () => choose(() => { way = Number(checks.checked); }) });
  const holds = range("your GPU", () => choose(() => { gpu = Number(holds.value) * NOTCH; }));
  const scrub = range("operation", () => point(Number(scrub.value)));
  const shown = h("output");
  const [verdict, fits, operation] = [h("strong"), h("span"), h("span.av-operation")];
  const values = data.kinds.map(() => h("b"));
  const keys = data.kinds.map((kind, i) => h("span.av-key", {}, h(`i.av-band-${i}`), `${kind} `, values[i]));
  el.append(h("div.av-tide", group("Memory of one step, for several K"),
    h("p.av-says", { "aria-live": "polite" }, verdict, " ", fits),
    h("p.av-title", {}, "MiB alive, from the first operation of the step to the last"), picture.plot, phases.el,
    h("p.av-at", {}, operation), h("p.av-legend", {}, ...keys),
    h("div.av-keys", {}, h("label", {}, "K ", ks, shown), h("label", {}, checks, " checkpoints"),
      h("label", {}, "your GPU ", holds), h("label", {}, "operation ", scrub))));

  const run = () => data.runs[way][k];
  /** @param {() => void} change */
  function choose(change) {
    change();
    draw();
  }
  /** @param {number} to */
  function point(to) {
    at = to;
    const { names, operation: which, phase, phases: all, part, alive } = run();
    const heights = totals(run());
    picture.point(heights, at);
    slide(scrub, at, heights.length - 1, `${at + 1} of ${heights.length}`);
    const of = part[at] ? `micro-batch ${part[at]} of ${data.ks[k]}, ` : "";
    tell(operation, `${of}${all[phase[at]]}, after ${names[which[at]]}: ${size(heights[at])} alive`);
    values.forEach((value, i) => tell(value, size(alive[i][at])));
    keys.forEach((key, i) => key.classList.toggle("av-none", !alive[i][at]));
  }
  function draw() {
    const heights = totals(run());
    const peak = Math.max(...heights);
    picture.draw(data.runs[way], k, gpu);
    phases.draw(run());
    slide(ks, k, data.ks.length - 1, `${data.ks[k]}`);
    tell(shown, `${data.ks[k]}`);
    slide(holds, gpu / NOTCH, data.top / NOTCH, size(gpu));
    tell(verdict, peak > gpu ? `K = ${data.ks[k]} runs out of memory.` : `K = ${data.ks[k]} fits.`);
    verdict.classList.toggle("av-fails", peak > gpu);
    tell(fits, `Your GPU holds ${fitting(data, gpu)}`);
    point(peak > gpu ? heights.findIndex((bytes) => bytes > gpu) : heights.indexOf(peak));
  }
  follow(picture, {
    point: (part) => point(Math.round(part * (run().phase.length - 1))),
    line: (part) => choose(() => { gpu = Math.round((part * data.top) / NOTCH) * NOTCH; }),
    height: () => gpu / data.top,
  });
  draw();
  return () => {};
}

/**
 * The line is dragged; elsewhere the pointer shows an operation.
 * @param {{plot: HTMLElement, svg: Element}} picture
 * @param {{point: (part: number) => void, line: (part: number) => void, height: () => number}} does
 */
function follow({ plot, svg: field }, does) {
  let drags = false;
  const where = (/** @type {PointerEvent} */ { clientX, clientY }) => {
    const { left, bottom, width, height } = field.getBoundingClientRect();
    return { x: clamp((clientX - left) / width, 0, 1), y: clamp((bottom - clientY) / height, 0, 1), height };
  };
  const isNear = (/** @type {{y: number, height: number}} */ { y, height }) =>
    Math.abs(y - does.height()) * height < NEAR;
  put(plot, {
    pointerdown: (/** @type {PointerEvent} */ event) => {
      drags = isNear(where(event));
      if (drags) plot.setPointerCapture(event.pointerId);
      else does.point(where(event).x);
    },
    pointermove: (/** @type {PointerEvent} */ event) => {
      const to = where(event);
      plot.classList.toggle("av-drags", drags || isNear(to));
      if (drags) does.line(to.y);
      else if (!isNear(to)) does.point(to.x);
    },
    pointerup: () => { drags = false; },
    pointercancel: () => { drags = false; },
  });
}

startAll("peaks", peaks, "a drawing and a table");
