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

/** Which steps are compared, and how many. @param {Gradients} a @param {Gradients} b @param {number} both */
function whichSteps(a, b, both) {
  if (a.end || b.end) return "the end";
  const first = a.steps !== b.steps || both < a.steps ? "the first " : "";
  if (both === 1) return `${first || "the "}step`;
  return `${first}${both} steps`;
}

/** All of some steps: both of two. @param {string} which */
const all = (which) => (which === "2 steps" ? "both steps" : which.replace(/^(?=\d)/, "all "));

/** @param {boolean} exact @param {boolean} odd */
function equal(exact, odd) {
  if (odd) return "differ only in that one is None where the other is 0.";
  return `are equal${exact ? ", bit for bit" : ""}.`;
}

/** @param {number} ratio @param {string} where */
function timesNorm(ratio, where) {
  const telling = Number.isFinite(ratio) && ratio && number(ratio, 3) !== "1";
  return telling ? `; ${where}A has ${number(ratio, 3)} times the norm of B.` : ".";
}

/** @param {number} x @param {number} y */
const isNear = (x, y) => Math.abs(x / y - 1) < 0.005;

/**
 * What differs, and the share by which it does where that is known: of several steps that differ one is told of.
 * @param {Apart[]} steps @param {Apart} widest @param {string} what @param {string} which
 */
function unequal(steps, widest, what, which) {
  const { share, ratio } = widest;
  const empty = steps.find((one) => one.odd && one.none);
  const several = !steps.every((one) => isNear(one.share, share) && isNear(one.ratio, ratio));
  const some = empty ? !steps.every((one) => one.odd && one.none) : several;
  const told = steps.length > 1 && some ? `Of ${which}, step ` : "";
  const these = `The ${what} at ${all(which)}`;
  if (empty || !Number.isFinite(share)) {
    const why = empty ? `${empty.none} has none` : "one is not finite";
    const text = `${told ? told + ((empty ?? widest).step + 1) : these} cannot be compared: ${why}.`;
    return { text, share: null };
  }
  const those = told ? `${told}${widest.step + 1} differs most: its ${what}` : `${these} differ`;
  return { text: `${those} by ${number(share, 3)} of their size${timesNorm(ratio, told && "there, ")}`, share };
}

/** @param {Gradients} a @param {Gradients} b @returns {Difference} */
export function difference(a, b) {
  if (JSON.stringify(a.of) !== JSON.stringify(b.of)) {
    return { text: "The runs have different parameters.", share: null };
  }
  const both = Math.min(a.rows.length, b.rows.length);
  if (!both) return { text: "No gradient to compare.", share: null };
  const steps = a.rows.slice(0, both).map((row, step) => apart([row, b.rows[step]], step));
  const widest = steps.reduce((found, one) => (one.share > found.share ? one : found));
  const { share } = widest;
  const what = a.exact ? "gradients" : "norms of the parameters’ gradients";
  const which = whichSteps(a, b, both);
  const counts = a.steps === b.steps ? "" : ` A takes ${a.steps}, B ${b.steps}.`;
  if (share > ROUNDING) {
    const told = unequal(steps, widest, what, which);
    return { ...told, text: `${told.text}${counts}` };
  }
  const odd = steps.some((one) => one.odd);
  const most = both > 1 ? "at most " : "";
  const near = `are equal to rounding: they differ by ${most}${number(share, 2)} of their size.`;
  return { text: `The ${what} at ${all(which)} ${share ? near : equal(a.exact, odd)}${counts}`, share };
}
