import assert from "node:assert/strict";
import { test } from "node:test";

import { reached } from "../../accumviz/views/js/weights.js";

test("stations are reached event by event, the first before any", () => {
  const stations = [[-1, 0, 0, "", ""], [2, 1, 1, "", ""], [5, 2, 2, "", ""]];
  assert.deepEqual([-1, 0, 2, 4, 5, 9].map((e) => reached(stations, e)), [1, 1, 2, 2, 3, 3]);
  assert.equal(reached([[2, 0, 0, "", ""]], -1), 0);
});
