import assert from "node:assert/strict";
import { test } from "node:test";

import { parse, same, usualReason } from "../../accumviz/views/js/answers.js";
import { difference } from "../../accumviz/views/js/compare.js";
import { along } from "../../accumviz/views/js/figures.js";
import { endOf, runsOf, toOneScale } from "../../accumviz/views/js/runs.js";

const run = (rows, more = {}) => ({ of: ["w", 0], rows, exact: true, steps: rows.length, end: false, ...more });

test("two runs are equal, equal to rounding, or differ by a share", () => {
  assert.equal(difference(run([[1]]), run([[1]])).text, "The gradients at the step are equal, bit for bit.");
  const near = difference(run([[1]]), run([[1 + 1e-7]]));
  assert.match(near.text, /are equal to rounding: they differ by 1e−7 of their size\.$/);
  const far = difference(run([[4], [4]]), run([[4], [1]]));
  const text = "Of 2 steps, step 2 differs most: its gradients by 0.75 of their size; there, A has 4";
  assert.deepEqual(far, { text: `${text} times the norm of B.`, share: 0.75 });
});

test("what is said of all steps holds for each of them, and two of them are both", () => {
  const told = (...rows) => difference(run(rows.map(([a]) => [a])), run(rows.map(([, b]) => [b]))).text;
  const all = "differ by 0.75 of their size; A has 4 times the norm of B.";
  assert.equal(told([4, 1], [8, 2]), `The gradients at both steps ${all}`);
  assert.equal(told([4, 1], [8, 2], [4, 1]), `The gradients at all 3 steps ${all}`);
  assert.equal(told([4, 4], [8, 8]), "The gradients at both steps are equal, bit for bit.");
  const near = /^The gradients at both steps .* they differ by at most 1e−7 of their size\.$/;
  assert.match(told([4, 4], [8, 8 + 8e-7]), near);
  const longer = difference(run([[4], [4], [4]]), run([[4], [1]])).text;
  assert.match(longer, /^Of the first 2 steps, step 2 differs most: .* the norm of B\. A takes 3, B 2\.$/);
  const close = difference(run([[1.002]]), run([[1]]));
  assert.match(close.text, /differ by 0.002 of their size\.$/);
});

test("of norms it is said that they are the parameters', and all of them are another number", () => {
  const { text } = difference(run([[3, 0]], { exact: false }), run([[0, 4]], { exact: false }));
  assert.match(text, /^The norms of the parameters’ gradients .* by 1.25 of their size; A has 0.75/);
});

test("None is not 0, and what has no gradient is not compared", () => {
  assert.match(difference(run([[0]]), run([[null]])).text, /only in that one is None where the other is 0/);
  assert.match(difference(run([[2]]), run([[null]])).text, /cannot be compared: B has none\.$/);
  const early = difference(run([[2], [2]]), run([[2], [null]]));
  assert.deepEqual(early, { text: "Of 2 steps, step 2 cannot be compared: B has none.", share: null });
  assert.equal(difference(run([]), run([[1]])).share, null);
  assert.equal(difference(run([[1]]), run([[1]], { of: ["v", 0] })).share, null);
});

test("where no step can be compared, no step is told of alone", () => {
  const none = difference(run([[1], [2]]), run([[null], [null]])).text;
  assert.equal(none, "The gradients at both steps cannot be compared: B has none.");
});

test("equal infinities are equal, and others are not compared", () => {
  assert.equal(difference(run([["Infinity"]]), run([["Infinity"]])).share, 0);
  const { text, share } = difference(run([["NaN"]]), run([[1]]));
  assert.match(text, /cannot be compared: one is not finite/);
  assert.equal(share, null, "it has no place on the meter");
});

test("runs of different lengths say so", () => {
  const { text } = difference(run([[1], [1]]), run([[1]]));
  assert.match(text, /at the first step are equal, bit for bit\. A takes 2, B 1\.$/);
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

test("two runs side by side share a scale", () => {
  const kinds = [["backward"], ["step"]];
  const drawn = (w, h) => ({ graphs: [{ l: 0 }], layouts: [{ w, h }], of: { 0: 0 } });
  const whole = (r, b, k = [0, 1, 0]) =>
    ({ data: { p: [{ n: "w", r }], e: { c: [], b, k }, code: [], kinds, ...drawn(100 * k.length, 900 / k.length) } });
  const { data } = toOneScale(whole([-1, 2], [8]), whole([-3, "1"], [5, null, 9], [0, 0, 0, 1]));
  assert.deepEqual([data.p[0].r, data.most, data.length], [[-3, 2], 9, 4]);
  assert.deepEqual(data.room, { w: 400, h: 300 });
  assert.equal(endOf(whole([0, 0])), 1);
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
