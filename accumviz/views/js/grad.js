/** The pane of `.grad`: a list of parameters, grouped where they are many, of which only what is in view exists. */

/** @import { App } from "./player.js" */
/** @import { Row } from "./ledger.js" */
/** @import { At, NodeData } from "./types.d.ts" */

import { barOf } from "./bar.js";
import { KEYS_ARE_MINE, h, own, pane, put, reveal, tell, vertical } from "./dom.js";
import { clamp } from "./numbers.js";
import { OWN_SCALES, equation } from "./words.js";

/**
 * Until which event a row's `.grad` has come: it is as it was until its AccumulateGrad, or its module, has run.
 * @param {Row[]} rows the row itself, or the members of a group
 * @param {number} e @param {NodeData[] | null} wrote nodes that have run; null: all
 */
export function seenUntil(rows, e, wrote) {
  if (!wrote || e < 0) return e;
  const ran = (/** @type {string} */ n) => wrote.some((node) => n === node.leaf || n.startsWith(`${node.in}.`));
  const waits = rows.some(({ n, c }) => !(c[e] < 0 || ran(n)));
  return waits ? e - 1 : e;
}

/**
 * Which rows are listed: those that match, or groups and what stands in the open ones.
 * @param {Row[]} every @param {Row[]} groups @param {Set<Row>} open @param {string} wanted
 */
export function listed(every, groups, open, wanted) {
  if (!groups.length || wanted) return every.filter(({ n }) => n.toLowerCase().includes(wanted));
  return groups.flatMap((group) => {
    const inside = every.slice(...(group.in ?? []));
    if (inside.length === 1) return inside;
    return open.has(group) ? [group, ...inside] : [group];
  });
}

/** The letters of the longest name, and one. @param {Row[]} rows */
const longest = (rows) => Math.max(0, ...rows.map(({ n }) => n.length)) + 1;

/** What is in the rows, which decides how wide their columns are. @param {import("./ledger.js").Ledger} ledger */
function whatOf({ groups, parameters }) {
  if (groups.length) return "many";
  return parameters.every(({ signed }) => signed) ? "single" : "mixed";
}

/** @param {App} app */
export function gradPane(app) {
  const { ledger, go, at, uid, graph } = app;
  const { parameters, groups } = ledger;
  const many = groups.length > 0;
  const tall = many ? 30 : 42;
  /** @type {Set<Row>} */
  const open = new Set();
  const redraw = () => draw(at());
  const list = h(`div.av-rows.av-${whatOf(ledger)}`);
  const note = h("p.av-note");
  const tree = { tabindex: 0, role: "tree", "aria-label": "Parameters and their .grad", scroll: redraw };
  const box = h("div.av-win", tree, list);
  const made = pane("grad", ".grad", box, note);
  const search = h("input.av-search", {
    type: "search", min: 0, value: "", "aria-label": "search parameters by name", ...KEYS_ARE_MINE,
    placeholder: `search ${parameters.length} names`, input() { arrange(); redraw(); },
  });
  if (many) made.head.append(search);
  /** Lines that exist, from the top of the view. @type {ReturnType<typeof barOf>[]} */
  const pool = [];
  /** @type {Row[]} */
  let rows = [];
  let [cursor, chosen] = [-1, -1];

  function arrange() {
    rows = listed(parameters, groups, open, many ? search.value.trim().toLowerCase() : "");
    box.style.cssText = `--av-tall: ${rows.length * tall}px; --av-letters: ${longest(rows)}ch`;
    made.el.classList.toggle("av-empty", !rows.length);
  }
  /** @param {Row} row */
  function choose(row) {
    if (!row.in) return go({ p: at().p === row.p ? -1 : row.p });
    if (!open.delete(row)) open.add(row);
    arrange();
    redraw();
  }
  function lineAt(/** @type {number} */ i) {
    if (!pool[i]) {
      pool[i] = barOf(app, tall, choose);
      list.append(pool[i].el);
    }
    return pool[i];
  }
  /** Put the cursor on a row. @param {number} to */
  function moveTo(to) {
    cursor = to;
    reveal(box, cursor * tall, tall);
  }
  box.addEventListener("keydown", (event) => {
    const by = vertical(event);
    const enter = event.key === "Enter" && rows[cursor]?.in;
    if (!rows.length || (!by && !enter)) return;
    own(event);
    if (enter) return choose(rows[cursor]);
    moveTo(clamp(cursor + Number(by), 0, rows.length - 1));
    if (rows[cursor].in) redraw();
    else go({ p: rows[cursor].p });
  });

  /** @param {At} state @param {(row: Row) => number} when */
  function explain({ p }, when) {
    if (p < 0 && parameters.length > 1) return ledger.ownScales ? OWN_SCALES : "";
    return equation(ledger, when(ledger.rows[Math.max(p, 0)]), ledger.rows[Math.max(p, 0)]);
  }
  /** A parameter selected elsewhere is unfolded and brought into view. @param {number} p */
  function follow(p) {
    if (p === chosen) return;
    chosen = p;
    const row = ledger.rows[p];
    const group = groups.find(({ in: [start, stop] = [0, 0] }) => start <= p && p < stop);
    if (group && !rows.includes(row) && !search.value) {
      open.add(group);
      arrange();
    }
    if (rows.includes(row)) moveTo(rows.indexOf(row));
  }
  /** @param {At} state */
  function draw(state) {
    follow(state.p);
    const wrote = graph?.wrote(state) ?? null;
    const members = (/** @type {Row} */ row) => (row.in ? ledger.rows.slice(...row.in) : [row]);
    const known = (/** @type {Row} */ row) => (state.e > 0 || row.began ? wrote : null);
    const when = (/** @type {Row} */ row) => seenUntil(members(row), state.e, known(row));
    const [width, letters] = [lineAt(0).bar.clientWidth, lineAt(0).name.clientWidth / 7.6];
    const first = Math.floor(box.scrollTop / tall);
    // It may yet become taller, as the panes beside it are.
    const count = Math.min(Math.ceil(Math.max(box.clientHeight, 700) / tall) + 1, rows.length - first);
    for (let i = 0; i < Math.max(pool.length, count); i++) {
      const { el, fill } = lineAt(i);
      const place = first + i;
      const row = rows[place];
      el.hidden = i >= count;
      if (el.hidden) continue;
      fill({ row, e: when(row), now: state.e, open: open.has(row), chosen: state.p === row.p, width, letters });
      el.style.top = `${place * tall}px`;
      el.classList.toggle("av-cursor", place === cursor);
      put(el, { id: `${uid}-${place}`, "aria-setsize": rows.length, "aria-posinset": place + 1 });
    }
    box.setAttribute("aria-activedescendant", cursor < 0 ? "" : `${uid}-${cursor}`);
    tell(note, explain(state, when));
  }
  lineAt(0);
  arrange();
  return { ...made, draw, lines: () => pool.filter(({ el }) => !el.hidden) };
}
