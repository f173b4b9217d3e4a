/** What the steps of two runs used, compared. */

/** @import { Gradients, Plain } from "./types.d.ts" */

import { number } from "./numbers.js";

/** Beyond this share of its size, a difference between two gradients is no rounding. */
export const ROUNDING = 1e-5;

/** @typedef {{text: string, share: number | null}} Difference */

/** @typedef {{share: number, step: number, ratio: number}} Widest  the step at which two runs differ most */

const noNumber = (/** @type {Plain} */ x) => x === null;

/** How far apart two steps are, as a share of the larger one; ratio: of A's norm to B's. @param {Plain[][]} rows */
function apart(rows) {
  const [a, b] = rows.map((row) => row.map((x) => (x === null ? 0 : Number(x))));
  const sizes = [Math.hypot(...a), Math.hypot(...b)];
  const gap = Math.hypot(...a.map((x, i) => (Object.is(x, b[i]) ? 0 : x - b[i])));
  const share = gap / Math.max(...sizes);
  if (gap === 0) return { share: 0, ratio: 1 };
  return { share: Number.isFinite(share) ? share : Infinity, ratio: sizes[0] / sizes[1] };
}

/** @param {Gradients} a @param {Gradients} b @param {number} both @returns {Widest} */
function widest(a, b, both) {
  let found = { share: 0, step: 0, ratio: 1 };
  for (let step = 0; step < both; step++) {
    const { share, ratio } = apart([a.rows[step], b.rows[step]]);
    if (share > found.share) found = { share, step, ratio };
  }
  return found;
}

/**
 * Whether one has no gradient where the other has one, and which of the two has none at all, where.
 * @param {Gradients} a @param {Gradients} b @param {number} both
 */
function absences(a, b, both) {
  let odd = false;
  let told = "";
  for (let s = 0; s < both; s++) {
    odd ||= a.rows[s].some((x, i) => noNumber(x) !== noNumber(b.rows[s][i]));
    const at = atStep(s, both);
    const none = [a, b].map(({ rows }, i) => (rows[s].every(noNumber) ? ` ${"AB"[i]} has none${at}.` : ""));
    if (odd && !told) told = none.join("");
  }
  return { odd, told };
}

/** @param {number} step @param {number} both */
const atStep = (step, both) => (both > 1 ? `, at step ${step + 1}` : "");

/** @param {Gradients} a @param {Gradients} b @param {number} both */
function whichSteps(a, b, both) {
  if (a.end || b.end) return "the end";
  if (a.steps !== b.steps || both < a.steps) return `the first ${both === 1 ? "step" : `${both} steps`}`;
  return both === 1 ? "the step" : `all ${both} steps`;
}

/** @param {boolean} exact @param {boolean} odd */
function equal(exact, odd) {
  if (odd) return "differ only in that one is None where the other is 0.";
  return exact ? "are equal, bit for bit." : "are equal.";
}

/** @param {Widest} widest @param {string} at */
function unequal({ share, ratio }, at) {
  if (share <= ROUNDING) return `are equal to rounding: they differ by ${number(share, 2)} of their size${at}.`;
  if (!Number.isFinite(share)) return `cannot be compared: one is not finite${at}.`;
  const telling = Number.isFinite(ratio) && ratio && Math.abs(ratio - 1) > 1e-3;
  const more = telling ? `: A has ${number(ratio, 3)} times the norm of B.` : ".";
  return `differ by ${number(share, 3)} of their size${at}${more}`;
}

/** @param {string} text @returns {Difference} */
const untold = (text) => ({ text, share: null });

/** @param {Gradients} a @param {Gradients} b @returns {Difference} */
export function difference(a, b) {
  if (JSON.stringify(a.of) !== JSON.stringify(b.of)) return untold("The two runs have different parameters.");
  const both = Math.min(a.rows.length, b.rows.length);
  if (!both) return untold("There is no gradient to compare.");
  const found = widest(a, b, both);
  const { share, step } = found;
  const { odd, told } = absences(a, b, both);
  const what = a.exact ? "gradients" : "norms of the gradients";
  let verdict = share ? unequal(found, atStep(step, both)) : equal(a.exact, odd);
  if (share && told) verdict = `cannot be compared:${told}`;
  const counts = a.steps === b.steps ? "" : ` A takes ${a.steps}, B ${b.steps}.`;
  return { text: `The ${what} at ${whichSteps(a, b, both)} ${verdict}${counts}`, share };
}
