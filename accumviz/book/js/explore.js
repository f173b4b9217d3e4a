/** Explorers of a page, and its players, which need little more: one module with no import and no export. */

import "../../views/js/accumviz.js";
import { startAll } from "../../views/js/page.js";
import { explore } from "./explorer.js";

startAll("explorer", explore, "as a table");
