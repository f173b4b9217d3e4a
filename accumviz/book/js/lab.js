/** Labs on static pages: one module with no import. */

import { bench } from "./lab-bench.js";
import { startAll } from "../../views/js/page.js";

startAll("lab", bench, "the loop as text");
