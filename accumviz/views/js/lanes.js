/** Few parameters on a timeline: each event's `.grad` as a bar of its parts, with the number it comes to. */

/** @import { Geometry } from "./geometry.js" */
/** @import { Ledger, Row } from "./ledger.js" */
/** @import { Inks, Pen } from "./pen.js" */
/** @import { Part } from "./types.d.ts" */

import { barWidth } from "./geometry.js";
import { number } from "./numbers.js";
import { drawn, state } from "./parts.js";

const OPACITY = { new: 1, used: 0, live: 0.36 };
// On a dark ground as pale a colour would be near black.
const LIVE_ON_DARK = 0.64;
const LETTER = 7.7;
const THIN = 4;

/**
 * The totals that stand at the bars of a lane: all of them, or else those that steps used, or none.
 * @param {Ledger} ledger @param {Row} row @param {number} column
 */
export function totals({ kinds }, row, column) {
  const all = kinds.map((_, e) => row.grad(e));
  const used = all.map((grad, e) => (kinds[e] === "step" && kinds[e + 1] !== "step" ? grad : null));
  for (let i = 0; i < 7; i++) {
    // At last with half of the columns beside it, in which no number stands.
    const [grads, room] = i < 6 ? [i < 3 ? all : used, column - 6] : [used, 2 * column - 10];
    const texts = grads.map((grad) => (grad === null ? "" : number(grad, i < 6 ? 4 - (i % 3) : 2)));
    if (texts.every((text) => text.length * LETTER <= room)) return texts;
  }
  return [];
}

/** From this width on, a column has room for a word. */
export const WORDY = 36;

/** @param {number} column */
const nothing = (column) => (column >= WORDY ? "None" : "∅");

/** @param {Pen} pen @param {Inks} inks @param {Ledger} ledger @param {Geometry} place */
export function drawLanes(pen, inks, ledger, place) {
  const { left, column, top, lane } = place;
  const wide = barWidth(column);
  ledger.parameters.forEach((row, p) => {
    const [low, high] = row.r;
    const over = high > 0 ? 17 : 8;
    const scale = (lane - over - (low < 0 ? 17 : 8)) / (high - low || 1);
    const zero = top + lane * p + over + high * scale;
    pen.fill(inks.muted, left, zero, column * ledger.length, 0.8);
    const told = totals(ledger, row, column);
    for (let e = 0; e < ledger.length; e++) {
      const start = left + e * column + (column - wide) / 2;
      drawBar(pen, inks, ledger, row, e, { start, wide, column, zero, scale, high, told: told[e] });
    }
  });
}

/**
 * @typedef {object} Bar
 * @property {number} start
 * @property {number} wide
 * @property {number} column
 * @property {string | undefined} told  its total, if that is written
 * @property {number} zero  the height of its zero line
 * @property {number} scale  pixels per unit
 * @property {number} high  the most that the row ever comes to
 */

/** @param {Pen} pen @param {Inks} inks @param {Ledger} ledger @param {Row} row @param {number} e @param {Bar} bar */
function drawBar(pen, inks, ledger, row, e, bar) {
  const { start, wide, column, zero, scale, high, told = "" } = bar;
  const { grad, parts, absent, broken } = drawn(ledger, e, row);
  const odd = absent || broken;
  const end = zero - grad * scale;
  const [up, down] = drawParts(pen, inks, ledger, odd ? [] : parts, bar);
  if (!odd) pen.fill(inks.text, start - 4, end - 1.2, wide + 8, 2.4);
  const above = odd ? high > 0 : grad >= 0;
  const edge = above ? Math.min(up, end) : Math.max(down, end);
  const text = absent ? nothing(column) : told;
  const how = absent ? { look: "italic", ink: inks.muted } : { look: "600" };
  pen.write(text, start + wide / 2, (odd ? zero : edge) + (above ? -9 : 10), { align: "center", ...how });
}

/** Positive parts upwards, negative ones downwards; returns how far up and down they reach. */
function drawParts(
  /** @type {Pen} */ pen, /** @type {Inks} */ inks, /** @type {Ledger} */ ledger, /** @type {Part[]} */ parts,
  /** @type {Bar} */ { start, wide, zero, scale },
) {
  const { context } = pen;
  let [up, down] = [zero, zero];
  // Outlines would fill thin parts: such a bar has its sides alone.
  const thin = parts.some(({ height }) => Math.abs(height) * scale < THIN);
  for (const part of parts) {
    const tall = Math.abs(part.height) * scale;
    const y = part.height < 0 ? down : (up -= tall);
    if (part.height < 0) down += tall;
    const color = part.born < 0 ? inks.muted : ledger.color(part.born)[0];
    const kind = state(part);
    context.globalAlpha = kind === "live" && inks.dark ? LIVE_ON_DARK : OPACITY[kind];
    const visible = tall - Number(!thin);
    pen.fill(color, start, y + 0.5, wide, Math.max(visible, 0.8));
    Object.assign(context, { globalAlpha: 1, lineWidth: 1.2, strokeStyle: color });
    if (!thin) context.strokeRect(start, y + 0.5, wide, visible);
    else for (const side of [start, start + wide]) pen.fill(color, side - 0.6, y + 0.5, 1.2, visible);
  }
  return [up, down];
}
