import assert from "node:assert/strict";
import { test } from "node:test";

import { parse, same, usualReason } from "../../accumviz/book/js/answers.js";
import { difference } from "../../accumviz/book/js/compare.js";
import { along } from "../../accumviz/book/js/figures.js";
import { besides, endOf, runsOf } from "../../accumviz/book/js/runs.js";

const run = (rows, more = {}) => ({ of: ["w", 0], rows, exact: true, steps: rows.length, end: false, ...more });

test("two runs are equal, equal to rounding, or differ by a share", () => {
  assert.equal(difference(run([[1]]), run([[1]])).text, "The gradients at the step are equal, bit for bit.");
  const near = difference(run([[1]]), run([[1 + 1e-7]]));
  assert.match(near.text, /are equal to rounding: they differ by 1e−7 of their size\.$/);
  const text = "The gradients at the 2 steps differ by at most 0.75 of their size; there, A has 4 times the norm of B.";
  assert.deepEqual(difference(run([[4], [4]]), run([[4], [1]])), { text, share: 0.75 });
  assert.match(difference(run([[1.002]]), run([[1]])).text, /differ by 0.002 of their size\.$/);
});

test("of norms it is said that they are the parameters', and all of them are another number", () => {
  const { text } = difference(run([[3, 0]], { exact: false }), run([[0, 4]], { exact: false }));
  assert.match(text, /^The norms of the parameters’ gradients .* by 1.25 of their size; A has 0.75/);
});

test("what has no gradient or no finite one is not compared, and equal infinities are equal", () => {
  const told = (a, b) => difference(run(a), run(b));
  const text = "The gradients at step 2 cannot be compared: B has none.";
  assert.deepEqual(told([[2], [2]], [[2], [null]]), { text, share: null });
  assert.equal(told([[null]], [[null]]).share, 0);
  assert.equal(told([["Infinity"]], [["Infinity"]]).share, 0);
  assert.match(told([["NaN"]], [[1]]).text, /cannot be compared: one is not finite/);
  assert.equal(told([], [[1]]).share, null);
  assert.equal(difference(run([[1]]), run([[1]], { of: ["v", 0] })).share, null);
});

test("runs of different lengths say so", () => {
  const { text } = difference(run([[1], [1]]), run([[1]]));
  assert.match(text, /at the first step are equal, bit for bit\. A takes 2 steps, B 1\.$/);
});

test("the meter runs from equal over rounding to all of it", () => {
  assert.deepEqual([0, 1, 10].map(along), [2, 98, 98]);
  assert.ok(along(1e-5) > along(1e-8));
});

test("a choice leads to its run, whose parts are put together", () => {
  const controls = [{ labels: ["1", "2"] }, { labels: ["a", "b"] }];
  const shown = [{ error: "x" }, { data: { count: 0 }, bytes: [1, 2] }];
  const runs = runsOf({ controls, grid: [0, 0, 0, 1], runs: shown, parts: [7] }, Uint8Array.from([1, 2, 3]));
  assert.deepEqual(runs.at([1, 1]).whole, { data: { count: 7 }, bytes: Uint8Array.from([2]) });
  assert.equal(runs.at([0, 1]).error, "x");
});

test("two runs side by side have room for the longer one and the larger graph", () => {
  const kinds = [["backward"], ["step"]];
  const drawn = (w, h) => ({ graphs: [{ l: 0 }], layouts: [{ w, h }], of: { 0: 0 } });
  const whole = (k = [0, 1, 0]) =>
    ({ data: { e: { c: [], k }, code: [], kinds, ...drawn(100 * k.length, 900 / k.length) } });
  const { data } = besides(whole(), whole([0, 0, 0, 1]));
  assert.deepEqual([data.length, data.room], [4, { w: 400, h: 300 }]);
  assert.equal(endOf(whole()), 1);
});

test("many ways of writing a number are understood", () => {
  const said = ["−2.5", "1/2", " 2E3 ", "+ 4", "none", "-inf", "∞", ".5", "1⁄4"].map(parse);
  assert.deepEqual(said, [-2.5, 0.5, 2000, 4, null, -Infinity, Infinity, 0.5, 0.25]);
  assert.deepEqual(["", "1/0", "two", "1 2", "0x10"].map(parse), Array(5).fill(undefined));
});

test("an answer is right within its tolerance, and None is only None", () => {
  assert.ok(same(-19.91, -20, 0.005) && !same(-19.89, -20, 0.005));
  assert.ok(same(1e-9, 0, 0.005) && !same(null, 0, 0.005) && same(null, null, 0));
  assert.ok(same(Infinity, Infinity, 0) && !same(1e308, Infinity, 0.5));
});

test("a usual mistake gets its reason", () => {
  assert.match(usualReason(0, null, 0), /None is not 0/);
  assert.match(usualReason(null, 0, 0), /0 is not None/);
  assert.match(usualReason(20, -20, 0.005), /the sign is not/);
  assert.equal(usualReason(3, -20, 0.005), "");
});
