/** The runs of an explorer that were recorded beforehand, and how two of them are shown beside each other. */

/** @import { Choice, Whole } from "../../views/js/types.d.ts" */
/** @import { ExplorerData, Run, Runs } from "./types.d.ts" */

import { differing } from "./align.js";

/** @param {ExplorerData} data @param {Uint8Array} [bytes] @returns {Runs} */
export function runsOf({ controls, grid, runs, parts }, bytes) {
  /** A run and its parts, which runs have in common, as the player reads them. @param {Run} run */
  function put(run) {
    if (!run.data || run.whole) return run;
    const together = Object.entries(run.data).map(([name, part]) => [name, parts[part]]);
    run.whole = { data: Object.fromEntries(together), bytes: run.bytes && bytes?.subarray(...run.bytes) };
    return run;
  }
  /** @param {Choice} choice */
  function at(choice) {
    let index = 0;
    controls.forEach(({ labels }, i) => { index = index * labels.length + Number(choice[i]); });
    return put(runs[grid[index]]);
  }
  return { at };
}

/**
 * A run with what tells it from the one beside it, and the room that the two need.
 * @param {Whole} run @param {Whole} other @returns {Whole}
 */
export function besides({ data, bytes }, { data: other }) {
  const sizes = [data, other].flatMap(({ graphs, layouts, of }) => Object.values(of).map((i) => layouts[graphs[i].l]));
  const largest = (/** @type {"w" | "h"} */ side) => Math.max(0, ...sizes.map((one) => one[side]));
  const room = { w: largest("w"), h: largest("h") };
  const length = Math.max(data.e.k.length, other.e.k.length);
  return { data: { ...data, differs: differing(data, other), room, length }, bytes };
}

/** A run has the same colour in its own picture and beside others. */
const COLORS = ["var(--av-accent)", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const colorOf = (/** @type {number} */ hue) => COLORS[hue % COLORS.length];

/**
 * A run with the ways of the weights of all that are compared, among which it has a place.
 * @param {Whole} run @param {number} hue @param {[string, Whole | undefined][]} all @returns {Whole}
 */
export function withWays({ data, bytes }, hue, all) {
  const beside = all.flatMap(([name, whole], i) => {
    const p = whole?.data.weights?.p;
    return p && i !== hue ? [{ name: `${name} after as many steps`, color: colorOf(i), p }] : [];
  });
  const mine = { name: all[hue][0], color: colorOf(hue), beside };
  return { data: data.weights ? { ...data, weights: { ...data.weights, ...mine } } : data, bytes };
}

/** What the events of a run are. @param {Whole} run */
export const kindsOf = ({ data }) => data.e.k.map((kind) => data.kinds[kind][0]);

/** The event with which a run has done what it is for: its last step. @param {Whole} run */
export function endOf(run) {
  const kinds = kindsOf(run);
  return Math.max(kinds.lastIndexOf("step"), 0) || kinds.length - 1;
}
