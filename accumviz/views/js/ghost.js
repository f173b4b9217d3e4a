/** The run behind the one that is shown: an outline of what its `.grad` was in the same place of the same window. */

/** @import { Ledger, Row } from "./ledger.js" */

/** The events up to each step, and those after the last one. @param {string[]} kinds */
function windows(kinds) {
  /** @type {number[][]} */
  const found = [[]];
  kinds.forEach((kind, e) => {
    found.at(-1)?.push(e);
    if (kind === "step") found.push([]);
  });
  return found;
}

/**
 * Of each event of a run the event of another one that it is compared with: ends of windows meet, and what is just
 * before them; undefined where the other run has ended, or does not zero where this one does.
 * @param {string[]} mine @param {string[]} other @returns {(number | undefined)[]}
 */
export function beside(mine, other) {
  const theirs = windows(other);
  return windows(mine).flatMap((events, w) => events.map((e, k) => {
    const [left, there] = [events.length - 1 - k, theirs[w] ?? []];
    const last = there.length - 1;
    const met = there[Math.max(left < 2 ? last - left : Math.min(k, last - 1), 0)];
    return mine[e] === "zero_grad" && other[met] !== "zero_grad" ? undefined : met;
  }));
}

/** @param {Ledger} mine @param {Ledger} other */
export function ghostOf(mine, other) {
  const places = beside(mine.kinds, other.kinds);
  const rows = new Map(other.rows.map((row) => [row.n, row]));
  /** How far its bar reaches beside an event of ours; null for none. @param {number} e @param {Row} row */
  return (e, { n, signed }) => {
    const [there, place] = [rows.get(n), places[e]];
    if (there?.signed !== signed || place === undefined) return null;
    const grad = there.grad(place) ?? NaN;
    return Number.isFinite(grad) ? there.reach(place, grad) : null;
  };
}
