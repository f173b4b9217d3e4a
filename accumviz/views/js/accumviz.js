/** The players of a page: one module with no import and no export. */

import { startAll } from "./page.js";
import { render as play } from "./player.js";

startAll("player", play, "in words");
