/** The lab: a loop whose lines are moved, and what follows from it, side by side. */

/** @import { LabData, LabReport, Offer } from "./lab-types.d.ts" */
/** @import { Choice, Dispose, Host } from "../../views/js/types.d.ts" */

import { arrive, group, h } from "../../views/js/dom.js";
import { choiceIn, linkOf } from "./lab-address.js";
import { choiceOf } from "./lab-choices.js";
import { reportPane } from "./lab-report.js";
import { arrangementsOf } from "./lab-runs.js";
import { stand } from "./lab-stand.js";
import { memory } from "./memory.js";
import { read } from "../../views/js/packed.js";
import { isBright } from "../../views/js/pen.js";
import { watchLooks } from "../../views/js/player.js";

/** Whether a choice stands beside the code: not what moves a line, and not what cannot be chosen. */
const isAsked = (/** @type {Offer} */ { line, values }, /** @type {boolean} */ live) =>
  !line && (live || values.length > 1);

/** What the reader is to do, if anything, and whether it is done. @param {string} task @param {Memory} past */
function goalOf(task, past) {
  const el = h("p.av-goal");
  el.hidden = !task;
  /** @param {LabReport} report */
  function draw({ verdict, remark }) {
    if (!task) return;
    const mended = verdict === "healthy" && !remark;
    if (mended) past.keep("mended");
    const before = past.kept()?.said === "mended" ? " (You have mended it before.)" : "";
    el.classList.toggle("av-mended", mended);
    el.textContent = mended ? "✓ Mended: check says healthy." : `Repair this loop until check says healthy.${before}`;
  }
  return { el, draw };
}

/** @typedef {ReturnType<typeof memory>} Memory */

/**
 * The kernel, which records what the page has not: it is asked once for each.
 * @param {Host["model"]} model @param {Offer[]} offers
 * @param {ReturnType<typeof arrangementsOf>} arrangements @param {(key: string) => void} heard
 */
function kernelOf(model, offers, arrangements, heard) {
  /** What it could not record, and why; nothing while it is at it. @type {Map<string, string>} */
  const failures = new Map();

  /** @param {Choice} choice */
  function ask(choice) {
    const key = arrangements.keyOf(choice);
    const known = failures.get(key);
    if (known !== undefined) return known;
    failures.set(key, "");
    const valueOf = (/** @type {number | string} */ place, /** @type {number} */ i) =>
      [offers[i].name, typeof place === "number" ? offers[i].values[place] : place];
    const told = choice.map(valueOf);
    model.set("ask", { choice: Object.fromEntries(told), key, n: failures.size });
    return "";
  }
  model.on("change:told", async () => {
    const { key, run, error } = model.get("told");
    if (error) failures.set(key, error);
    else arrangements.add(key, (await read(run)).data);
    heard(key);
  });
  return { ask };
}

/** Put in a lab. @param {Host} host @returns {Promise<Dispose>} */
export async function bench({ model, el }) {
  const { data } = await read(model.get("data"));
  const { offers, start, task } = /** @type {LabData} */ (data);
  const id = model.get("id");
  const live = Boolean(model.get("live"));
  const uid = `avl${Math.random().toString(36).slice(2, 8)}`;
  const arrangements = arrangementsOf(data);
  const kernel = kernelOf(model, offers, arrangements, (key) => {
    if (key !== arrangements.keyOf(choice)) return;
    draw(awaited);
    while (later.length && !waits) shift(...later.splice(0, 1)[0]);
  });
  /** @type {Choice} */
  let choice = [...start];
  /** The choices that were changed, the latest last. @type {number[]} */
  let touched = [];
  let note = "";
  /** @type {ReturnType<typeof stand> | null} */
  let standing = null;
  /** Whether the kernel is recording what was chosen, and the line that was moved to it. */
  let waits = false;
  let awaited = "";
  /** What keys asked for meanwhile: they count from where a line will be. @type {[string, number][]} */
  let later = [];

  const report = reportPane(Boolean(task), (e) => standing?.go({ e }));
  const asks = offers.map((offer, i) => {
    const choose = (/** @type {number | string} */ place) => change(i, place);
    return isAsked(offer, live) ? choiceOf(offer, { key: `${uid}-${i}`, live, choose }) : null;
  });
  const again = h("button.av-restart", { type: "button", click: () => settle([...start], "") }, "Back to the start");
  const choices = h("div.av-options", group("Choices"), ...asks.flatMap((ask) => (ask ? [ask.el] : [])), again);
  const goal = goalOf(task, memory(`accumviz.lab:${location.pathname}:${id}`));
  const slots = { code: h("div.av-at-code"), tape: h("div.av-at-tape"), below: h("div.av-at-below") };
  const grid = h("div.av-bench", {}, slots.code, choices, report.el, slots.tape, slots.below);
  const frame = h("div.av-lframe", group("Loop lab"), goal.el, grid);

  /** @param {number} i @param {number | string} place @param {string} [role] */
  function change(i, place, role) {
    const next = choice.map((old, k) => (k === i ? place : old));
    touched = [...touched.filter((k) => k !== i), i];
    if (!role) later = [];
    const where = offers[i].line && typeof place === "number" ? `${offers[i].title}: ${offers[i].labels[place]}.` : "";
    settle(next, where, role);
  }
  /**
   * Come to rest at an arrangement that there is.
   * @param {Choice} wanted @param {string} told @param {string} [role] @param {number | null} [e]
   */
  function settle(wanted, told, role = "", e = null) {
    choice = wanted;
    note = told;
    if (!arrangements.at(choice) && !live) {
      const found = arrangements.nearest(choice, touched);
      const back = found.back.map((i) => `“${offers[i].title}” is back at “${offers[i].labels[Number(start[i])]}”`);
      choice = found.choice;
      if (back.length) note += ` ${back.join(", ")}: the page holds loops with at most two changes.`;
    }
    touched = touched.filter((i) => choice[i] !== start[i]);
    draw(role, e);
  }
  /** @param {string} [role] whose line keeps the focus @param {number | null} [e] null: what is to be seen */
  function draw(role, e = null) {
    asks.forEach((one, i) => one?.draw(choice[i]));
    again.disabled = choice.every((place, i) => place === start[i]);
    const run = arrangements.at(choice);
    const failure = run ? "" : kernel.ask(choice);
    waits = !run && !failure;
    awaited = waits ? role ?? "" : "";
    report.draw(run?.report ?? null, note, failure);
    frame.classList.toggle("av-waits", !run);
    if (!run) return;
    standing?.stop();
    standing = stand(run, { uid, offers, put, shift, slots, e, link: (at) => linkOf(id, offers, start, choice, at) });
    if (role) standing.focus(role);
    goal.draw(run.report);
  }
  /** @param {string} role @param {string} value @param {number} [top] */
  function put(role, value, top) {
    const i = offers.findIndex(({ name }) => name === role);
    change(i, offers[i].values.indexOf(value), role);
    if (!waits) standing?.focus(role, top);
  }
  /** @param {string} role @param {number} by */
  function shift(role, by) {
    if (waits) later.push([role, by]);
    else standing?.shift(role, by);
  }
  /** A permalink names what differs from the start; what does not exist any more is said. */
  function follow() {
    const named = choiceIn(location.hash, id, offers, start);
    if (!named) return;
    touched = [];
    const lost = named.lost.length > 0 || (!arrangements.at(named.choice) && !live);
    const words = "The arrangement of this link is not here any more; this is the loop that the lab starts with.";
    if (lost) settle([...start], words);
    else settle(named.choice, "", undefined, named.e);
    touched = choice.flatMap((place, i) => (place === start[i] ? [] : [i]));
    arrive(frame);
  }
  function repaint() {
    frame.classList.toggle("av-dark", isBright(getComputedStyle(frame).color));
    standing?.paint();
  }
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  el.append(h("div.accumviz.av-player", {}, frame));
  draw();
  follow();
  const unwatch = watchLooks(frame, repaint, repaint);
  return () => {
    standing?.stop();
    unwatch();
    ended.abort();
  };
}
