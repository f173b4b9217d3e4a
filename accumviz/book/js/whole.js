/** All views in one module, for a page that has a lab beside players: most of what they are made of is the same. */

import "./explore.js";
import "./lab.js";
import "./predict.js";
