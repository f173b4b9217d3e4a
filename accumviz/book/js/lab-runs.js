/** The arrangements of a lab: which run is whose, and where a choice that was not recorded falls back to. */

/** @import { LabData, LabRun } from "./lab-types.d.ts" */

import { together } from "../../views/js/packed.js";

/** @param {LabData} data */
export function arrangementsOf(data) {
  const { grid, runs, parts, start } = data;
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
  return { at, nearest };
}
