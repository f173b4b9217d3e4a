/** The player: code, graph, `.grad`, timeline and shares, at one moment. */

/** @import { At, Data, Dispose, Host, Model } from "./types.d.ts" */

import { linkTo, momentIn } from "./address.js";
import { codePane } from "./code.js";
import { controls } from "./controls.js";
import { arrive, group, h } from "./dom.js";
import { ghostOf } from "./ghost.js";
import { gradPane } from "./grad.js";
import { graphPane } from "./graph.js";
import { keys } from "./keys.js";
import { Ledger } from "./ledger.js";
import { lighting } from "./light.js";
import { progress, selection } from "./moment.js";
import { clamp } from "./numbers.js";
import { read } from "./packed.js";
import { choosing } from "./panes.js";
import { isBright } from "./pen.js";
import { playing } from "./playing.js";
import { reportPane } from "./report.js";
import { motions } from "./motion.js";
import { sharesPane } from "./shares.js";
import { timePane } from "./timeline.js";
import { weightsPane } from "./weights.js";
import { sentence } from "./words.js";

/**
 * @typedef {object} App  what the panes of one player share
 * @property {Ledger} ledger
 * @property {Data} data
 * @property {string} uid
 * @property {() => At} at
 * @property {(change: Partial<At>) => void} go
 * @property {number} first  -1 where there is a moment before the first event
 * @property {ReturnType<typeof graphPane> | null} graph
 * @property {(events: number[]) => void} [light]  these events in all panes
 * @property {ReturnType<typeof ghostOf>} [ghost]  the run behind
 */

/**
 * @typedef {object} Pane  of a player, or of a lab
 * @property {string} name
 * @property {HTMLElement} el
 * @property {(at: At) => void} draw
 * @property {() => void} [fit]  into the room that the other panes have left
 * @property {(events: Set<number>) => void} [light]  shows which events are pointed at
 */

/**
 * A state that everything follows: `go` changes it.
 * @param {Model} model @param {number} length @param {number} first
 * @param {Data} data
 */
function stateOf(model, length, first, { report }) {
  const start = report?.findings[0]?.event ?? first;
  /** @returns {At} */
  const at = () => ({ e: start, n: null, p: -1, node: -1, ...model.get("at") });
  /** @param {Partial<At>} change */
  function go(change) {
    const next = { ...at(), ...("e" in change ? { n: null, node: -1 } : {}), ...change };
    next.e = clamp(Math.trunc(next.e) || 0, first, Math.max(length - 1, 0));
    model.set("at", next);
  }
  return { at, go };
}

/** The panes for which there is something to show, as they stand on the page. @param {App} app */
function panesOf(app) {
  const { ledger, data } = app;
  app.graph = data.missing ? graphPane(app) : null;
  const time = ledger.length ? timePane(app) : null;
  const code = ledger.length && data.code.length ? codePane(app) : null;
  const grad = ledger.length && ledger.count ? gradPane(app) : null;
  const shares = data.shares ? sharesPane(app, data.shares) : null;
  const weights = data.weights ? weightsPane(app, data.weights) : null;
  const move = motions(app, grad);
  // What comes first is what a reader meets: the code, and the one picture that it is about.
  const plain = data.weights?.leads ? [code, weights, time, grad, shares] : [code, time, grad, weights, shares];
  const all = app.graph ? [code, app.graph, grad, weights, shares, time] : plain;
  /** @type {Pane[]} */
  const panes = all.flatMap((pane) => pane ?? []);
  return { time, move, panes };
}

/** The report that a page begins with, if it has one. @param {Data} data @param {(e: number) => void} go */
function openingOf({ report }, go) {
  if (!report) return [];
  const { el, draw } = reportPane(go);
  draw(report, report.about ?? "");
  return [el];
}

/** What is said of a moment. @param {App} app @param {At} state */
function said({ ledger, data, graph }, state) {
  const now = graph?.moment(state);
  const [ran, selected] = now ? [progress(now), selection(now, state.node)] : ["", ""];
  if (ledger.length) {
    const before = (state.n ?? 0) < 0 ? "" : `${ledger.head(state.e)}. `;
    const told = ran ? before + ran : sentence(ledger, state.e, state.p);
    return `${selected} ${told}`.trim(); // what was asked for fits on the line that is seen
  }
  if (!data.graphs.length) return "Nothing to play: there is no event.";
  return `${ran || "All nodes have run."} ${selected}`.trim();
}

/**
 * Paint again what depends on the width or the theme; returns how to stop.
 * @param {HTMLElement} frame @param {() => void} resized @param {() => void} themed
 */
export function watchLooks(frame, resized, themed) {
  let width = 0;
  const sizes = new ResizeObserver(() => {
    if (frame.clientWidth === width) return;
    width = frame.clientWidth;
    resized();
  });
  const themes = new MutationObserver(themed);
  const ended = new AbortController();
  const attributeFilter = ["data-theme", "data-jp-theme-light", "theme", "class"];
  for (const host of [document.documentElement, document.body]) themes.observe(host, { attributeFilter });
  for (const look of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(look).addEventListener("change", themed, { signal: ended.signal });
  }
  sizes.observe(frame);
  return () => {
    sizes.disconnect();
    themes.disconnect();
    ended.abort();
  };
}

/** Put in a player. @param {Host} host @returns {Promise<Dispose>} */
export async function render({ model, el }) {
  const { data } = await read(model.get("data"));
  const uid = `av${Math.random().toString(36).slice(2, 8)}`;
  const id = model.get("id") || uid;
  const ledger = new Ledger(data);
  const { length } = ledger;
  // What moves is seen from before it has moved.
  const first = length && (data.graphs.length || data.weights) ? -1 : 0;
  const { at, go } = stateOf(model, length, first, data);
  /** @type {App} */
  const app = { ledger, data, uid, at, go, first, graph: null };
  if (data.ghost) app.ghost = ghostOf(ledger, new Ledger(data.ghost.data));
  const { panes, time, move: motion } = panesOf(app);
  app.light = lighting(panes);
  const { graph } = app;

  /** How many nodes run at an event. @param {number} e */
  function nodes(e) {
    const found = graph?.moment({ e, n: null });
    return found?.now ? found.total : 0;
  }
  const tape = playing({ length, first, at, go, nodes }, (on) => top.showPlaying(on));
  const by = (/** @type {Partial<At>} */ change) => {
    tape.pause();
    go(change);
  };
  const move = (/** @type {number} */ steps) => by({ e: at().e + steps });
  const top = controls({ ledger, first, move, toggle: tape.toggle, scrub: (e) => by({ e }) });
  const seen = choosing(model.get("also") ?? [], panes, model.get("panes") ?? {}, refit);
  top.bar.append(seen.more);
  const opening = openingOf(data, (e) => {
    by({ e });
    top.bar.scrollIntoView({ block: "nearest" });
  });
  const frame = h("div.av-frame", group("Player"), ...opening, top.bar, top.say, seen.tabs, seen.body);
  top.bar.hidden = length - first < 2 && seen.more.hidden;
  keys(frame, length, {
    move,
    moment: () => graph?.moment(at()),
    run(n) {
      tape.pause();
      if (n !== null) go({ n });
    },
    play: top.play,
  });

  let due = 0;
  function draw() {
    due = 0;
    const state = at();
    const land = motion(state);
    const shown = { ...state, e: length ? ledger.index(state.e) : 0 };
    for (const pane of panes) pane.draw(state);
    if (frame.querySelector(".av-scrub:focus-visible")) app.light?.([state.e]);
    top.draw(state, said(app, state), linkTo(model.get("link") || id, shown));
    graph?.settle();
    land();
  }
  /** A page may hold several players. */
  function follow() {
    const told = momentIn(location.hash, id);
    if (!told) return;
    const { i } = ledger.events;
    const e = i ? i.findLastIndex((index) => index <= told.e) : told.e;
    go({ ...told, e, p: clamp(told.p, -1, ledger.count - 1) });
    arrive(frame);
  }
  function repaint() {
    frame.classList.toggle("av-dark", isBright(getComputedStyle(frame).color));
    time?.paint();
    draw();
  }
  function refit() {
    repaint();
    for (const { fit } of panes) fit?.(); // into the height that the others have left
  }
  el.append(frame);
  for (const what of ["at", "link"]) model.on(`change:${what}`, () => { due ||= requestAnimationFrame(draw); });
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  const unwatch = watchLooks(frame, refit, repaint);
  draw();
  follow();
  return () => {
    tape.pause();
    unwatch();
    ended.abort();
  };
}
