/** What a `.grad` is made of: the contributions live in it, and how much each of them is by now. */

/** @import { Ledger, Row } from "./ledger.js" */
/** @import { Part } from "./types.d.ts" */

import { live } from "./fates.js";
import { clamp, sum } from "./numbers.js";

/** What a clip or an unscale did to the whole of `.grad`. @param {Ledger} ledger @param {Row} row @param {number} i */
function factor(ledger, row, i) {
  const ratio = ledger.scales.has(i) ? Number(row.grad(i)) / Number(row.grad(i - 1)) : 1;
  return ratio && Number.isFinite(ratio) ? ratio : 1;
}

/** What is in a signed `.grad` and was not seen to come. @param {Row} row @param {number} e @param {Part[]} parts */
function unseen(row, e, parts) {
  const grad = row.signed ? row.grad(e) : null;
  if (grad === null) return [];
  const most = Math.max(Math.abs(grad), ...parts.map(({ amount }) => Math.abs(amount)));
  const amount = grad - sum(parts);
  // A step uses an average as a whole, not a rank's own part of it.
  const used = Boolean(row.y.size && parts[0]?.used);
  return Math.abs(amount) > 1e-4 * most ? [{ born: -1, amount, height: amount, fresh: false, used }] : [];
}

/**
 * The parts of a row's `.grad` after event `e`, the oldest first; `now` is the event that the page shows.
 * @param {Ledger} ledger @param {number} e @param {Row} row @returns {Part[]}
 */
export function stack(ledger, e, row, now = e) {
  if (e < 0) return [];
  /** @type {Part[]} */
  const parts = [];
  const { born: births, consumed } = row.fates;
  let [i, scale, mean] = [e, 1, 1];
  for (const k of live(row.fates, e).reverse()) {
    const born = births[k];
    for (; i > born; i--) {
      mean = row.y.get(i) ?? mean;
      scale *= factor(ledger, row, i);
    }
    const amount = Number(row.added(born)) * scale * mean;
    parts.push({ born, amount, height: amount, fresh: born === now, used: consumed[k] <= e });
  }
  parts.reverse();
  return [...unseen(row, e, parts), ...parts];
}

/**
 * As it is drawn: norms do not add up, so parts share the height of `‖.grad‖`.
 * @param {Ledger} ledger @param {number} e @param {Row} row @param {number} [now]
 */
export function drawn(ledger, e, row, now) {
  const grad = row.grad(e);
  const parts = stack(ledger, e, row, now);
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
 * @param {Ledger} ledger @param {Part[]} parts @param {number} scale  pixels per unit; 0: too few for any line
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
