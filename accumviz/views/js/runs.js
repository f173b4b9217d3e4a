/** The runs of an explorer that were recorded beforehand, and how two of them are shown beside each other. */

/** @import { Choice, ExplorerData, Plain, Run, Runs, Whole } from "./types.d.ts" */

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
 * A run to the scale that it shares with the one beside it.
 * @param {Whole} run @param {Whole | undefined} other @returns {Whole}
 */
export function toOneScale({ data, bytes }, other) {
  const next = other?.data ?? data;
  const beside = new Map(next.p.map((row) => [row.n, row.r]));
  const p = data.p.map((row) => {
    return { ...row, r: around(row.r, beside.get(row.n) ?? row.r) };
  });
  const saved = [data, next].flatMap((one) => one.e.b ?? []).map(Number);
  const shares = data.shares && { ...data.shares, r: around(data.shares.r, (next.shares ?? data.shares).r) };
  const differs = other && differing(data, next);
  const sizes = [data, next].flatMap(({ graphs, layouts, of }) => Object.values(of).map((i) => layouts[graphs[i].l]));
  const largest = (/** @type {"w" | "h"} */ side) => Math.max(0, ...sizes.map((one) => one[side]));
  const room = other && { w: largest("w"), h: largest("h") };
  const length = Math.max(data.e.k.length, next.e.k.length);
  return { data: { ...data, p, differs, room, shares, length, most: Math.max(...saved) }, bytes };
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

/** The range that two ranges are in. @param {Plain[][]} both */
function around(...both) {
  const [lows, highs] = [0, 1].map((end) => both.map((range) => Number(range[end])));
  return [Math.min(...lows), Math.max(...highs)];
}

/** The event with which a run has done what it is for: its last step. @param {Whole} run */
export function endOf(run) {
  const kinds = kindsOf(run);
  return Math.max(kinds.lastIndexOf("step"), 0) || kinds.length - 1;
}
