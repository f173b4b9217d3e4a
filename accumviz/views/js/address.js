/** Permalinks: what follows # in the address names a view and its state. */

import { clamp } from "./numbers.js";

/** @import { At, Choice } from "./types.d.ts" */

const KEYS = /** @type {const} */ (["e", "n", "p", "node"]);

/** @param {URLSearchParams} told @param {string} key */
function whole(told, key) {
  return told.has(key) ? Math.trunc(Number(told.get(key))) || 0 : null;
}

/**
 * The moment that an address names, for the view `id`; null when it names another.
 * @param {string} hash @param {string} id
 */
export function momentIn(hash, id) {
  const told = new URLSearchParams(hash.slice(1));
  if (!id || !told.has(id)) return null;
  const [e, n, p, node] = KEYS.map((key) => whole(told, key));
  return { e: e ?? -1, n, p: p ?? -1, node: node ?? -1 };
}

/** @param {string} id @param {Partial<At>} at */
export function linkTo(id, at) {
  // Only of `n` a number below 0 says something: nodes that are still to be built.
  const told = KEYS.filter((key) => (key === "n" ? Number.isInteger(at.n) : Number(at[key]) >= 0))
    .map((key) => [key, at[key]]);
  return `#${[id, ...told.map(([key, value]) => `${key}=${value}`)].join("&")}`;
}

/**
 * The run that an address names, and the one behind it; null when they do not fit.
 * @param {string} hash @param {number[]} sizes how many values each control offers
 */
export function choicesIn(hash, sizes) {
  const told = new URLSearchParams(hash.slice(1));
  const choice = (/** @type {string} */ key) => told.get(key)?.split(".").map(
    (place, i) => clamp(Math.trunc(Number(place)) || 0, 0, (sizes[i] ?? 1) - 1),
  );
  const [a, b] = [choice("a"), choice("b")];
  if (a?.length !== sizes.length || (b && b.length !== sizes.length)) return null;
  return { a, b: b ?? null };
}

/** @param {string} id @param {Choice} a @param {Choice | null} b */
export function choicesLink(id, a, b) {
  return `${id}&a=${a.join(".")}${b ? `&b=${b.join(".")}` : ""}`;
}
