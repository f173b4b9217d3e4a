/** What a `.grad` is made of: the contributions live in it, and how much each of them is by now. */

/** @import { Ledger, Row } from "./ledger.js" */
/** @import { Part } from "./types.d.ts" */

import { clamp, sum } from "./numbers.js";

/**
 * A bar as it is drawn: norms do not add up, so parts share the height of `‖.grad‖`. What was added at `now` is new.
 * @param {number} e @param {Row} row @param {number} [now]
 */
export function drawn(e, row, now = e) {
  const grad = row.grad(e);
  const found = row.parts(e) ?? [{ born: -1, amount: grad ?? 0, look: /** @type {const} */ ("live") }];
  const whole = sum(found);
  const share = row.signed || !whole ? 1 : Number(grad) / whole;
  /** @type {Part[]} */
  const parts = found.map((part) => {
    const look = part.look === "new" && part.born !== now ? "live" : part.look;
    return { ...part, look, height: row.reach(e, part.amount * share) };
  });
  const absent = grad === null;
  const broken = !absent && !Number.isFinite(grad + whole);
  return { grad: grad ?? 0, end: row.reach(e, grad ?? 0), parts, absent, broken };
}

/** Where a value stands on a scale, from 0 to 1; what lies beyond its ends elsewhere. @param {number[]} scale */
export const along = ([low, high], /** @type {number} */ value) => (value - low) / (high - low || 1);

/** Whether a bar that ends at a place is torn off. @param {number} place */
export const isTorn = (place) => Math.abs(place - 0.5) > 0.501;

/**
 * How a piece of a horizontal bar is drawn: it is torn off where it goes on beyond the scale.
 * @param {number[]} scale @param {number} start @param {number} length
 */
export function pieceOn(scale, start, length) {
  const end = along(scale, start + length);
  const [from, to] = [along(scale, start), end].map((place) => clamp(place, 0, 1));
  const share = Math.abs(to - from);
  const style = `left: ${100 * Math.min(from, to)}%; width: ${100 * share}%; `;
  const torn = isTorn(end) ? ` av-torn av-${length < 0 ? "low" : "high"}` : "";
  return { share, style, torn, hidden: !share && length !== 0 };
}

const THIN = 5;

/**
 * Parts of one look that are too thin for lines between them, as one.
 * @param {Ledger} ledger @param {Part[]} parts @param {number} scale  pixels per unit
 */
export function joined(ledger, parts, scale) {
  /** @type {(Part & {like: string, count: number})[]} */
  const found = [];
  for (const part of parts) {
    const { born, height } = part;
    const like = part.look + (Math.abs(height * scale) < THIN ? ledger.color(born) : born);
    const last = found.findLast((one) => one.height * height >= 0);
    if (last?.like === like) {
      last.height += height;
      last.told = `${++last.count} parts`;
    } else found.push({ ...part, like, count: 1 });
  }
  return found;
}
