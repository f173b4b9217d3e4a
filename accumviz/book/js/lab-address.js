/** Permalinks of arrangements: what differs from the start, by name, so that they outlive other changes. */

/** @import { Offer } from "./lab-types.d.ts" */

/** @param {string} id @param {Offer[]} offers @param {number[]} start @param {number[]} choice @param {number} e */
export function linkOf(id, offers, start, choice, e) {
  const told = new URLSearchParams();
  choice.forEach((place, i) => {
    const { name, values } = offers[i];
    if (place !== start[i]) told.set(name, values[place]);
  });
  told.set("e", String(e));
  return `#${id}&${told}`;
}

/**
 * The choice that an address names for the lab `id` (null: another's), and what in it is not known.
 * @param {string} hash @param {string} id @param {Offer[]} offers @param {number[]} start
 */
export function choiceIn(hash, id, offers, start) {
  const told = new URLSearchParams(hash.slice(1));
  if (!id || !told.has(id)) return null;
  const choice = [...start];
  /** @type {string[]} */
  const lost = [];
  for (const [name, value] of told) {
    if (name === id || name === "e") continue;
    const i = offers.findIndex((offer) => offer.name === name);
    const place = i < 0 ? -1 : offers[i].values.indexOf(value);
    if (place < 0) lost.push(`${name}=${value}`.slice(0, 60));
    else choice[i] = place;
  }
  return { choice, lost, e: told.has("e") ? Math.trunc(Number(told.get("e"))) || 0 : null };
}
