/** Playing by itself: of few events each node, of many several events at a time. */

/** @import { At } from "./types.d.ts" */

import { clamp } from "./numbers.js";

/** Up to so many events each is dwelt on; of more, all of them take about a minute. */
const FEW = 60;
const STEPS = 1500;
const STEPS_OF_NODES = 24;
/** How long an event stays, and all nodes of a forward and of a backward, with the longest for one: milliseconds. */
const [EVENT, FORWARD, BACKWARD] = [950, [1000, 170], [2600, 430]];

/**
 * @typedef {object} Tape  what can be played
 * @property {number} length
 * @property {number} first  -1 where there is a moment before the first event
 * @property {() => Pick<At, "e" | "n">} at
 * @property {(change: Partial<At>) => void} go
 * @property {(e: number) => number} nodes  how many nodes run at an event; 0: no graph runs
 */

/** The next moment and how long it stays; null at the end. @param {Tape} tape @param {ReturnType<Tape["at"]>} at */
export function nextMoment({ length, nodes }, { e, n }) {
  const slow = length <= FEW;
  const total = slow ? nodes(e) : 0;
  if (n !== null && total) {
    const ran = n + Math.ceil(total / STEPS_OF_NODES);
    return { n: ran >= total ? null : ran };
  }
  if (e >= length - 1) return null;
  const next = Math.min(e + (slow ? 1 : Math.ceil(length / STEPS)), length - 1);
  return enter(next, slow ? nodes(next) : 0);
}

/** An event is entered with no node built. @param {number} e @param {number} total */
const enter = (e, total) => ({ e, n: total ? -total : null });

/** @param {Tape} tape @param {(on: boolean) => void} show */
export function playing(tape, show) {
  const { length, first, at, go, nodes } = tape;
  const slow = length <= FEW;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;

  function pause() {
    clearTimeout(timer);
    timer = undefined;
    show(false);
  }
  function dwell() {
    if (!slow) return 40;
    const { e, n } = at();
    if (n === null) return EVENT;
    const [all, one] = n < 0 ? FORWARD : BACKWARD;
    return clamp(all / nodes(e), 40, one);
  }
  function step() {
    const next = nextMoment(tape, at());
    if (!next) return pause();
    go(next);
    timer = setTimeout(step, dwell());
  }
  function play() {
    if (at().e >= length - 1) go(first < 0 ? { e: first } : enter(0, slow ? nodes(0) : 0));
    timer = setTimeout(step, slow ? 500 : 40);
    show(true);
  }
  return { pause, toggle: () => (timer === undefined ? play() : pause()) };
}
