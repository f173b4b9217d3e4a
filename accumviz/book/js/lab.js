/** Labs, for static pages and for anywidget: one module with no import. */

/** @import { Notebook } from "../../views/js/types.d.ts" */

import { heard } from "../../views/js/kernel.js";
import { bench } from "./lab-bench.js";
import { startAll } from "../../views/js/page.js";

startAll("lab", bench, "the loop as text");

/** A widget's element is bare: a page marks its own. @param {{model: Notebook, el: HTMLElement}} host */
function render({ model, el }) {
  el.classList.add("accumviz", "av-lab");
  return bench({ model: heard(model), el });
}

export default { render };
