/** An explorer in a notebook with a kernel, which records what the page has not. */

/** @import { Notebook } from "../../views/js/types.d.ts" */

import { heard } from "../../views/js/kernel.js";
import { explore } from "./explorer.js";
import { recording } from "./recording.js";

/** A widget's element is bare: a page marks its own. @param {{model: Notebook, el: HTMLElement}} host */
function render({ model, el }) {
  el.classList.add("accumviz", "av-explorer");
  return explore({ model: heard(model), el }, recording);
}

export default { render };
