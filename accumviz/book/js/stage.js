/** Where the run of an explorer is shown: its player, which keeps its moment and its panes from run to run. */

/** @import { At, Dispose, Model, Whole } from "../../views/js/types.d.ts" */
/** @import { Pane } from "../../views/js/player.js" */
/** @import { Run } from "./types.d.ts" */

import { h } from "../../views/js/dom.js";
import { still } from "../../views/js/page.js";
import { render } from "../../views/js/player.js";
import { before, endOf } from "./runs.js";

/** A player's moment, and the end of the run that it was a moment of. @typedef {At & {end?: number}} Kept */

/**
 * @typedef {object} Setting
 * @property {boolean} begins  whether its player begins before the first event, instead of at the end
 * @property {Pane[]} also  panes that every run has
 * @property {() => string} link
 */

/** @param {Setting} setting */
export function stageOf({ begins, also, link }) {
  const slot = h("div.accumviz.av-player");
  const panes = {};
  /** @type {Run | undefined} */
  let shown;
  /** @type {Run | null | undefined} */
  let behind;
  /** @type {Model | undefined} */
  let player;
  /** @type {Dispose | undefined} */
  let dispose;
  /** @type {Kept | undefined} */
  let kept;
  let end = 0;

  function stop() {
    dispose?.();
    dispose = player = undefined;
  }
  /** A reader who watches the end of one run wants the end of the next; else the same event. @param {Whole} whole */
  function where(whole) {
    if (!kept && begins) return -1;
    if (!kept || kept.e === kept.end) return endOf(whole);
    return Math.min(kept.e, whole.data.e.k.length - 1);
  }
  /** @param {Whole} whole */
  function play(whole) {
    const mine = still({ data: whole, id: "", link: link(), at: { ...kept, e: where(whole) }, panes, also });
    const box = h("div"); // a player that comes late finds its own box gone
    end = endOf(whole);
    player = mine;
    slot.append(box);
    render({ model: mine, el: box }).then((done) => {
      if (mine === player) dispose = done;
      else done();
    });
  }
  /** @param {Run} run @param {Run | null} other */
  function show(run, other) {
    if (player) kept = { ...player.get("at"), node: -1, end };
    stop();
    // What comes is no less tall than what goes until it is drawn, so that nothing below it jumps.
    slot.style.minHeight = `${slot.offsetHeight}px`;
    requestAnimationFrame(() => requestAnimationFrame(() => { slot.style.minHeight = ""; }));
    slot.replaceChildren();
    if (run.whole) play(before(run.whole, other?.whole));
    else slot.append(h(run.error ? "p.av-raised" : "p.av-note", { role: "status" }, run.error ?? run.waits ?? ""));
  }
  return {
    slot,
    /** Where the player is to stand, for a permalink that leads here. @param {At} at */
    place(at) {
      stop();
      kept = at;
      shown = undefined;
    },
    /** @param {Run} run @param {Run | null} other */
    draw(run, other) {
      player?.set("link", link());
      if (run === shown && other === behind) return;
      [shown, behind] = [run, other];
      show(run, other);
    },
  };
}
