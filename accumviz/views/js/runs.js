/** The runs of an explorer that were recorded beforehand, and how two of them are shown beside each other. */

/** @import { Choice, ExplorerData, Run, Runs, Whole } from "./types.d.ts" */

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
  const beside = new Map(other?.data.p.map((row) => [row.n, row.r]));
  const p = data.p.map((row) => {
    const [[low, high], [under, over]] = [row.r, beside.get(row.n) ?? row.r].map((range) => range.map(Number));
    return { ...row, r: [Math.min(low, under), Math.max(high, over)] };
  });
  const saved = [data, other?.data].flatMap((one) => one?.e.b ?? []).map((count) => Number(count) || 0);
  const shares = data.shares && { ...data.shares, r: reachOf([data.shares, other?.data.shares ?? data.shares]) };
  const differs = other && differing(data, other.data);
  return { data: { ...data, p, differs, most: Math.max(1, ...saved), ...(shares ? { shares } : {}) }, bytes };
}

/**
 * A run with the ways of the weights of all that are compared: its own is the one of that name.
 * @param {Whole} run @param {string} name @param {[string, Run | null | undefined][]} all @returns {Whole}
 */
export function withWays({ data, bytes }, name, all) {
  const ways = all.flatMap(([one, run], hue) => {
    const p = run?.whole?.data.weights?.p;
    return p ? [{ name: one, hue, p }] : [];
  });
  const beside = ways.filter((way) => way.name !== name);
  const hue = Math.max(all.findIndex(([one]) => one === name), 0);
  return { data: data.weights ? { ...data, weights: { ...data.weights, name, hue, beside } } : data, bytes };
}

/** What the events of a run are. @param {Whole} run */
export const kindsOf = ({ data }) => data.e.k.map((kind) => data.kinds[kind][0]);

/** @param {import("./types.d.ts").SharesData[]} both */
const reachOf = (both) => [Math.min(...both.map(({ r }) => r[0])), Math.max(...both.map(({ r }) => r[1]))];

/** The event with which a run has done what it is for: its last step. @param {Whole} run */
export function endOf({ data }) {
  const step = data.kinds.findIndex(([kind]) => kind === "step");
  return Math.max(data.e.k.lastIndexOf(step), 0) || data.e.k.length - 1;
}
