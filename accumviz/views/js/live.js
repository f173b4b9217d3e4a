/** A player in a notebook with a kernel, which hears of each change. */

/** @import { Notebook } from "./types.d.ts" */

import { heard } from "./kernel.js";
import { render as play } from "./player.js";

/** A widget's element is bare: a page marks its own. @param {{model: Notebook, el: HTMLElement}} host */
function render({ model, el }) {
  el.classList.add("accumviz", "av-player");
  return play({ model: heard(model), el });
}

export default { render };
