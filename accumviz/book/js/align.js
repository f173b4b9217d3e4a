/** Two runs under one scrubber: which event of one stands beside which event of the other. */

/** @import { Data } from "../../views/js/types.d.ts" */

import { textOf } from "../../views/js/code.js";

/** The events of a run, up to each step and after the last one. @param {string[]} kinds */
function windows(kinds) {
  /** @type {number[][]} */
  const found = [[]];
  kinds.forEach((kind, e) => {
    found[found.length - 1].push(e);
    if (kind === "step") found.push([]);
  });
  return found;
}

/**
 * Where a run stands at the k-th of so many moments of a window: its end waits for the other's.
 * @param {number[]} events @param {number} k @param {number} most @param {number} was
 */
function standing(events, k, most, was) {
  if (k === most - 1) return events.at(-1) ?? was;
  return events[Math.min(k, events.length - 2)] ?? was;
}

/**
 * The moments of two runs, in which their steps coincide: pairs of events, -1 before the first.
 * @param {string[]} a @param {string[]} b @param {number} first @returns {[number, number][]}
 */
export function aligned(a, b, first = -1) {
  const [left, right] = [windows(a), windows(b)];
  /** @type {[number, number][]} */
  const pairs = first < 0 ? [[-1, -1]] : [];
  let [i, j] = [Math.min(0, first), Math.min(0, first)];
  for (let w = 0; w < Math.max(left.length, right.length); w++) {
    const [mine, other] = [left[w] ?? [], right[w] ?? []];
    const most = Math.max(mine.length, other.length);
    for (let k = 0; k < most; k++) {
      [i, j] = [standing(mine, k, most, i), standing(other, k, most, j)];
      pairs.push([i, j]);
    }
  }
  return pairs;
}

/** The moment that is nearest to where two runs stand. @param {[number, number][]} pairs @param {number[]} at */
export function nearest(pairs, [a, b]) {
  const far = pairs.map(([i, j]) => Math.abs(i - a) + Math.abs(j - b));
  return far.indexOf(Math.min(...far));
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
