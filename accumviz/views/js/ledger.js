/** A ledger as the page has it: events, rows, and what each `.grad` held. */

/** @import { Data, Plain, RowData } from "./types.d.ts" */

import { abbreviated } from "./names.js";

/** The looks of parts, as `layout.LOOKS` numbers them. */
const LOOKS = /** @type {const} */ (["new", "live", "used", "unseen"]);

/** @type {[string, string]} */
const PLAIN_COLOR = ["#0072B2", "#fff"];

/** A parameter, or a group of them: its contributions `c` and its `.grad` `g`, event by event, below 0 for none. */
export class Row {
  /** Where the parts of each bar begin. @type {number[] | undefined} */
  #starts;

  /** @param {RowData} told @param {number} p @param {Data} data @param {ArrayLike<number>[]} columns */
  constructor(told, p, data, [c, g]) {
    const numbers = (/** @type {Plain[] | null} */ values) => values && values.map(Number);
    const exact = data.x[p]?.map((side) => side.map(numbers));
    this.p = p;
    this.n = told.n;
    this.s = told.s;
    this.d = told.d;
    this.in = told.in;
    this.c = c;
    this.g = g;
    /** All elements of contributions and `.grad`, of a small parameter. */
    this.x = exact;
    /** By event, the contributions that it erased before any step used them. */
    this.lost = told.lost ?? {};
    this.r = told.r.map(Number);
    /** By what a gradient scaler has multiplied `.grad`, event by event. */
    this.scales = told.k;
    this.signed = Boolean(exact) && told.d.every((side) => side === 1);
    this.lanes = data.lanes;
    /** Whether its `.grad` before the first event is known: it was None. */
    this.began = !told.u;
  }

  /** The parts of its `.grad` after an event, the oldest first; null in a run so large that none are told. */
  parts(/** @type {number} */ e) {
    if (!this.lanes.n) return null;
    const { n, age, by, look } = this.lanes;
    let last = 0;
    this.#starts ??= n[this.p].map((count) => (last += count) - count);
    const from = this.#starts[e] ?? 0;
    return Array.from({ length: n[this.p][e] ?? 0 }, (_, k) => {
      const [years, times] = [age[this.p][from + k], Number(by[this.p][from + k])];
      const born = years < 0 ? -1 : e - years;
      const norm = born < 0 ? 1 : Math.abs(Number(this.added(born)));
      return { born, amount: norm && norm * times, look: LOOKS[Number(look[this.p][from + k])] };
    });
  }

  /** How far the bar of an event reaches, whose `.grad` is so large. @param {number} e @param {number} grad */
  reach(e, grad) { return grad / (this.scales?.[e] ?? 1); }

  /** What was added (null: nothing): signed where the sign is known. @param {number} e @returns {number | null} */
  added(e) {
    if (this.c[e] < 0) return null;
    return this.signed ? /** @type {any} */ (this.x)[0][e][0] : this.c[e];
  }

  /** `.grad` after an event (null: none). @param {number} e @returns {number | null} */
  grad(e) {
    if (e < 0 || this.g[e] < 0) return null;
    return this.signed ? /** @type {any} */ (this.x)[1][e][0] : this.g[e];
  }
}

/** The norms of what all elements are known of, -1 for None. @param {Data} data @param {number} side */
function normsOf({ p, x }, side) {
  const norm = (/** @type {Plain[] | null} */ values) => (values ? Math.hypot(...values.map(Number)) : -1);
  return Float64Array.from(p.flatMap((_, row) => x[row][side].map(norm)));
}

export class Ledger {
  /** @param {Data} data */
  constructor(data) {
    const events = data.e;
    this.data = data;
    this.events = events;
    this.length = events.k.length;
    this.count = data.count;
    this.kinds = events.k.map((kind) => data.kinds[kind][0]);
    this.retained = new Set(events.retained);
    /** @type {Map<number, [string, string]>} */
    this.colors = new Map(data.colors.map(([label, color, ink]) => [label, [color, ink]]));
    const columns = [data.c, data.g].map((norms, side) =>
      (norms ? Float64Array.from(norms, Number) : normsOf(data, side)));
    /** Parameters, then groups of them. */
    this.rows = data.p.map((row, p) => {
      const [start, stop] = [p * this.length, (p + 1) * this.length];
      return new Row(row, p, data, columns.map((values) => values.subarray(start, stop)));
    });
    this.parameters = this.rows.slice(0, this.count);
    this.groups = this.rows.slice(this.count);
    /** @type {((name: string, limit: number) => string) | undefined} */
    this.abbreviate = undefined;
    let last = -1;
    /** Of each event the last backward until then. */
    this.backward = this.kinds.map((kind, e) => (last = kind === "backward" ? e : last));
  }

  /**
   * A row's name in so many letters.
   * @param {Row} row @param {number} letters
   */
  name(row, letters) {
    this.abbreviate ??= abbreviated(this.rows.map(({ n }) => n));
    return this.abbreviate(row.n, letters);
  }

  /** Whether bars of two rows cannot be compared by their lengths. */
  get ownScales() {
    const drawn = this.rows.filter(({ r }) => r.some(Boolean));
    return new Set(drawn.map(({ r }) => r.join())).size > 1;
  }

  /** An event's index in the whole ledger. @param {number} e */
  index(e) { return this.events.i && e >= 0 ? this.events.i[e] : e; }
  /**
   * What stands above a column: on end, or in two lines.
   * @param {number} e
   */
  title(e) { return this.data.heads[this.events.u[e]]; }
  /** @param {number} e */
  head(e) { return e < 0 ? "Before the first event" : `Event ${this.index(e)}, ${this.events.h[e]}`; }
  /** The colour of an event's label, and the ink on it. @param {number} e */
  color(e) { return this.colorOf(this.events.l[e]); }
  /** @param {number} label */
  colorOf(label) { return this.colors.get(label) || PLAIN_COLOR; }
  /** @param {number} e */
  kindColor(e) { return e < 0 ? "var(--av-muted)" : this.data.kinds[this.events.k[e]][1]; }
}
