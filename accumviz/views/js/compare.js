/** What the steps of two runs used, compared. */

/** @import { Gradients, Plain } from "./types.d.ts" */

import { number } from "./numbers.js";

/** Beyond this share of its size, a difference between two gradients is no rounding. */
export const ROUNDING = 1e-5;

/** @typedef {{text: string, share: number | null}} Difference */

/** @typedef {ReturnType<typeof apart>} Apart  how far apart two runs are at a step */

const noNumber = (/** @type {Plain} */ x) => x === null;

/**
 * How far apart two runs are at a step, as a share of the larger gradient; ratio: of A's norm to B's; odd: whether one
 * has no gradient where the other has one; none: which of the two has none at all.
 * @param {Plain[][]} rows @param {number} step
 */
function apart(rows, step) {
  const [a, b] = rows.map((row) => row.map(Number)); // None counts as 0
  const sizes = [Math.hypot(...a), Math.hypot(...b)];
  const gap = Math.hypot(...a.map((x, i) => (Object.is(x, b[i]) ? 0 : x - b[i])));
  const share = gap && gap / Math.max(...sizes);
  const odd = rows[0].some((x, i) => noNumber(x) !== noNumber(rows[1][i]));
  const none = "AB"[rows.findIndex((row) => row.every(noNumber))];
  return { step, share: share >= 0 ? share : Infinity, ratio: sizes[0] / sizes[1], odd, none };
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
  return `are equal${exact ? ", bit for bit" : ""}.`;
}

/** @param {Apart} apart @param {string} at */
function unequal({ share, ratio }, at) {
  if (share <= ROUNDING) return `are equal to rounding: they differ by ${number(share, 2)} of their size${at}.`;
  if (!Number.isFinite(share)) return `cannot be compared: one is not finite${at}.`;
  const telling = Number.isFinite(ratio) && ratio && number(ratio, 3) !== "1";
  const more = telling ? `; in all, A has ${number(ratio, 3)} times the norm of B.` : ".";
  return `differ by ${number(share, 3)} of their size${at}${more}`;
}

/** @param {Gradients} a @param {Gradients} b @returns {Difference} */
export function difference(a, b) {
  if (JSON.stringify(a.of) !== JSON.stringify(b.of)) {
    return { text: "The two runs have different parameters.", share: null };
  }
  const both = Math.min(a.rows.length, b.rows.length);
  if (!both) return { text: "There is no gradient to compare.", share: null };
  const steps = a.rows.slice(0, both).map((row, step) => apart([row, b.rows[step]], step));
  const found = steps.reduce((widest, one) => (one.share > widest.share ? one : widest));
  const { share, step } = found;
  const odd = steps.find((one) => one.odd);
  const empty = steps.find((one) => one.odd && one.none);
  const what = a.exact ? "gradients" : "norms of the parameters’ gradients";
  let verdict = share ? unequal(found, atStep(step, both)) : equal(a.exact, Boolean(odd));
  if (share && empty) verdict = `cannot be compared: ${empty.none} has none${atStep(empty.step, both)}.`;
  const counts = a.steps === b.steps ? "" : ` A takes ${a.steps}, B ${b.steps}.`;
  return { text: `The ${what} at ${whichSteps(a, b, both)} ${verdict}${counts}`, share };
}
