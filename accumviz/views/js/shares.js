/** The pane of shares: what each backward weighs in each step, a bar of segments against a dashed 1. */

/** @import { App } from "./player.js" */
/** @import { At, Segment, ShareRow, SharesData } from "./types.d.ts" */

import { h, own, pane, put, reveal, swatch, tell, vertical } from "./dom.js";
import { pointedAt } from "./light.js";
import { number, shorten } from "./numbers.js";
import { along, pieceOn } from "./parts.js";

/**
 * Which bar speaks of an event: that of the step it is, or is used by first; else the last one.
 * @param {ShareRow[]} rows @param {number} e
 */
export const barAt = (rows, e) =>
  rows.find((row) => row.e === e || (row.e > e && row.s.some(([born]) => born === e)))
  ?? rows.find((row) => row.e > e) ?? /** @type {ShareRow} */ (rows.at(-1));

/** Which bar of its objective a bar is. @param {ShareRow[]} rows @param {ShareRow} row */
const placeOf = (rows, row) => row.o + rows.filter(({ o }) => o === row.o).indexOf(row);

/** @param {App} app @param {SharesData} shares */
export function sharesPane(app, { r, rows, keys, note }) {
  const { ledger, data, go, at, uid } = app;
  const x = (/** @type {number} */ value) => `${100 * along(r, value)}%`;
  const several = rows.some(({ o }) => o !== rows[0].o);
  const ones = [1, -1].filter((value) => value >= r[0]);
  const marks = () => [0, ...ones].map((value) =>
    h(value ? "i.av-one" : "i.av-zero", { style: `left: ${x(value)}` }));

  /** @param {ShareRow} row @param {Segment} segment */
  function pieceOf(row, [born, start, length, look, told]) {
    const [color, ink] = ledger.colorOf(row.l);
    const { torn, hidden, ...drawn } = pieceOn(r, start, length);
    const style = `${drawn.style}--av-c: ${look === "unseen" ? "var(--av-muted)" : color}`;
    const click = () => born >= 0 && go({ e: born });
    // The ink is the text's own: what marks a segment has the page's.
    const text = h("span", look === "new" ? { style: `color: ${ink}` } : {}, told);
    const piece = h(`b.av-part.av-${look}`, { style, title: told, click }, text);
    Object.assign(piece, { hidden, className: piece.className + torn });
    return piece;
  }
  const behind = data.ghost?.data.shares?.rows ?? [];
  const outlines = new Map(behind.map((row) => [placeOf(behind, row), row.s]));
  const lines = rows.map((row, i) => {
    const pieces = row.s.map((segment) => pieceOf(row, segment));
    const ghost = (outlines.get(placeOf(rows, row)) ?? []).map(([, start, length]) =>
      h("i.av-ghost", { style: pieceOn(r, start, length).style }));
    // What is seen are bits of the sentence that is heard.
    const seen = { "aria-hidden": "true" };
    const step = rows[i - 1]?.e === row.e ? "\u2003" : ledger.index(row.e);
    const whose = `${step} ${several ? shorten(row.o, innerWidth / 22) : ""}`;
    const name = h("span.av-of", { title: row.w, click: () => go({ e: row.e }), ...seen }, whose);
    const bar = h("span.av-bar", seen, ...pieces, ...ghost, ...marks());
    const total = h("span.av-total", seen, row.t);
    const heard = h("span.av-heard", {}, row.w);
    const el = h("div.av-share", { id: `${uid}-s${i}`, role: "option" }, heard, name, bar, total);
    return { row, pieces, el };
  });
  const axis = h("div.av-share.av-axis", { "aria-hidden": "true" },
    h("span", {}, "at event"), h("span.av-bar", {}, ...ones.map((value) =>
      h("span", { style: `left: ${x(value)}` }, number(value)))), h("span.av-total", {}, "sum"));
  const looks = { tabindex: 0, role: "listbox", "aria-label": "Shares of each step" };
  const box = h("div.av-win", looks, ...lines.map(({ el }) => el));
  const said = rows.map(({ e }) => rows.filter((row) => row.e === e).map(({ w }) => w).join(" "));
  const longest = said.reduce((one, other) => (other.length > one.length ? other : one));
  const told = h("p.av-note.av-weighs", { "data-w": longest });
  const meanings = h("p.av-note", {}, ...keys.map(swatch), note);
  const made = pane("shares", "Shares of each step", axis, box, meanings, told);
  box.addEventListener("keydown", (event) => {
    const by = vertical(event);
    if (!by) return;
    own(event);
    const { e } = at();
    const here = e < 0 ? e : barAt(rows, e).e;
    const ahead = rows.filter((row) => by * (row.e - here) > 0);
    go({ e: ahead.at(Math.min(by, 0))?.e ?? e });
  });

  /** @param {At} state */
  function draw({ e }) {
    const step = barAt(rows, e).e;
    lines.forEach(({ row, pieces, el }) => {
      put(el, { "aria-selected": e >= 0 && row.e === step });
      pieces.forEach((piece, k) => piece.classList.toggle("av-lit", e >= 0 && row.s[k][0] === e));
    });
    // Bars of several objectives in one step speak together.
    const mine = lines.filter(({ row }) => row.e === step);
    tell(told, mine.map(({ row }) => row.w).join(" "));
    const [{ el }] = mine;
    put(box, { "aria-activedescendant": el.id });
    reveal(box, el.offsetTop, mine.length * el.offsetHeight);
    fit();
  }
  /** A text without room stands in the words below, and in the title. */
  function fit() {
    for (const { row, pieces } of lines) {
      pieces.forEach((piece, k) => {
        const text = /** @type {HTMLElement} */ (piece.firstChild);
        text.hidden = piece.clientWidth < row.s[k][4].length * 7 + 4;
      });
    }
  }
  made.el.classList.toggle("av-several", several);
  pointedAt(app, box, ({ type, target }) => {
    const now = type === "focusin" && barAt(rows, at().e);
    const line = lines.find(({ row, el }) => (now ? row === now : el.contains(target)));
    const piece = line?.row.s[line.pieces.findIndex((one) => one.contains(target))];
    return line && (piece ? [piece[0]] : [line.row.e, ...line.row.s.map(([born]) => born)]);
  });
  /** @param {Set<number>} lit */
  const light = (lit) => lines.forEach(({ row, pieces, el }) => {
    el.classList.toggle("av-warm", lit.has(row.e));
    pieces.forEach((piece, k) => piece.classList.toggle("av-warm", lit.has(row.s[k][0])));
  });
  return { ...made, draw, light };
}
