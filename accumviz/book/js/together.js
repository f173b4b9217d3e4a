/** One scrubber for two runs: their moments side by side, and panes of one height. */

/** @import { sideOf } from "./side.js" */
/** @import { Run } from "./types.d.ts" */

import { aligned, nearest } from "./align.js";
import { transport } from "../../views/js/controls.js";
import { h, range, slide } from "../../views/js/dom.js";
import { clamp } from "../../views/js/numbers.js";
import { playing } from "../../views/js/playing.js";
import { kindsOf } from "./runs.js";

/** @typedef {ReturnType<typeof sideOf>} Side */

/** @param {() => {a: Side, b: Side}} sides @param {(side: string, e: number) => string} address */
export function together(sides, address) {
  /** @type {[number, number][]} */
  let pairs = [];
  let [place, busy] = [0, false];
  const slider = range("moment of both runs", () => by(Number(slider.value)), "av-scrub");
  const count = h("span.av-count");
  const move = (/** @type {number} */ steps) => by(place + steps);
  const { play, link, ...top } = transport("moment", slider, count, { move, toggle: () => tape.toggle() });
  const bar = h("div.av-both", {}, top.bar);
  const tape = playing({
    get length() { return pairs.length; }, first: 0, nodes: () => 0,
    at: () => ({ e: place, n: null }), go: ({ e }) => seek(e ?? place),
  }, top.showPlaying);

  /** @param {number} to */
  function by(to) {
    tape.pause();
    seek(to);
  }
  /** @param {number} to */
  function seek(to) {
    if (!pairs.length) return;
    place = clamp(to, 0, pairs.length - 1);
    busy = true;
    const { a, b } = sides();
    a.seek(pairs[place][0]);
    b.seek(pairs[place][1]);
    busy = false;
    const told = pairs[place].map((e, i) => `${"AB"[i]}: ${e < 0 ? "start" : `event ${e}`}`).join(", ");
    slide(slider, place, pairs.length - 1, told);
    count.textContent = pairs[place].map((e, i) => `${"AB"[i]} ${e < 0 ? "start" : e}`).join(" · ");
    // The side with more events stands elsewhere at each moment.
    const [last, other] = pairs[pairs.length - 1];
    const longer = Number(other > last);
    link.href = address("ab"[longer], pairs[place][longer]);
  }
  const standing = () => [sides().a.at() ?? 0, sides().b.at() ?? 0];
  /** One of the players was moved by itself: the other one goes along. */
  function follow() {
    if (busy || !pairs.length) return;
    tape.pause();
    const at = standing();
    const mine = pairs[place].findIndex((e, i) => e !== at[i]);
    if (mine >= 0) find(mine, at[mine]);
  }
  /** The first moment at which one of the two stands at an event. @param {number} side @param {number} e */
  function find(side, e) {
    const there = pairs.findIndex((pair) => pair[side] === e);
    if (there >= 0) seek(there);
  }
  /** @param {Run | null | undefined} run @param {Run | null | undefined} beside */
  function draw(run, beside) {
    const [one, other] = [run?.whole, beside?.whole];
    bar.hidden = !one || !other;
    if (!one || !other) {
      pairs = [];
      return tape.pause();
    }
    const first = [one, other].some(({ data }) => data.graphs.length || data.weights) ? -1 : 0;
    pairs = aligned(kindsOf(one), kindsOf(other), first);
    seek(nearest(pairs, standing()));
  }
  return { bar, leader: { move, play }, draw, follow, find };
}

/**
 * Panes of the same name become as tall as the taller one, and stay so while their width does.
 * @param {HTMLElement} slots
 */
export function leveling(slots) {
  /** Of each pane at each width. @type {Map<string, number>} */
  const tallest = new Map();
  return (/** @type {number} */ width) => {
    if (slots.clientWidth !== width) return; // what stands there is not drawn yet
    const panes = [...slots.querySelectorAll(".av-pane")].map((el) => /** @type {HTMLElement} */ (el));
    const [one, other] = [...slots.children].map((el) => el.getBoundingClientRect().left);
    if (one === other) { // below each other, nothing has to be level
      panes.forEach((el) => { el.style.minHeight = ""; });
      return;
    }
    const most = (/** @type {Element} */ { classList: [, name] }, least = 0) => {
      const found = Math.max(tallest.get(name + width) ?? 0, least);
      tallest.set(name + width, found);
      return found;
    };
    const level = (/** @type {HTMLElement} */ el) => { el.style.minHeight = `${most(el)}px`; };
    panes.forEach(level);
    for (const el of panes) most(el, el.getBoundingClientRect().height); // to the part of a pixel
    panes.forEach(level);
  };
}
