/** The pane of the user's code: the current line is marked, and a line leads to its next event. */

/** @import { App } from "./player.js" */
/** @import { At, Data, Piece } from "./types.d.ts" */

import { h, pane, reveal, scrolls } from "./dom.js";
import { pointedAt } from "./light.js";
import { counted } from "./numbers.js";

/** Where a line may go on below: behind brackets, commas and the dots between names. */
const SEAMS = /(?<=[([,]|[\p{L}_)\]]\.)(?=[\p{L}\d_("'[])/u;

/** The height of a line, so that whole lines are seen above and below the one that runs. */
const LINE = 19;

/** @param {string} text @returns {(string | Node)[]} */
const seamed = (text) => text.split(SEAMS).flatMap((piece, i) => (i ? [h("wbr"), piece] : [piece]));

/** @param {Piece} part */
const colored = (part) => (typeof part === "string" ? seamed(part) : [h(`span.av-${part[0]}`, {}, ...seamed(part[1]))]);

/** A line of code without its colours. @param {Piece[]} parts */
export const textOf = (parts) => parts.map((part) => (typeof part === "string" ? part : part[1])).join("");

/** One line, and the events that happened there. @param {App} app @param {number[] | undefined} mine */
function lineOf({ ledger, go, at }, mine, /** @type {number} */ n, /** @type {Piece[]} */ parts) {
  const margin = textOf(parts).search(/\S|$/);
  // A line that is too long goes on below, further in than it began.
  const further = `--av-in: ${margin + 4}ch`;
  const text = h("code", { style: further }, ...parts.flatMap(colored));
  const no = String(n || "⋯");
  if (!mine) return h("li.av-line", {}, h("span.av-no", {}, no), text);
  const next = () => go({ e: mine.find((e) => e > at().e) ?? mine[0] });
  const label = `line ${n}: next of ${counted(mine.length, "event")}`;
  const leads = h("button.av-no", { type: "button", "aria-label": label }, no);
  return h("li.av-line.av-has", { click: next, style: `--av-kind: ${ledger.kindColor(mine[0])}` }, leads, text);
}

/** Mark the lines of findings. @param {HTMLElement[]} lines @param {Data} data */
function flag(lines, { report }) {
  lines.forEach((line, place) => {
    const rules = report?.findings.filter(({ mark }) => mark === place).map(({ rule }) => rule) ?? [];
    if (!rules.length) return;
    line.append(h("span.av-flag", {}, `← ${rules.join(", ")}`));
    line.classList.add("av-flagged");
  });
}

/** @param {App} app */
export function codePane(app) {
  const { ledger, data } = app;
  const box = h("div.av-win", scrolls("Code, scrollable"));
  /** @type {HTMLElement[]} */
  const lines = [];
  /** @type {number[][]} */
  const events = [];
  /** @type {HTMLElement | undefined} */
  let on;
  ledger.events.c.forEach((line, e) => (events[line] ||= []).push(e));
  for (const { name, lines: texts } of data.code) {
    const list = h("ol.av-lines");
    for (const [n, ...parts] of texts) {
      const line = lineOf(app, events[lines.length], n, parts);
      const how = data.differs?.[lines.length];
      if (how) {
        line.classList.add("av-differs");
        line.append(h("span.av-heard", {}, ` (${how})`));
      }
      lines.push(line);
      list.append(line);
    }
    box.append(h("div", {}, data.code.length > 1 ? h("p.av-note", {}, name) : "", list));
  }
  flag(lines, data);
  /** @param {At} state */
  function draw({ e, n }) {
    // The forward before a backward ran on lines that nobody recorded.
    const line = (n ?? 0) < 0 ? undefined : lines[ledger.events.c[e]];
    line?.style.setProperty("--av-kind", ledger.kindColor(e));
    if (line === on) return;
    on?.removeAttribute("aria-current");
    on = line;
    line?.setAttribute("aria-current", "true");
    fit();
  }
  /** Lines that had no room yet, or now break elsewhere, are looked for again. */
  const fit = () => on && reveal(box, on.offsetTop, on.offsetHeight, LINE);
  pointedAt(app, box, ({ target }) => events[lines.indexOf(target.closest("li"))]);
  /** @param {Set<number>} lit */
  const light = (lit) => lines.forEach((line, i) =>
    line.classList.toggle("av-warm", Boolean(events[i]?.some((e) => lit.has(e)))));
  const ways = [...new Set(Object.values(data.differs ?? {}))];
  const differs = ways.length ? [h("b.av-not", {}, "≠"), ` ${ways.join(" or ")}`] : [];
  return { ...pane("code", "Code", box, h("p.av-note", {}, ...differs)), draw, fit, light };
}
