import assert from "node:assert/strict";
import { test } from "node:test";

import { barAt } from "../../accumviz/views/js/shares.js";

const row = (e, ...born) => ({ e, o: "loss", l: 0, t: "1", w: "", s: born.map((b) => [b, 0, 1, "new", "1"]) });

test("a bar speaks of its step, of the backwards that it uses first, and of what comes between", () => {
  const rows = [row(2, 0, 1), row(6, 0, 1, 4), row(9, 8)];
  const found = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map((e) => rows.indexOf(barAt(rows, e)));
  assert.deepEqual(found, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
});

test("of several objectives in a step the one that a backward is for is found", () => {
  const rows = [row(4, 0), row(4, 1)];
  assert.deepEqual([1, 4].map((e) => rows.indexOf(barAt(rows, e))), [1, 0]);
});
