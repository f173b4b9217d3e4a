/** What stands between controls and players: the figures of the runs, and how far apart their gradients are. */

/** @import { Run } from "./types.d.ts" */

import { difference, ROUNDING } from "./compare.js";
import { h } from "../../views/js/dom.js";
import { clamp } from "../../views/js/numbers.js";

/** @type {[number, string][]} */
const TICKS = [[0, "equal"], [ROUNDING, "rounding"], [0.01, "1 %"], [1, "≥ 100 %"]];
/** The meter is logarithmic over so many decades. */
const DECADES = 8;

/** Where a difference stands on the meter, in per cent. @param {number} share */
export const along = (share) => (share === 0 ? 2 : 8 + 90 * clamp((Math.log10(share) + DECADES) / DECADES, 0, 1));

export function figures() {
  const table = h("table.av-figures");
  const verdict = h("p.av-verdict", { "aria-live": "polite" });
  const needle = h("i.av-needle");
  const ticks = TICKS.map(([share, name]) => h("span.av-tick", { style: `left: ${along(share)}%` }, name));
  const title = h("p.av-mtitle", {}, "Difference of the gradient");
  const meter = h("div.av-meter", { "aria-hidden": "true" }, ...ticks, needle);

  /** @param {(Run | null)[]} shown one run, or two */
  function drawTable(shown) {
    const told = shown.map((run) => new Map(run?.figures));
    const names = [...new Set(told.flatMap((run) => [...run.keys()]))];
    const heads = ["A", "B"].map((name) => h("th", { scope: "col" }, name));
    const rows = names.map((name) => {
      const differs = new Set(told.map((run) => run.get(name))).size > 1;
      const cells = told.map((run) => h(differs ? "td.av-differs" : "td", {}, run.get(name) ?? "–"));
      return h("tr", {}, h("th", { scope: "row" }, name), ...cells);
    });
    if (shown.length > 1) rows.unshift(h("tr", {}, h("td"), ...heads));
    table.replaceChildren(...rows);
    table.hidden = !names.length;
  }
  /** @param {(Run | null)[]} shown */
  function draw(shown) {
    drawTable(shown);
    const [a, b] = shown.map((run) => run?.grad);
    const { text, share } = a && b ? difference(a, b) : { text: "", share: null };
    verdict.textContent = text;
    meter.hidden = title.hidden = share === null;
    needle.style.left = `${along(share ?? 0)}%`;
    needle.classList.toggle("av-far", (share ?? 0) > ROUNDING);
  }
  return { el: h("div.av-result", {}, table, h("div.av-apart", {}, title, meter, verdict)), draw };
}
