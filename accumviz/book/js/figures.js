/** The figures of the run that is shown, beside those of the run behind, and how far apart their gradients are. */

/** @import { Run } from "./types.d.ts" */

import { difference } from "./compare.js";
import { group, h } from "../../views/js/dom.js";

export function figures() {
  const list = h("dl.av-figures");
  const verdict = h("p.av-verdict", { "aria-live": "polite" });
  const el = h("div.av-pane.av-in-figures", group("Figures"), list, verdict);

  /** @param {Run} run @param {Run | null} other */
  function draw(run, other) {
    const behind = new Map(other?.figures);
    list.replaceChildren(...(run.figures ?? []).map(([name, value]) => {
      const was = behind.get(name) ?? value;
      const beside = was === value ? [] : [h("dd.av-behind", { title: "of the outline" }, was)];
      return h("div", {}, h("dt", {}, name), h("dd", {}, value), ...beside);
    }));
    verdict.textContent = run.grad && other?.grad ? difference(run.grad, other.grad) : "";
  }
  return { pane: { name: "figures", el, draw() {} }, draw };
}
