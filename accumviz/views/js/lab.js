/** Labs, for static pages and for anywidget: one module with no import. */

/** @import { Host } from "./types.d.ts" */

import { bench } from "./lab-bench.js";
import { startAll } from "./page.js";

startAll("lab", bench, "the loop as text");

/** A page marks an element as ours before the module meets it; a widget's element is bare. @param {Host} host */
function render({ model, el }) {
  el.classList.add("accumviz", "av-lab");
  return bench({ model, el });
}

export default { render };
