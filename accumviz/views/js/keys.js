/** The player's keys: events and, with Shift, nodes. */

/** @import { Moment } from "./moment.js" */

import { own } from "./dom.js";
import { clamp } from "./numbers.js";

/**
 * @typedef {object} Reached  what keys lead to
 * @property {(by: number) => void} move
 * @property {(n: number | null) => void} run  of a graph that does not run now: null
 * @property {() => Moment | undefined} moment
 * @property {HTMLElement} play
 */

/** @param {HTMLElement} frame @param {number} length @param {Reached} reached */
export function keys(frame, length, { move, run, moment, play }) {
  /** @type {Record<string, number>} */
  const ways = { ArrowRight: 1, ArrowLeft: -1, Home: -length - 1, End: length };

  /** Whether the key was ours. @param {KeyboardEvent} event @param {Element} target */
  function press({ key, shiftKey }, target) {
    const by = ways[key];
    const now = by && shiftKey ? moment() : undefined;
    if (now) {
      run(now.now ? clamp(now.pos + by, -now.total, now.total) : null);
      return true;
    }
    if (by && !target.matches("input[type=range]")) {
      move(by);
      return true;
    }
    const plays = key === " " && length && !target.matches("button, a");
    if (plays) play.click();
    return plays;
  }
  frame.addEventListener("keydown", (event) => {
    const target = /** @type {Element} */ (event.target);
    if (target.matches("[type=search]") || event.altKey || event.ctrlKey || event.metaKey) return;
    if (press(event, target)) own(event);
  });
}
