/** The lab: a loop whose lines are moved, and what follows from it, side by side. */

/** @import { LabData, LabRun, Offer } from "./lab-types.d.ts" */
/** @import { Dispose, Host } from "../../views/js/types.d.ts" */

import { arrive, group, h, put } from "../../views/js/dom.js";
import { choiceIn, linkOf } from "./lab-address.js";
import { choiceOf } from "./lab-choices.js";
import { reportPane } from "../../views/js/report.js";
import { arrangementsOf, changesOf } from "./lab-runs.js";
import { roomOf, stand } from "./lab-stand.js";
import { read } from "../../views/js/packed.js";
import { isBright } from "../../views/js/pen.js";
import { watchLooks } from "../../views/js/player.js";

/** Whether a choice stands beside the code: not what moves a line. */
const isAsked = (/** @type {Offer} */ { line }) => !line;

/** What stands below the loop, one at a time; on a phone the report and the choices, too. */
const PANES = { report: "Report", choices: "Choices", time: "Timeline", shares: "Shares", weights: "Weights" };

/** Put in a lab. @param {Host} host @returns {Promise<Dispose>} */
export async function bench({ model, el }) {
  const { data } = await read(model.get("data"));
  const { offers, start } = /** @type {LabData} */ (data);
  const id = model.get("id");
  const uid = `avl${Math.random().toString(36).slice(2, 8)}`;
  const arrangements = arrangementsOf(data);
  let choice = [...start];
  /** The choices that were changed, the latest last. @type {number[]} */
  let touched = [];
  let note = "";
  /** @type {LabRun | null} */
  let shown = null;
  /** @type {ReturnType<typeof stand> | null} */
  let standing = null;

  const room = roomOf(arrangements.tallest, { uid, offers, put: move });
  const report = reportPane((e) => standing?.go({ e }));
  const asks = offers.map((offer, i) => {
    const choose = (/** @type {number} */ place) => change(i, place);
    return isAsked(offer) ? choiceOf(offer, { key: `${uid}-${i}`, choose }) : null;
  });
  const again = h("button.av-restart", { type: "button", click: () => settle([...start], "") }, "Back to the start");
  const choices = h("div.av-options", group("Choices"), ...asks.flatMap((ask) => (ask ? [ask.el] : [])));
  const slots = { code: h("div.av-at-code"), tape: h("div.av-at-tape"), panes: h("div.av-at-panes") };
  const tabs = Object.entries(PANES).map(([name, label]) =>
    h(`button.av-tab.av-to-${name}`, { type: "button", click: () => see(name) }, label));
  const choosing = h("div.av-choose", group("Panes"), ...tabs);
  const grid = h("div.av-bench", {}, slots.code, report.el, choices, slots.tape, choosing, slots.panes);
  const frame = h("div.av-lframe", group("Loop lab"), grid);

  /** @param {string} name */
  function see(name) {
    frame.dataset.here = name;
    for (const tab of tabs) put(tab, { "aria-pressed": tab.matches(`.av-to-${name}`) });
    standing?.paint();
  }
  /** @param {number} i @param {number} place @param {string} [role] */
  function change(i, place, role) {
    const next = choice.map((old, k) => (k === i ? place : old));
    touched = [...touched.filter((k) => k !== i), i];
    const where = offers[i].line ? `${offers[i].title}: ${offers[i].labels[place]}.` : "";
    settle(next, where, role);
  }
  /**
   * Come to rest at an arrangement that there is.
   * @param {number[]} wanted @param {string} told @param {string} [role] @param {number | null} [e]
   */
  function settle(wanted, told, role = "", e = null) {
    const found = arrangements.nearest(wanted, touched);
    const back = found.back.map((i) => `“${offers[i].title}” is back at “${offers[i].labels[start[i]]}”`);
    choice = found.choice;
    note = told;
    if (back.length) note += ` ${back.join(", ")}: the page holds loops with at most two changes.`;
    touched = touched.filter((i) => choice[i] !== start[i]);
    draw(role, e);
  }
  /** @param {string} [role] whose line keeps the focus @param {number | null} [e] null: what is to be seen */
  function draw(role = "", e = null) {
    asks.forEach((one, i) => one?.draw(choice[i]));
    again.disabled = choice.every((place, i) => place === start[i]);
    const run = arrangements.at(choice);
    if (!run) return;
    const { differs, told } = changesOf(run, shown ?? run, offers, role);
    shown = run;
    report.draw(run.report, note + told);
    standing?.stop();
    const link = (/** @type {number} */ at) => linkOf(id, offers, start, choice, at);
    standing = stand({ ...run, differs }, { uid, offers, put: move, slots, again, e, link });
    if (role) standing.focus(role);
  }
  /** @param {string} role @param {string} value @param {number} [top] */
  function move(role, value, top) {
    const i = offers.findIndex(({ name }) => name === role);
    change(i, offers[i].values.indexOf(value), role);
    standing?.focus(role, top);
  }
  /** A permalink names what differs from the start; what does not exist any more is said. */
  function follow() {
    const named = choiceIn(location.hash, id, offers, start);
    if (!named) return;
    touched = [];
    const lost = named.lost.length > 0 || !arrangements.at(named.choice);
    const words = "The arrangement of this link is not here any more; this is the loop that the lab starts with.";
    if (lost) settle([...start], words);
    else settle(named.choice, "", undefined, named.e);
    touched = choice.flatMap((place, i) => (place === start[i] ? [] : [i]));
    arrive(frame);
  }
  function repaint() {
    // Nothing below the code jumps: it has the room of the tallest loop.
    slots.code.append(room);
    slots.code.style.minHeight = `${room.getBoundingClientRect().height}px`;
    room.remove();
    frame.classList.toggle("av-dark", isBright(getComputedStyle(frame).color));
    standing?.paint();
  }
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  el.append(h("div.accumviz.av-player", {}, frame));
  see("time");
  draw();
  follow();
  const unwatch = watchLooks(frame, repaint, repaint);
  return () => {
    standing?.stop();
    unwatch();
    ended.abort();
  };
}
