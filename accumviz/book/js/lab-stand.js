/** What one arrangement shows: its code, its moments, shares and weights, under one scrubber. */

/** @import { App } from "../../views/js/player.js" */
/** @import { LabRun, Offer } from "./lab-types.d.ts" */
/** @import { At } from "../../views/js/types.d.ts" */

import { controls } from "../../views/js/controls.js";
import { h } from "../../views/js/dom.js";
import { keys } from "../../views/js/keys.js";
import { movingPane } from "./lab-code.js";
import { Ledger } from "../../views/js/ledger.js";
import { lighting } from "../../views/js/light.js";
import { clamp } from "../../views/js/numbers.js";
import { playing } from "../../views/js/playing.js";
import { sharesPane } from "../../views/js/shares.js";
import { timePane } from "../../views/js/timeline.js";
import { weightsPane } from "../../views/js/weights.js";
import { sentence } from "../../views/js/words.js";

/**
 * @typedef {object} Ground  where it stands, and what it leads to
 * @property {string} uid
 * @property {Offer[]} offers
 * @property {(role: string, value: string, top?: number) => void} put
 * @property {Record<"code" | "tape" | "panes", HTMLElement>} slots
 * @property {HTMLElement} again  leads back to the start
 * @property {number | null} e  the moment to show; null: the one that there is something to see at
 * @property {(e: number) => string} link
 */

/**
 * A moment, and how it is left for another.
 * @param {number} first @param {number} last @param {number} e @param {() => void} show
 */
function momentOf(first, last, e, show) {
  /** @type {At} */
  let at = { e: clamp(e, first, last), n: null, p: -1, node: -1 };
  /** @param {Partial<At>} change */
  function go(change) {
    at = { ...at, ...change, n: null, node: -1 };
    at.e = clamp(Math.trunc(at.e) || 0, first, last);
    show();
  }
  return { at: () => at, go };
}

/** Where the first finding points, or a healthy loop steps first. @param {Ledger} ledger @param {LabRun} run */
const toBeSeen = ({ kinds }, { report }) => report.findings[0]?.event ?? kinds.indexOf("step");

/**
 * The codes of runs that are not shown, for the room that they take.
 * @param {LabRun[]} runs @param {Pick<Ground, "uid" | "offers" | "put">} ground
 */
export const roomOf = (runs, ground) => h("div.av-room", {}, ...runs.map((run) => {
  const slots = { code: h("div"), tape: h("div"), panes: h("div") };
  stand(run, { ...ground, slots, again: h("button.av-restart", {}, "Back to the start"), e: null, link: String });
  return slots.code;
}));

/** @param {LabRun} run @param {Ground} ground */
export function stand(run, { uid, offers, put, slots, again, e, link }) {
  const data = { ...run, layouts: [], graphs: [], of: {}, missing: "" };
  const ledger = new Ledger(data);
  const { length } = ledger;
  const first = data.weights ? -1 : 0; // what moves is seen from before it has moved
  const { at, go } = momentOf(first, Math.max(length - 1, 0), e ?? toBeSeen(ledger, run), show);
  /** @type {App} */
  const app = { ledger, data, uid, at, go, first, graph: null };
  const code = movingPane(app, { offers, rows: run.rows, put });
  const time = timePane(app);
  const shares = data.shares ? sharesPane(app, data.shares) : null;
  const weights = data.weights ? weightsPane(app, data.weights) : null;
  const reel = playing({ length, first, at, go, nodes: () => 0 }, (on) => top.showPlaying(on));
  /** @param {number} place */
  function by(place) {
    reel.pause();
    go({ e: place });
  }
  const move = (/** @type {number} */ steps) => by(at().e + steps);
  const top = controls({ ledger, first, move, toggle: reel.toggle, scrub: by });
  const moments = h("div.av-moments", {}, top.bar, top.say);
  keys(moments, length, { move, run() {}, moment: () => undefined, play: top.play });
  const panes = [code, time, shares, weights].filter((pane) => pane !== null);
  app.light = lighting(panes);
  weights?.draw(at()); // it moves from where it is seen first
  code.head.append(again);
  slots.code.replaceChildren(code.el);
  slots.tape.replaceChildren(moments);
  slots.panes.replaceChildren(...panes.slice(1).map(({ el }) => el));

  function show() {
    const state = at();
    for (const one of panes) one.draw(state);
    top.draw(state, sentence(ledger, state.e, state.p), link(state.e < 0 ? -1 : ledger.index(state.e)));
  }
  function paint() {
    time.paint();
    show();
  }
  if (slots.code.isConnected) paint();
  return { go, paint, stop: reel.pause, focus: code.focus };
}
