/** What the steps of a run used, compared with those of the run behind it. */

/** @import { Plain } from "../../views/js/types.d.ts" */
/** @import { Gradients } from "./types.d.ts" */
/** @typedef {ReturnType<typeof apart>} Apart */

import { number } from "../../views/js/numbers.js";

/** Beyond this share of its size, a difference between two gradients is no rounding. */
const ROUNDING = 1e-5;

/**
 * How far apart two runs are at a step: the distance as a share of the larger gradient, one norm over the other, the
 * two numbers where each has a single one, and why the two cannot be compared, if so. Beside numbers, None counts as 0.
 * @param {Plain[]} a @param {Plain[]} b
 */
function apart(a, b) {
  const none = [a, b].findIndex((row) => row.every((x) => x === null));
  const [sizeA, sizeB] = [a, b].map((row) => Math.hypot(...row.map(Number)));
  const gap = Math.hypot(...a.map((x, i) => (x === b[i] ? 0 : Number(x) - Number(b[i]))));
  const share = gap && gap / Math.max(sizeA, sizeB);
  const same = JSON.stringify(a) === JSON.stringify(b);
  const infinite = Number.isFinite(share) ? "" : "one is not finite";
  const why = none < 0 ? infinite : `${["this run", "the outline"][none]} has none`;
  const pair = a.length === 1 ? [a, b].map(([x]) => number(Number(x), 3)) : [];
  return { share, ratio: sizeA / sizeB, pair, same, why: same ? "" : why };
}

/** @param {Gradients} a @param {Gradients} b */
export function difference(a, b) {
  const both = Math.min(a.rows.length, b.rows.length);
  if (JSON.stringify(a.of) !== JSON.stringify(b.of)) return "The runs have different parameters.";
  if (!both) return "No gradient to compare.";
  const steps = a.rows.slice(0, both).map((row, step) => apart(row, b.rows[step]));
  const lost = steps.findIndex(({ why }) => why);
  if (lost >= 0) return `The gradients at step ${lost + 1} cannot be compared: ${steps[lost].why}.`;
  const furthest = steps.reduce((most, one) => (one.share > most.share ? one : most));
  const what = a.exact ? "gradients" : "norms of the parameters’ gradients";
  const exact = a.exact && steps.every(({ same }) => same);
  const most = both > 1 ? `, most at step ${steps.indexOf(furthest) + 1}:` : "";
  const counts = a.steps === b.steps ? "" : ` This run takes ${a.steps} steps, the outline ${b.steps}.`;
  return `The ${what} at ${whichSteps(a, b, both)} ${told(furthest, most, exact)}${counts}`;
}

/** Which steps are compared. @param {Gradients} a @param {Gradients} b @param {number} both */
function whichSteps(a, b, both) {
  if (a.end || b.end) return "the end";
  const first = a.steps !== b.steps || both < a.steps ? "first " : "";
  return `the ${first}${both === 1 ? "step" : `${both} steps`}`;
}

/** `most` says at which of several steps. @param {Apart} furthest @param {string} most @param {boolean} exact */
function told({ share, ratio, pair: [here, there] }, most, exact) {
  if (!share) return `are equal${exact ? ", bit for bit" : ""}.`;
  if (share <= ROUNDING) return `are equal up to rounding (relative difference ${number(share, 2)}).`;
  if (here !== there) return `differ${most || ":"} ${here} here, ${there} in the outline.`;
  const times = number(ratio, 3);
  const norms = Number.isFinite(ratio) && ratio && times !== "1";
  const size = norms ? ` This run’s is ${times} times as large as the outline’s.` : "";
  return `differ${most} by ${number(100 * share, 3)} % of the larger one.${size}`;
}
