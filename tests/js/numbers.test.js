import assert from "node:assert/strict";
import { test } from "node:test";

import { clamp, counted, number, shorten } from "../../accumviz/views/js/numbers.js";
import { column, read } from "../../accumviz/views/js/packed.js";

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

test("a packed column has the three first bytes of each float, first all first ones", () => {
  const numbers = [-1, 0, NaN, Infinity, 1, 0.375];
  const bits = [...new Uint32Array(Float32Array.from(numbers).buffer)];
  const bytes = Uint8Array.from([9, ...[24, 16, 8].flatMap((shift) => bits.map((of) => of >> shift & 255))]);
  assert.deepEqual([...column({ at: 1, size: 6 }, bytes)], numbers);
});

test("a plain column reads texts as the numbers that JSON cannot say", () => {
  assert.deepEqual([...column([-1, 2.5, "NaN", "Infinity"])], [-1, 2.5, NaN, Infinity]);
});

test("a payload is read as it stands, and one that was read already is left", async () => {
  assert.deepEqual(await read('{"count": 1}'), { data: { count: 1 } });
  const ready = { data: { count: 2 }, bytes: new Uint8Array(1) };
  assert.equal(await read(ready), ready);
});
