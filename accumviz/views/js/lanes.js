/** Few parameters on a timeline: each event's `.grad` as a bar of its parts, as `layout.py` places them. */

/** @import { Geometry } from "./geometry.js" */
/** @import { Ledger, Row } from "./ledger.js" */
/** @import { App } from "./player.js" */
/** @import { Inks, Pen } from "./pen.js" */
/** @import { Part } from "./types.d.ts" */

import { barWidth } from "./geometry.js";
import { clamp, number } from "./numbers.js";
import { drawn } from "./parts.js";

/** At most so wide is a letter of a number. */
const LETTER = 8;

/**
 * The totals that stand at the bars of a lane: all of them, or else those that steps used, or else the largest. Equal
 * numbers have equal digits, whatever room there is.
 * @param {Ledger} ledger @param {Row} row @param {number} column
 */
export function totals({ kinds, data }, row, column) {
  const all = kinds.map((_, e) => row.grad(e));
  const sizes = all.map((grad) => Math.abs(Number(grad)));
  const largest = sizes.indexOf(Math.max(...sizes));
  const texts = all.map((grad) => (grad === null ? "" : number(grad, data.digits)));
  const used = texts.map((text, e) => (kinds[e] === "step" && kinds[e + 1] !== "step" ? text : ""));
  const worst = texts.map((text, e) => (e === largest ? text : ""));
  return [texts, used].find((some, i) => some.every(({ length }) => length * LETTER < (1 + i) * column - 4)) ?? worst;
}

/** From this width on, a column has room for a word. */
export const WORDY = 36;

/** @param {number} column */
const nothing = (column) => (column >= WORDY ? "None" : "∅");

/** @param {Pen} pen @param {Inks} inks @param {Ledger} ledger @param {Geometry} place @param {App["ghost"]} [ghost] */
export function drawLanes(pen, inks, ledger, place, ghost) {
  const { left, column, top, lane } = place;
  const wide = barWidth(column);
  ledger.parameters.forEach((row, p) => {
    const [low, high] = row.r;
    const over = high > 0 ? 17 : 8;
    const scale = (lane - over - (low < 0 ? 17 : 8)) / (high - low || 1);
    const zero = top + lane * p + over + high * scale;
    const told = totals(ledger, row, column);
    const ends = [zero - high * scale, zero - low * scale];
    const edge = left + column * ledger.length;
    pen.fill(inks.muted, left, zero, edge - left, 0.8);
    for (let e = 0; e < ledger.length; e++) {
      const start = left + e * column + (column - wide) / 2;
      const { parts, end, absent, broken } = drawn(e, row);
      const odd = absent || broken;
      const bar = { start, wide, column, zero, scale, ends, grad: absent ? null : end, odd, told: told[e], edge };
      const other = ghost?.(e, row) ?? null;
      if (other !== null) outline(pen, inks, bar, other);
      drawBar(pen, inks, ledger, parts, bar);
    }
  });
}

/**
 * @typedef {object} Bar  where a bar stands
 * @property {number} start
 * @property {number} wide
 * @property {number} column
 * @property {number | null} grad  in the units of its lane
 * @property {boolean} odd  whether `.grad` is None, or not finite
 * @property {string | undefined} told  its total, if that is written
 * @property {number} edge  where the drawing ends
 * @property {number} zero  the height of its zero line
 * @property {number} scale  pixels per unit
 * @property {number[]} ends  heights at which what goes on is torn off
 */

/** @param {Pen} pen @param {Inks} inks @param {Ledger} ledger @param {Part[]} parts @param {Bar} bar */
function drawBar(pen, inks, ledger, parts, bar) {
  const { start, wide, column, zero, scale, ends, odd, told = "" } = bar;
  const absent = bar.grad === null;
  const grad = bar.grad ?? 0;
  const whole = odd ? zero : zero - grad * scale;
  const end = clamp(whole, ends[0], ends[1]);
  if (!odd) {
    drawParts(pen, inks, ledger, parts, bar);
    if (Math.abs(whole - end) < 1) pen.fill(inks.text, start - 4, end - 1, wide + 8, 2);
  }
  const above = odd ? ends[0] < zero : grad >= 0;
  const text = absent ? nothing(column) : told;
  const how = absent ? { look: "italic", ink: inks.muted } : { look: "600" };
  const room = text.length * LETTER;
  const x = Math.min(start + wide / 2, bar.edge - room / 2);
  const y = end + (above ? -9 : 10);
  // Whatever stands there, lines or bars: a number is read.
  pen.context.clearRect(x - room / 2, y - 6, room, 12);
  pen.write(text, x, y, { align: "center", ...how });
}

/** The bar of the run behind, a little wider than ours. @param {Pen} pen @param {Inks} inks @param {Bar} bar */
function outline({ context }, inks, { start, wide, zero, scale, ends }, /** @type {number} */ other) {
  const end = clamp(zero - other * scale, ends[0], ends[1]);
  Object.assign(context, { strokeStyle: inks.text, lineWidth: 1.4 });
  context.setLineDash([4, 3]);
  context.strokeRect(start - 4, zero, wide + 8, end - zero);
  context.setLineDash([]);
}

/** The size of a notch in a bar that is torn off. */
const NOTCH = 5;

/** A part that is thinner has no outline but at its sides: many outlines would be all of it. */
const THIN = 5;

/** Positive parts stand on each other, negative ones hang. */
function drawParts(
  /** @type {Pen} */ { context, fill, hatch }, /** @type {Inks} */ inks, /** @type {Ledger} */ ledger,
  /** @type {Part[]} */ parts, /** @type {Bar} */ { start, wide, zero, scale, ends: [top, bottom] },
) {
  const ends = [zero, zero];
  for (const { born, height, look } of parts) {
    const side = Number(height < 0);
    const color = look === "unseen" ? inks.muted : ledger.color(born)[0];
    const from = clamp(ends[side], top, bottom);
    ends[side] -= height * scale;
    const tall = clamp(ends[side], top, bottom) - from;
    context.globalAlpha = { new: 1, live: inks.pale, used: 0, unseen: 0 }[look];
    fill(color, start, from, wide, tall);
    Object.assign(context, { globalAlpha: 1, lineWidth: 1.2, strokeStyle: color });
    if (look === "unseen") hatch(color, start, Math.min(from, from + tall), wide, Math.abs(tall));
    if (Math.abs(tall) >= THIN) context.strokeRect(start, from, wide, tall);
    else for (const x of [start, start + wide]) fill(color, x - 0.6, from, 1.2, tall);
  }
  // A bar that goes on beyond its scale has notches there.
  for (let x = start; x < start + wide; x += 2 * NOTCH) {
    if (ends[0] < top - 1) context.clearRect(x, top - 1, NOTCH, NOTCH);
    if (ends[1] > bottom + 1) context.clearRect(x, bottom - NOTCH + 1, NOTCH, NOTCH);
  }
}
