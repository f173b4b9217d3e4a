import assert from "node:assert/strict";
import { test } from "node:test";

import { clamp, counted, number, shorten } from "../../accumviz/views/js/numbers.js";
import { read, together } from "../../accumviz/views/js/packed.js";

test("numbers are written with a true minus, and shortly", () => {
  const written = [0, -0, -16, 0.25, 1 / 3, 99999, 123456, 1e-4, -2.5e-7, 1e20].map((x) => number(x));
  assert.deepEqual(written, ["0", "0", "−16", "0.25", "0.3333", "99999", "1.235e5", "1e−4", "−2.5e−7", "1e20"]);
});

test("what is no number is named", () => {
  assert.deepEqual([NaN, Infinity, -Infinity].map((x) => number(x)), ["NaN", "∞", "−∞"]);
});

test("a long name is cut in the middle", () => {
  assert.equal(shorten("encoder.layers.11.self_attn.weight", 17), "encoder.…n.weight");
  assert.equal(shorten("weight", 6), "weight");
});

test("a count and its noun agree", () => {
  assert.deepEqual([counted(1, "event"), counted(10000, "event")], ["1 event", "10,000 events"]);
});

test("a number is kept between two others", () => {
  assert.deepEqual([clamp(5, 0, 3), clamp(-1, 0, 3), clamp(2, 0, 3)], [3, 0, 2]);
});

test("a payload is read as it stands, and one that was read already is left", async () => {
  assert.deepEqual(await read('{"count": 1}'), { data: { count: 1 } });
  const ready = { data: { count: 2 } };
  assert.equal(await read(ready), ready);
});

test("a run is put together from its own parts, and has no others", () => {
  const parts = { "e.k": [[1, 2]], "e.h": ["a", "b"], note: ["n"] };
  assert.deepEqual(together(parts, [0, 1, -1]), { e: { k: [1, 2], h: "b" } });
});
