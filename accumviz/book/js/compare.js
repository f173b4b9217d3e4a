/** What the steps of two runs used, compared. */

/** @import { Plain } from "../../views/js/types.d.ts" */
/** @import { Gradients } from "./types.d.ts" */

import { number } from "../../views/js/numbers.js";

/** Beyond this share of its size, a difference between two gradients is no rounding. */
export const ROUNDING = 1e-5;

/** @typedef {{text: string, share: number | null}} Difference */

/**
 * How far apart two runs are at a step: the distance as a share of the larger gradient, A's norm over B's, and why the
 * two cannot be compared, if so. Beside numbers, None counts as 0.
 * @param {Plain[]} a @param {Plain[]} b
 */
function apart(a, b) {
  const none = "AB"[[a, b].findIndex((row) => row.every((x) => x === null))];
  const [sizeA, sizeB] = [a, b].map((row) => Math.hypot(...row.map(Number)));
  const gap = Math.hypot(...a.map((x, i) => (x === b[i] ? 0 : Number(x) - Number(b[i]))));
  const share = gap && gap / Math.max(sizeA, sizeB);
  const same = JSON.stringify(a) === JSON.stringify(b);
  const why = none ? `${none} has none` : Number.isFinite(share) ? "" : "one is not finite";
  return { share, ratio: sizeA / sizeB, same, why: same ? "" : why };
}

/** @param {Gradients} a @param {Gradients} b @returns {Difference} */
export function difference(a, b) {
  const both = Math.min(a.rows.length, b.rows.length);
  if (JSON.stringify(a.of) !== JSON.stringify(b.of)) return unknown("The runs have different parameters.");
  if (!both) return unknown("No gradient to compare.");
  const steps = a.rows.slice(0, both).map((row, step) => apart(row, b.rows[step]));
  const lost = steps.findIndex(({ why }) => why);
  if (lost >= 0) return unknown(`The gradients at step ${lost + 1} cannot be compared: ${steps[lost].why}.`);
  const share = Math.max(...steps.map((one) => one.share));
  const { ratio } = steps.find((one) => one.share === share) ?? steps[0];
  const what = a.exact ? "gradients" : "norms of the parameters’ gradients";
  const exact = a.exact && steps.every(({ same }) => same);
  const counts = a.steps === b.steps ? "" : ` A takes ${a.steps} steps, B ${b.steps}.`;
  return { text: `The ${what} at ${whichSteps(a, b, both)} ${told(share, ratio, both > 1, exact)}${counts}`, share };
}

/** @param {string} text @returns {Difference} */
const unknown = (text) => ({ text, share: null });

/** Which steps are compared. @param {Gradients} a @param {Gradients} b @param {number} both */
function whichSteps(a, b, both) {
  if (a.end || b.end) return "the end";
  const first = a.steps !== b.steps || both < a.steps ? "first " : "";
  return `the ${first}${both === 1 ? "step" : `${both} steps`}`;
}

/** @param {number} share @param {number} ratio @param {boolean} several @param {boolean} exact */
function told(share, ratio, several, exact) {
  if (!share) return `are equal${exact ? ", bit for bit" : ""}.`;
  const by = `by ${several ? "at most " : ""}${number(share, share > ROUNDING ? 3 : 2)} of their size`;
  if (share <= ROUNDING) return `are equal to rounding: they differ ${by}.`;
  const times = number(ratio, 3);
  const norms = Number.isFinite(ratio) && ratio && times !== "1";
  return `differ ${by}${norms ? `; ${several ? "there, " : ""}A has ${times} times the norm of B` : ""}.`;
}
