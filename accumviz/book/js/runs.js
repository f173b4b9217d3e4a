/** The runs of an explorer that were recorded beforehand, and how one is shown before another. */

/** @import { Choice, Data, Whole } from "../../views/js/types.d.ts" */
/** @import { ExplorerData, Run, Runs } from "./types.d.ts" */

import { textOf } from "../../views/js/code.js";
import { together } from "../../views/js/packed.js";

/** @param {ExplorerData} data @returns {Runs} */
export function runsOf({ controls, grid, runs, parts }) {
  /** A run and its parts, which runs have in common, as the player reads them. @param {Run} run */
  function put(run) {
    if (run.data) run.whole ??= { data: together(parts, run.data) };
    return run;
  }
  /** @param {Choice} choice */
  function at(choice) {
    let index = 0;
    controls.forEach(({ labels }, i) => { index = index * labels.length + Number(choice[i]); });
    return put(runs[grid[index]]);
  }
  /** The choices of a place in the grid, the last of which changes first. @param {number} place @returns {Choice} */
  const choicesAt = (place) => controls.map((_, i) => {
    const later = controls.slice(i + 1).reduce((times, { labels }) => times * labels.length, 1);
    return Math.floor(place / later) % controls[i].labels.length;
  });
  /** The nearest right run: the one that is fewest choices away. @param {Choice} from */
  function right(from) {
    const all = grid.flatMap((run, place) => (runs[run].right ? [choicesAt(place)] : []));
    const far = (/** @type {Choice} */ one) => one.filter((place, i) => place !== from[i]).length;
    return all.sort((one, other) => far(one) - far(other))[0] ?? null;
  }
  return { at, right };
}

/**
 * Each line of code and how often it stood above, and whether anything happened on it.
 * @param {Data} data @returns {[string, boolean][]}
 */
function linesOf({ code, e }) {
  const ran = new Set(e.c);
  /** @type {Map<string, number>} */
  const above = new Map();
  return code.flatMap(({ lines }) => lines).map(([, ...pieces], i) => {
    const text = textOf(pieces).trim();
    above.set(text, (above.get(text) ?? 0) + 1);
    return [text && `${text} ${above.get(text)}`, ran.has(i)];
  });
}

/**
 * How lines differ from those of another run, by their places.
 * @param {Data} data @param {Data} other @returns {Record<number, string>}
 */
export function differing(data, other) {
  const there = new Map(linesOf(other));
  const how = linesOf(data).map(([line, ran]) => {
    if (line && !there.has(line)) return "not in the other run";
    return !line || there.get(line) === ran ? "" : "runs in one of the two only";
  });
  return Object.fromEntries(Object.entries(how).filter(([, told]) => told));
}

/** A run as it is shown before another one. @param {Whole} run @param {Whole} [ghost] @returns {Whole} */
export function before(run, ghost) {
  if (!ghost) return run;
  const [{ data }, { p }] = [run, ghost.data.weights ?? {}];
  const beside = p ? [{ name: "the outline, after as many steps", color: "var(--av-right)", p }] : [];
  const weights = data.weights && { ...data.weights, beside };
  return { data: { ...data, ghost, weights, differs: differing(data, ghost.data) } };
}

/** The event with which a run has done what it is for: its last step. @param {Whole} run */
export function endOf({ data }) {
  const kinds = data.e.k.map((kind) => data.kinds[kind][0]);
  return Math.max(kinds.lastIndexOf("step"), 0) || kinds.length - 1;
}
