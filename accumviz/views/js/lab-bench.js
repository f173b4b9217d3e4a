/** The lab: a loop whose lines are moved, and what follows from it, side by side. */

/** @import { Choice, Dispose, Host, LabData, LabRun } from "./types.d.ts" */
/** @import { App } from "./player.js" */

import { controls } from "./controls.js";
import { group, h } from "./dom.js";
import { keys } from "./keys.js";
import { choiceIn, linkOf } from "./lab-address.js";
import { choiceOf } from "./lab-choices.js";
import { movingPane } from "./lab-code.js";
import { reportPane } from "./lab-report.js";
import { arrangementsOf } from "./lab-runs.js";
import { Ledger } from "./ledger.js";
import { memory } from "./memory.js";
import { clamp } from "./numbers.js";
import { read } from "./packed.js";
import { isBright } from "./pen.js";
import { playing } from "./playing.js";
import { endOf } from "./runs.js";
import { sharesPane } from "./shares.js";
import { timePane } from "./timeline.js";
import { watchLooks } from "./lab-looks.js";
import { sentence } from "./words.js";

/** Put in a lab. @param {Host} host @returns {Promise<Dispose>} */
export async function bench({ model, el }) {
  const { data } = await read(model.get("data"));
  const { offers, start, task } = /** @type {LabData} */ (data);
  const id = model.get("id");
  const live = Boolean(model.get("live"));
  const uid = `avl${Math.random().toString(36).slice(2, 8)}`;
  const arrangements = arrangementsOf(data);
  const past = memory(`accumviz.lab:${location.pathname}:${id}`);
  /** @type {Map<string, string>} */
  const failures = new Map();
  /** @type {Set<string>} */
  const asked = new Set();
  /** @type {Choice} */
  let choice = [...start];
  /** The choices that were changed, the latest last. @type {number[]} */
  let touched = [];
  let note = "";
  /** @type {ReturnType<typeof stand> | null} */
  let standing = null;

  const report = reportPane(Boolean(task), (e) => standing?.go({ e }));
  const asks = offers.map((offer, i) => (offer.line || (offer.values.length < 2 && !live) ? null
    : choiceOf(offer, { key: `${uid}-${i}`, live, choose: (place) => change(i, place) })));
  const again = h("button.av-again", { type: "button", click: () => settle([...start], "") }, "Back to the start");
  const choices = h("div.av-choices", group("Choices"), ...asks.flatMap((ask) => (ask ? [ask.el] : [])), again);
  const goal = h("p.av-goal", {});
  goal.hidden = !task;
  const code = h("div.av-place.av-at-code");
  const tape = h("div.av-place.av-at-tape");
  const below = h("div.av-place.av-at-below");
  const grid = h("div.av-bench", {}, code, choices, report.el, tape, below);
  const frame = h("div.av-frame", group("Loop lab"), goal, grid);

  /** @param {number} i @param {number | string} place @param {string} [role] */
  function change(i, place, role) {
    const next = choice.map((old, k) => (k === i ? place : old));
    touched = [...touched.filter((k) => k !== i), i];
    const where = offers[i].line && typeof place === "number" ? `${offers[i].title}: ${offers[i].labels[place]}.` : "";
    settle(next, where, role);
  }
  /** Come to rest at an arrangement that there is. @param {Choice} wanted @param {string} told @param {string} [role] */
  function settle(wanted, told, role, e = -1) {
    choice = wanted;
    note = told;
    if (!arrangements.at(choice) && !live) {
      const found = arrangements.nearest(choice, touched);
      const back = found.back.map((i) => `${offers[i].title} is ${offers[i].labels[Number(start[i])]} again`);
      choice = found.choice;
      if (back.length) note += ` ${back.join(", ")}: the page holds loops with at most two changes.`;
    }
    touched = touched.filter((i) => choice[i] !== start[i]);
    draw(role, e);
  }
  /** Ask the kernel for what was not recorded. */
  function ask() {
    const key = arrangements.keyOf(choice);
    if (asked.has(key)) return;
    asked.add(key);
    const told = choice.map((place, i) => [offers[i].name, typeof place === "number" ? offers[i].values[place] : place]);
    model.set("ask", { choice: Object.fromEntries(told), key, n: asked.size });
    model.save_changes();
  }
  /** @param {string} [role] whose line keeps the focus @param {number} [e] the moment to show; -1: the last step */
  function draw(role, e = -1) {
    asks.forEach((one, i) => one?.draw(choice[i]));
    again.disabled = choice.every((place, i) => place === start[i]);
    const run = arrangements.at(choice);
    const failure = failures.get(arrangements.keyOf(choice));
    if (!run && !failure) ask();
    report.draw(run?.report ?? null, note, failure);
    frame.classList.toggle("av-waits", !run);
    if (!run) return;
    standing?.stop();
    standing = stand(run, role, e);
    told(run);
  }
  /** @param {LabRun} run */
  function told(run) {
    if (!task) return;
    const mended = run.report.verdict === "healthy";
    if (mended) past.keep("mended");
    const before = past.kept()?.said === "mended";
    goal.dataset.state = mended ? "mended" : before ? "before" : "open";
    goal.textContent = mended ? "✓ Mended: check says healthy."
      : `Repair this loop until check says healthy.${before ? " (You have mended it before.)" : ""}`;
  }
  /** @param {string} role @param {string} value */
  function put(role, value) {
    const i = offers.findIndex(({ name }) => name === role);
    change(i, offers[i].values.indexOf(value), role);
  }
  /** The panes of one run, and what moves them. @param {LabRun} run @param {string | undefined} role @param {number} e */
  function stand(run, role, e) {
    const whole = { ...run, layouts: [], graphs: [], of: {}, undrawn: {}, remark: "" };
    const ledger = new Ledger(whole);
    const { length } = ledger;
    let at = { e: clamp(e < 0 ? endOf({ data: whole }) : e, 0, length - 1), n: null, p: -1, node: -1 };
    const go = (/** @type {Partial<import("./types.d.ts").At>} */ change) => {
      at = { ...at, ...change };
      at.e = clamp(Math.trunc(at.e) || 0, 0, length - 1);
      show();
    };
    /** @type {App} */
    const app = { ledger, data: whole, uid, at: () => at, go, graph: null };
    const moving = movingPane(app, { offers, choice, rows: run.rows, put });
    const time = timePane(app);
    const shares = whole.shares ? sharesPane(app, whole.shares) : null;
    const reel = playing({ length, at: () => at, go, nodes: () => 0 }, (on) => top.showPlaying(on));
    const by = (/** @type {number} */ place) => {
      reel.pause();
      go({ e: place });
    };
    const move = (/** @type {number} */ steps) => by(at.e + steps);
    const top = controls({ ledger, move, toggle: reel.toggle, scrub: by });
    const moments = h("div.av-moments", {}, top.bar, top.say, time.el);
    keys(moments, length, { move, run() {}, moment: () => undefined, play: top.play });
    const panes = [moving, time, ...(shares ? [shares] : [])];
    code.replaceChildren(moving.el);
    tape.replaceChildren(moments);
    below.replaceChildren(...(shares ? [shares.el] : []));
    function show() {
      for (const one of panes) one.draw(at);
      top.draw(at, sentence(ledger, at.e, at.p), linkOf(id, offers, start, choice, at.e));
    }
    const paint = () => {
      time.paint();
      show();
    };
    if (frame.isConnected) paint();
    if (role) moving.focus(role);
    return { go, paint, stop: reel.pause };
  }
  /** A permalink names what differs from the start; what does not exist any more is said. */
  function follow() {
    const named = choiceIn(location.hash, id, offers, start);
    if (!named) return;
    touched = [];
    const lost = named.lost.length > 0 || (!arrangements.at(named.choice) && !live);
    const words = "The arrangement of this link is not here any more; this is the loop that the lab starts with.";
    if (lost) settle([...start], words);
    else settle(named.choice, "", undefined, named.e ?? -1);
    touched = choice.flatMap((place, i) => (place === start[i] ? [] : [i]));
    frame.scrollIntoView({ block: "nearest" });
  }
  model.on("change:told", async () => {
    const { key, run, error } = model.get("told");
    if (error) failures.set(key, error);
    else arrangements.add(key, (await read(run)).data);
    if (key === arrangements.keyOf(choice)) draw();
  });
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  el.append(h("div.accumviz.av-player", {}, frame));
  draw();
  follow();
  const unwatch = watchLooks(frame, () => {
    frame.classList.toggle("av-dark", isBright(getComputedStyle(frame).color));
    standing?.paint();
  });
  return () => {
    standing?.stop();
    unwatch();
    ended.abort();
  };
}
