/** Players and explorers, for static pages and for anywidget: one module with no import. */

/** @import { Host } from "./types.d.ts" */

import { explore } from "./explorer.js";
import { startAll } from "./page.js";
import { render as play } from "./player.js";

startAll("player", play, "in words");
startAll("explorer", explore, "as a table");

/** A page marks an element as ours before the module meets it; a widget's element is bare. @param {Host} host */
function render({ model, el }) {
  const kind = model.get("kind");
  el.classList.add("accumviz", `av-${kind}`);
  return (kind === "explorer" ? explore : play)({ model, el });
}

export default { render };
