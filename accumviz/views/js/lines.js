/** What stands above and across the lanes of a timeline, and below them: headings, lines of events, saved bytes. */

/** @import { Geometry } from "./geometry.js" */
/** @import { Ledger } from "./ledger.js" */
/** @import { Inks, Pen } from "./pen.js" */

import { barWidth } from "./geometry.js";
import { shorten } from "./numbers.js";

const LETTER = 6.8;
const STRIP = 24;

/** The names of the lanes, those left out that would run into another. */
export function drawNames(
  /** @type {Pen} */ pen, /** @type {Inks} */ inks, /** @type {Geometry} */ { left, top, lane, width },
  /** @type {Name[]} */ names,
) {
  let taken = -99;
  for (const { write, start, stop } of names) {
    const middle = top + (lane * (start + stop)) / 2;
    if (start) pen.fill(inks.line, left, top + lane * start, width, 0.7);
    if (middle - taken < 13) continue;
    taken = middle;
    pen.write(write(Math.floor((left - 12) / 6.7)), left - 8, middle, { align: "right", family: inks.mono });
  }
}

/**
 * @typedef {object} Name  of the lanes from `start` to `stop`
 * @property {(limit: number) => string} write  in so many letters
 * @property {number} start
 * @property {number} stop
 */

/** @param {Pen} pen @param {Inks} inks @param {Ledger} ledger @param {Geometry} place */
export function drawLines(pen, inks, ledger, place) {
  ledger.kinds.forEach((kind, e) => {
    const x = place.left + e * place.column;
    if (kind !== "backward") drawLine(pen, ledger.data.kinds[ledger.events.k[e]], x, place);
    if (place.words) drawHeading(pen, inks, ledger, e, x, place.column);
    else if (place.top > 9) drawUpright(pen, ledger.title(e)[0], x, place);
  });
}

/** @param {Pen} pen @param {[string, string, number[]]} kind @param {number} x @param {Geometry} place */
function drawLine({ context }, [, color, dashes], x, { column, bottom }) {
  Object.assign(context, { strokeStyle: color, lineWidth: column > 12 ? 1.8 : 1 });
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(x + 0.5, 2);
  context.lineTo(x + 0.5, bottom);
  context.stroke();
  context.setLineDash([]);
}

/**
 * @param {Pen} pen @param {Inks} inks @param {Ledger} ledger
 * @param {number} e @param {number} x @param {number} column
 */
function drawHeading(pen, inks, ledger, e, x, column) {
  const [, action, about] = ledger.title(e);
  pen.write(action, x + 6, 11, { look: "600" });
  pen.write(shorten(about, Math.floor((column - 8) / LETTER)), x + 6, 26, { ink: inks.muted, family: inks.mono });
}

/** @param {Pen} pen @param {string} text @param {number} x @param {Geometry} place */
function drawUpright({ context, write }, text, x, { column, top }) {
  context.save();
  // Letters reach further below their middle than above it.
  context.translate(x + column / 2 - 1, top - 5);
  context.rotate(-Math.PI / 2);
  write(text, 0, 0);
  context.restore();
}

/** Bytes of saved tensors before and after each backward. */
export function drawSaved(
  /** @type {Pen} */ pen, /** @type {Inks} */ inks, /** @type {Ledger} */ ledger, /** @type {Geometry} */ place,
) {
  const { left, column, bottom, width } = place;
  const base = place.height - 3;
  const sides = [ledger.events.b ?? [], ledger.events.a ?? []].map((bytes) => bytes.map(Number));
  const most = Math.max(ledger.data.most || 1, ...sides[0]);
  const wide = Math.max(barWidth(column), 0.8) / 2;
  pen.write("saved", left - 8, bottom + 20, { align: "right", ink: inks.muted });
  pen.fill(inks.line, 0, bottom + 3, width, 0.7);
  pen.fill(inks.muted, left, base, column * ledger.length, 0.8);
  ledger.kinds.forEach((kind, e) => {
    const missing = kind === "backward" && ledger.events.b?.[e] === null;
    if (missing) pen.hatch(inks.muted, left + e * column, base - STRIP, column, STRIP);
  });
  sides.forEach((bytes, side) => bytes.forEach((count, e) => {
    const tall = (STRIP * count) / most;
    pen.context.globalAlpha = (1 + side) / 2;
    pen.fill(inks.muted, left + e * column + column / 2 + (side - 1) * wide, base - tall, wide, tall);
  }));
}
