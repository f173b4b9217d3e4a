/** Players and explorers of a page: one module with no import and no export. */

import { explore } from "./explorer.js";
import { startAll } from "./page.js";
import { render as play } from "./player.js";

startAll("player", play, "in words");
startAll("explorer", explore, "as a table");
