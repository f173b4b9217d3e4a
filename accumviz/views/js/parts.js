/** What a `.grad` is made of: the contributions live in it, and how much each of them is by now. */

/** @import { Ledger, Row } from "./ledger.js" */
/** @import { Flow } from "./lifetimes.js" */
/** @import { Part } from "./types.d.ts" */

import { countUpTo, live } from "./lifetimes.js";
import { clamp, sum } from "./numbers.js";

/**
 * What is there by a factor that is unknown (`lost`), or was not seen to come.
 * @param {Row} row @param {number} e @param {Part[]} parts @param {Part[]} lost @returns {Part[]}
 */
function rest(row, e, parts, lost) {
  const unseen = countUpTo(row.unseen, e) % 2 ? Number(row.grad(e)) - sum(parts) : 0;
  // Norms do not add up: how much of one is there by an unknown factor is a guess, and hatched.
  const amount = row.signed ? unseen : sum(lost);
  // A step uses an average as a whole, not a rank's own part of it.
  const like = lost.at(-1) ?? (row.averaged <= e ? parts[0] : null);
  return amount ? [{ born: -1, amount, height: amount, fresh: false, used: Boolean(like?.used) }] : [];
}

/**
 * The parts of a row's `.grad` after event `e`, the oldest first; `now` is the event that the page shows.
 * @param {number} e @param {Row} row @returns {Part[]}
 */
export function stack(e, row, now = e) {
  /** @type {Part[][]} */
  const [parts, lost] = [[], []];
  const { born: births, consumed, by } = row.lifetimes;
  const past = by.filter(([event]) => event <= e);
  let [scale, mean] = [1, 1];
  for (const k of live(row.lifetimes, e).reverse()) {
    const born = births[k];
    while (past.length && past[past.length - 1][0] > born) {
      const [, factor, average] = /** @type {Flow["by"][0]} */ (past.pop());
      scale *= factor ?? NaN;
      mean = average ?? mean;
    }
    const amount = Number(row.added(born)) * (scale * mean || 1);
    const part = { born, amount, height: amount, fresh: born === now, used: consumed[k] <= e };
    (scale ? parts : lost).unshift(part);
  }
  return [...rest(row, e, parts, lost), ...parts];
}

/**
 * As it is drawn: norms do not add up, so parts share the height of `‖.grad‖`.
 * @param {number} e @param {Row} row @param {number} [now]
 */
export function drawn(e, row, now) {
  const grad = row.grad(e);
  const parts = stack(e, row, now);
  const whole = sum(parts);
  const share = row.signed || !whole ? 1 : Number(grad) / whole;
  for (const part of parts) part.height = part.amount * share;
  const absent = grad === null;
  return { grad: grad ?? 0, parts, absent, broken: !absent && !Number.isFinite(grad + whole) };
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

/** @param {{fresh: boolean, used: boolean}} part @returns {"new" | "used" | "live"} */
export function state({ fresh, used }) {
  if (fresh) return "new";
  return used ? "used" : "live";
}

/** @param {{born: number, fresh: boolean, used: boolean}} part */
export const look = (part) => (part.born < 0 ? "unseen" : state(part));

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
    const like = look(part) + (Math.abs(height * scale) < THIN ? ledger.color(born) : born);
    const last = found.findLast((one) => one.height * height >= 0);
    if (last?.like === like) {
      last.height += height;
      last.told = `${++last.count} parts`;
    } else found.push({ ...part, like, count: 1 });
  }
  return found;
}
