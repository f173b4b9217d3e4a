/** The arrangements of a lab: which run is whose, and where a choice that was not recorded falls back to. */

/** @import { LabData, LabRun, Offer } from "./lab-types.d.ts" */

import { textOf } from "../../views/js/code.js";
import { together } from "../../views/js/packed.js";

/** The lines of a loop. @param {LabRun} run */
const linesOf = ({ code }) => code[0].lines.map(([, ...parts]) => textOf(parts));

/** The names that lines assign. @param {string[]} lines */
const namesIn = (lines) => lines.flatMap((line) => line.match(/\w+(?= = )/) ?? []);

/**
 * The places of lines that the loop before did not have, and what the line that was moved has taken along, in words.
 * @param {LabRun} run @param {LabRun} before @param {Offer[]} offers @param {string} moved  its role, or ""
 */
export function changesOf(run, before, offers, moved) {
  const [lines, old] = [run, before].map(linesOf);
  const isOther = (/** @type {string} */ role) => moved !== "" && role === moved;
  const rows = run.rows.filter(([n, , role]) => n && (isOther(role) || !old.includes(lines[n - 1])));
  const names = namesIn(lines);
  const along = offers.filter(({ name, line }) => line && name !== moved && rows.some(([, , role]) => role === name));
  const gone = namesIn(old).filter((name) => !names.includes(name));
  const told = [
    ...along.map(({ title }) => ` ${title} moved with it.`),
    ...gone.map((name) => ` ${name} is not used now.`),
  ];
  return { differs: Object.fromEntries(rows.map(([n]) => [n - 1, "changed"])), told: moved && told.join("") };
}

/** @param {LabData} data */
export function arrangementsOf(data) {
  const { grid, tallest, runs, parts, start } = data;
  /** @type {Map<string, LabRun>} */
  const known = new Map();

  /** @param {number[]} choice @returns {LabRun | null} */
  function at(choice) {
    const key = choice.join(".");
    const found = known.get(key) ?? (key in grid ? together(parts, runs[grid[key]]) : null);
    if (found) known.set(key, found);
    return found;
  }
  /**
   * The nearest choice that is recorded: what was changed longest ago goes back to the start, and is named.
   * @param {number[]} choice @param {number[]} touched  the choices that were changed, the latest last
   */
  function nearest(choice, touched) {
    const next = [...choice];
    /** @type {number[]} */
    const back = [];
    const others = next.map((_, i) => i).filter((i) => !touched.includes(i));
    for (const i of [...others, ...touched]) {
      if (at(next)) break;
      if (next[i] === start[i]) continue;
      next[i] = start[i];
      back.push(i);
    }
    return { choice: next, back };
  }
  return { at, nearest, tallest: tallest.map((i) => /** @type {LabRun} */ (together(parts, runs[i]))) };
}
