/** Names that are too long, cut where they do not differ: the rest tells them apart. */

import { shorten } from "./numbers.js";

/** The parts of a name, each with what stands behind it: "a.", "weight ", "(unsharded)". @param {string} name */
const partsOf = (name) => name.match(/[^. ]+[. ]*|^[. ]+/g) ?? [name];

/** @param {string} part */
const bare = (part) => part.replace(/[. ]+$/, "");

/**
 * How many letters of a part tell it from those that stand in its place.
 * @param {string} part @param {Set<string>} others
 */
function least(part, others) {
  let letters = 1;
  while (letters < part.length && [...others].some((one) => one !== part && one.startsWith(part.slice(0, letters)))) {
    letters++;
  }
  return letters;
}

/**
 * How a list of names is written in so many letters: the outer parts go down to the letters that tell them apart.
 * @param {string[]} names @returns {(name: string, limit: number) => string}
 */
export function abbreviated(names) {
  /** @type {Map<string, Set<string>>} */
  const inside = new Map();
  for (const name of names) {
    let before = "";
    for (const part of partsOf(name)) {
      inside.set(before, (inside.get(before) ?? new Set()).add(bare(part)));
      before += `${bare(part)}.`;
    }
  }
  return (name, limit) => {
    const parts = partsOf(name);
    let before = "";
    let over = name.length - limit;
    for (let i = 0; i < parts.length && over > 0; i++) {
      const whole = bare(parts[i]);
      const needs = least(whole, inside.get(before) ?? new Set());
      const last = i === parts.length - 1;
      // The last part keeps what there is room for, and shows that it was cut.
      const kept = last ? Math.max(needs, whole.length - over - 1) : needs;
      before += `${whole}.`;
      if (kept + Number(last) >= whole.length) continue;
      parts[i] = last ? `${whole.slice(0, kept)}…` : whole.slice(0, kept) + parts[i].slice(whole.length);
      over -= whole.length - kept - Number(last);
    }
    return shorten(parts.join(""), limit);
  };
}
