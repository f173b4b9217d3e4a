/** Events, contributions and `.grad` in words, as `words.py` tells them. */

/** @import { Ledger, Row } from "./ledger.js" */

import { counted, number, sum } from "./numbers.js";

/** What is to be known before bars of two rows are compared. */
export const OWN_SCALES = "Each row has a scale of its own.";
const FEW = 4;
const TERMS = 5;

/** What an event added ("" for nothing). @param {Ledger} ledger @param {number} e @param {Row} row */
export function contributionText(ledger, e, row) {
  return written(ledger, row.c[e], row.x?.[0][e], "+");
}

/** `.grad` after an event. @param {Ledger} ledger @param {number} e @param {Row} row */
export function gradText(ledger, e, row) {
  if (e < 0) return row.began ? "None" : "not recorded";
  return written(ledger, row.g[e], row.x?.[1][e], "") || "None";
}

/**
 * @param {Ledger} ledger @param {number} norm @param {number[] | null | undefined} exact
 * @param {string} plus what stands before one number above 0
 */
function written(ledger, norm, exact, plus) {
  if (norm < 0) return "";
  if (!exact) return `‖·‖ ${number(norm, ledger.data.digits)}`;
  if (exact.length > 1) return `(${exact.map((x) => number(x)).join(", ")})`;
  return (exact[0] > 0 ? plus : "") + number(exact[0]);
}

/** @param {Ledger} ledger @param {number} e @param {Row} row */
function toldOf(ledger, e, row) {
  const added = contributionText(ledger, e, row);
  const erased = (row.lost[e] ?? []).map((born) => contributionText(ledger, born, row));
  const receives = added ? ` receives ${added}, ` : "";
  const loses = erased.length ? ` (erased ${erased.join(", ")} before any step used it)` : "";
  return `${row.s}${receives}.grad ${gradText(ledger, e, row)}${loses}`;
}

/** @param {Ledger} ledger @param {number} e */
function summary(ledger, e) {
  const has = (/** @type {"c" | "g"} */ key) => ledger.parameters.filter((row) => !(row[key][e] < 0)).length;
  const [adds, holds] = [has("c"), has("g")];
  if (adds) return `${adds} of ${counted(ledger.count, "parameter")} receive a contribution`;
  return `${holds} of ${counted(ledger.count, "parameter")} have a .grad`;
}

/** An event in one sentence; of many parameters only the selected one. @param {Ledger} ledger @param {number} e */
export function sentence(ledger, e, chosen = -1) {
  if (e < 0) return ledger.data.before[0];
  const few = ledger.count <= FEW;
  const rows = ledger.parameters.filter((row) => few || row.p === chosen);
  const parts = rows.map((row) => toldOf(ledger, e, row));
  const told = [...parts, few ? "" : summary(ledger, e), ledger.events.t?.[e]].filter(Boolean).join("; ");
  return `${ledger.head(e)}${told && ": "}${told}.`;
}

/** One term of the sum. @param {Ledger} ledger @param {Row} row @param {{born: number, amount: number}} part */
function term(ledger, row, { born, amount }) {
  const scaled = (/** @type {number} */ x) => (row.signed ? amount : (x * amount) / row.c[born] || 0);
  const all = row.x?.[0][born]?.map((x) => number(scaled(x))) || [number(amount)];
  const from = born < 0 ? ledger.data.unseen : `event ${ledger.index(born)}`;
  return `${all[1] ? `(${all.join(", ")})` : all[0]} (${from})`;
}

/** What a parameter's `.grad` is made of, as a sum. @param {Ledger} ledger @param {number} e @param {Row} row */
export function equation(ledger, e, row) {
  const name = `${row.s}.grad`;
  const total = gradText(ledger, e, row);
  if (e < 0 && !row.began) return `${name}: ${total} before the first event.`;
  if (row.grad(e) === null) return `${name} is None: there is no tensor, which is not zero.`;
  const parts = row.parts(e);
  if (!parts) return `${name}: ${total}. In a run as large as this one, its parts are not shown.`;
  if (!parts.length) return `${name} = ${total}: no contribution is live in it.`;
  const terms = parts.slice(-TERMS).map((part) => term(ledger, row, part));
  const early = parts.slice(0, -TERMS);
  if (early.length) terms.unshift(`${row.signed ? `${number(sum(early))} ` : ""}(${early.length} earlier)`);
  if (!row.x) return `${name}: ${total}, from contributions of norms ${terms.join(", ")}`;
  return `${name} = ${terms.join(" + ").replaceAll("+ −", "− ")}${terms[1] ? ` = ${total}` : ""}`;
}
