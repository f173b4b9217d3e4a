/** One line of the `.grad` pane: a name, a bar of the contributions live in its `.grad`, and the total. */

/** @import { App } from "./player.js" */
/** @import { Row } from "./ledger.js" */
/** @import { Part } from "./types.d.ts" */

import { h, put } from "./dom.js";
import { clamp, counted, number } from "./numbers.js";
import { along, drawn, isTorn, joined, pieceOn } from "./parts.js";
import { contributionText, gradText } from "./words.js";

/**
 * @typedef {object} Filling  what one line is to show
 * @property {Row} row
 * @property {number} e  the event until which its `.grad` has come
 * @property {number} now  the event that the page shows
 * @property {boolean} open  whether this group is unfolded
 * @property {boolean} chosen
 * @property {number} width  of a bar, in pixels
 * @property {number} letters  of a name that fit
 */

/** So many pixels of a bar are seen beside the mark at its end, where the longest one has all the room. */
const SEEN = 4;

/** @param {App} app @param {number} tall @param {(row: Row) => void} choose */
export function barOf({ ledger, ghost }, tall, choose) {
  const name = h("span.av-of");
  const zero = h("i.av-zero");
  const end = h("i.av-end");
  const total = h("span.av-total");
  const behind = h("i.av-ghost");
  const bar = h("span.av-bar", { "aria-hidden": "true" }, zero, end, behind);
  /** @type {Row} */
  let shown;
  let was = "";
  const click = () => choose(shown);
  const el = h("div.av-row", { role: "treeitem", style: `height: ${tall}px`, click }, name, bar, total);
  /** @type {HTMLElement[]} */
  const pieces = [];

  /** @param {HTMLElement} piece @param {Part} part @param {Filling} filling @param {number} start */
  function fillPiece(piece, part, { row, now, width }, start) {
    const { share, style, torn, hidden } = pieceOn(row.r, start, part.height);
    const color = part.born < 0 ? "var(--av-muted)" : ledger.color(part.born)[0];
    const ink = part.look === "new" ? ledger.color(now)[1] : "inherit";
    const told = part.told || number(part.amount, row.signed ? 4 : 3);
    piece.hidden = hidden;
    piece.className = `av-part av-${part.look}${torn}`;
    piece.style.cssText = `${style}--av-c: ${color}; color: ${ink}`;
    piece.replaceChildren(share * width > told.length * 7 + 6 ? h("span", {}, told) : "");
  }
  /**
   * Positive parts grow to the right of zero, negative ones to the left.
   * @param {Part[]} parts @param {Filling} filling
   */
  function fillPieces(parts, filling) {
    let [under, over] = [0, 0];
    while (pieces.length < parts.length) {
      const piece = h("b");
      pieces.push(piece);
      end.before(piece);
    }
    pieces.forEach((piece, i) => {
      const part = parts[i];
      piece.hidden = !part;
      if (!part) return;
      fillPiece(piece, part, filling, part.height < 0 ? under : over);
      if (part.height < 0) under += part.height;
      else over += part.height;
    });
  }
  /** @param {Filling} filling */
  function fillNames({ row, e, open, letters }) {
    const sign = row.in ? (open ? "▾ " : "▸ ") : "";
    const about = row.in ? `: ${counted(row.in[1] - row.in[0], "parameter")}` : `, shape (${row.d.join(", ")})`;
    name.textContent = sign + ledger.name(row, Math.floor(letters) - sign.length);
    name.title = row.n + about;
    total.textContent = total.title = gradText(ledger, e, row);
    // Elements without room stand in the title, and in words once the row is selected.
    if (row.x && e >= 0 && total.scrollWidth > total.clientWidth) total.textContent = `‖·‖ ${number(row.g[e])}`;
  }
  /** What stands beside the end of a bar: which parts were lost, or how short it is. */
  function remark(/** @type {Filling} */ { row, e, width }, /** @type {number} */ reach) {
    const unused = row.lost[e] ?? [];
    const told = unused.length === 1 ? contributionText(ledger, unused[0], row) : counted(unused.length, "part");
    if (unused.length) return `× ${told} unused`;
    const times = Math.max(...row.r.map(Math.abs)) / Math.abs(reach);
    return reach && times * SEEN > width ? `1/${number(times, 2)} of the scale` : "";
  }
  /** @param {Filling} filling */
  function fill(filling) {
    const { row, e, now, open, chosen } = filling;
    const key = [row.p, ...Object.values(filling)].join();
    if (key === was) return; // of many steps through a graph few bring anything to a row
    was = key;
    const { end: reach, parts, absent, broken } = drawn(e, row, now);
    const x = (/** @type {number} */ value) => `${100 * clamp(along(row.r, value), 0, 1)}%`;
    shown = row;
    fillNames(filling);
    bar.classList.toggle("av-broken", broken);
    el.className = `av-row${row.in ? " av-group" : ""}${absent ? " av-none" : ""}`;
    zero.style.left = x(0);
    end.hidden = absent || broken || isTorn(along(row.r, reach));
    end.style.left = x(reach);
    bar.dataset.told = remark(filling, reach);
    bar.style.setProperty("--av-x", x(reach));
    const other = ghost?.(e, row) ?? null;
    behind.hidden = other === null;
    behind.style.cssText = pieceOn(row.r, 0, other ?? 0).style;
    fillPieces(broken || absent ? [] : joined(ledger, parts, filling.width / span(row)), filling);
    put(el, { "aria-selected": chosen, "aria-expanded": row.in ? open : "undefined" });
  }
  return { el, name, bar, fill, row: () => shown };
}

/** @param {Row} row */
const span = ({ r: [low, high] }) => high - low || 1;
