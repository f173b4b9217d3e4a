/** Players and explorers in a notebook with a kernel: what a page has, and what only a kernel can. */

/** @import { Notebook } from "./types.d.ts" */

import { explore } from "./explorer.js";
import { heard, recording } from "./kernel.js";
import { render as play } from "./player.js";

/** A widget's element is bare: a page marks its own. @param {{model: Notebook, el: HTMLElement}} host */
function render({ model, el }) {
  const kind = model.get("kind");
  el.classList.add("accumviz", `av-${kind}`);
  const host = { model: heard(model), el };
  return kind === "explorer" ? explore(host, recording) : play(host);
}

export default { render };
