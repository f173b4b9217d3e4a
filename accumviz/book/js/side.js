/** One side of an explorer: its controls, and the player of the run that they choose. */

/** @import { At, Choice, Dispose, Model, Whole } from "../../views/js/types.d.ts" */
/** @import { Leader } from "../../views/js/player.js" */
/** @import { Control, Run } from "./types.d.ts" */

import { choiceOf } from "./choices.js";
import { group, h } from "../../views/js/dom.js";
import { still } from "../../views/js/page.js";
import { render } from "../../views/js/player.js";
import { endOf } from "./runs.js";

/** A player's moment, and the end of the run that it was a moment of. @typedef {At & {end?: number}} Kept */

/**
 * @typedef {object} Setting
 * @property {Control[]} controls
 * @property {string} uid
 * @property {import("./types.d.ts").Runs["other"]} other  makes the field for a value that was not recorded
 * @property {(i: number, place: number | string) => void} choose
 * @property {() => string} link
 * @property {() => Leader | null} leader  what moves this player together with another one
 * @property {(whole: Whole, other: Whole | undefined) => Whole} dress  a run as it is shown beside others
 * @property {boolean} begins  whether its player begins before the first event, instead of at the end
 * @property {() => void} moved  called when this player stands elsewhere
 */

/** @param {"a" | "b"} name @param {Setting} setting */
export function sideOf(name, { controls, uid, other, choose, link, leader, dress, moved, begins }) {
  const offered = controls.map((control, i) =>
    choiceOf(control, { key: `${uid}-${name}-${i}`, other, choose: (place) => choose(i, place) }));
  const panel = h("div.av-xside", group(`Run ${name.toUpperCase()}`), ...offered.map(({ el }) => el));
  const slot = h("div.accumviz.av-player");
  /** @type {Run | null | undefined} */
  let shown;
  /** @type {Run | null | undefined} */
  let beside;
  /** @type {Model | undefined} */
  let player;
  /** @type {Dispose | undefined} */
  let dispose;
  /** @type {Kept | undefined} */
  let kept;
  let [end, wide] = [0, 0];

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
    const at = { ...kept, e: where(whole) };
    const mine = still({ data: whole, id: "", link: link(), at, leader: leader() });
    const box = h("div"); // a player that comes late finds its own box gone
    end = endOf(whole);
    player = mine;
    mine.on("change:at", moved);
    slot.append(box);
    render({ model: mine, el: box }).then((done) => {
      if (mine === player) dispose = done;
      else done();
    });
  }
  /** @param {Run} run @param {Run | null | undefined} other */
  function show(run, other) {
    if (player) kept = { ...player.get("at"), node: -1, end };
    stop();
    // What comes is no less tall than what goes, so that nothing below it jumps; in another width it is another thing.
    const same = slot.offsetWidth === wide;
    wide = slot.offsetWidth;
    slot.style.minHeight = same ? `${slot.offsetHeight}px` : "";
    slot.replaceChildren();
    if (run.whole) play(dress(run.whole, other?.whole));
    else slot.append(h(run.error ? "p.av-raised" : "p.av-note", { role: "status" }, run.error ?? run.waits ?? ""));
  }
  return {
    panel,
    slot,
    /** Where the player stands, if there is one. */
    at: () => player?.get("at").e,
    /** @param {number} e */
    seek(e) {
      if (!player || player.get("at").e === e) return;
      player.set("at", { ...player.get("at"), e, n: null, node: -1 });
    },
    /** Where the player is to stand, for a permalink that leads here. @param {At} at */
    place(at) {
      stop();
      kept = at;
      shown = undefined;
    },
    /** @param {Choice | null} choice @param {Run | null} run @param {Run | null | undefined} other */
    draw(choice, run, other) {
      panel.hidden = slot.hidden = !choice;
      if (!choice || !run) return;
      offered.forEach((one, i) => one.draw(choice[i]));
      player?.set("link", link());
      if (run === shown && other === beside) return;
      [shown, beside] = [run, other];
      show(run, other);
    },
  };
}
