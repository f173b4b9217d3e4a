import assert from "node:assert/strict";
import { test } from "node:test";

import { parse, same, usualReason } from "../../accumviz/book/js/answers.js";
import { difference } from "../../accumviz/book/js/compare.js";
import { before, endOf, runsOf } from "../../accumviz/book/js/runs.js";
import { beside } from "../../accumviz/views/js/ghost.js";

const run = (rows, more = {}) => ({ of: ["w", 0], rows, exact: true, steps: rows.length, end: false, ...more });

test("two runs are equal, equal up to rounding, or differ by two numbers or a share of the larger gradient", () => {
  assert.equal(difference(run([[1]]), run([[1]])), "The gradients at the step are equal, bit for bit.");
  const near = difference(run([[1]]), run([[1 + 1e-7]]));
  assert.match(near, /are equal up to rounding \(relative difference 1e−7\)\.$/);
  assert.equal(difference(run([[4], [4]]), run([[4], [-1]])),
    "The gradients at the 2 steps differ, most at step 2: 4 here, −1 in the outline.");
  assert.match(difference(run([[4]]), run([[1]])), /at the step differ: 4 here, 1 in the outline\.$/);
  assert.equal(difference(run([[4, 0], [4, 0]]), run([[4, 0], [1, 0]])),
    "The gradients at the 2 steps differ, most at step 2: by 75 % of the larger one. " +
    "This run’s is 4 times as large as the outline’s.");
  assert.match(difference(run([[1.0002]]), run([[1]])), /differ by 0.02 % of the larger one\.$/);
});

test("of norms it is said that they are the parameters', and all of them are another number", () => {
  const text = difference(run([[3, 0]], { exact: false }), run([[0, 4]], { exact: false }));
  assert.match(text, /^The norms of the parameters’ gradients .* by 125 % of the larger one\. This run’s is 0.75/);
});

test("what has no gradient or no finite one is not compared, and equal infinities are equal", () => {
  const told = (a, b) => difference(run(a), run(b));
  const text = "The gradients at step 2 cannot be compared: the outline has none.";
  assert.equal(told([[2], [2]], [[2], [null]]), text);
  for (const same of [[[null]], [["Infinity"]]]) assert.match(told(same, same), /are equal, bit for bit/);
  assert.match(told([["NaN"]], [[1]]), /cannot be compared: one is not finite/);
  assert.match(told([], [[1]]), /^No gradient/);
  assert.match(difference(run([[1]]), run([[1]], { of: ["v", 0] })), /different parameters/);
});

test("runs of different lengths say so", () => {
  const text = difference(run([[1], [1]]), run([[1]]));
  assert.match(text, /at the first step are equal, bit for bit\. This run takes 2 steps, the outline 1\.$/);
});

test("a choice leads to its run, whose parts are put together", () => {
  const controls = [{ labels: ["1", "2"] }, { labels: ["a", "b"] }];
  const shown = [{ error: "x" }, { data: [0] }];
  const runs = runsOf({ controls, grid: [0, 0, 0, 1], runs: shown, parts: { count: [7] } });
  assert.deepEqual(runs.at([1, 1]).whole, { data: { count: 7 } });
  assert.equal(runs.at([0, 1]).error, "x");
  assert.equal(runs.right([0, 0]), null);
  const several = runsOf({ controls, grid: [0, 1, 1, 1], runs: [{ error: "x" }, { right: 1 }], parts: {} });
  assert.deepEqual([several.right([0, 0]), several.right([1, 0])], [[0, 1], [1, 0]], "the nearest");
});

test("a run ends with its last step, and is marked where its lines differ from those of the run behind", () => {
  const whole = (text, c) => ({ data: {
    e: { c, k: [0, 1, 0] }, kinds: [["backward"], ["step"]],
    code: [{ name: "a", lines: [[1, "x"], [2, text], [3, "z"]] }],
  } });
  assert.equal(endOf(whole("y", [])), 1);
  const { data } = before(whole("y", [0, 1, 2]), whole("why", [0, 1]));
  assert.deepEqual(data.differs, { 1: "not in the other run", 2: "runs in one of the two only" });
});

test("windows of two runs end together, and what comes just before their ends", () => {
  const [b, s, z] = ["backward", "step", "zero_grad"];
  assert.deepEqual(beside([b, b, b, s], [b, s]), [0, 0, 0, 1]);
  assert.deepEqual(beside([b, s, z], [b, b, b, s]), [2, 3, undefined]);
  assert.deepEqual(beside([z, b, b, s, b], [z, b, s, z, b]), [0, 1, 1, 2, 4]);
  assert.deepEqual(beside([z, b, s, z, b, s], [b, s, b, s]), [undefined, 0, 1, undefined, 2, 3]);
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
