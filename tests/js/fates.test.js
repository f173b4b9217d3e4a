import assert from "node:assert/strict";
import { test } from "node:test";

import { countUpTo, decode, live, lost, NEVER } from "../../accumviz/views/js/fates.js";

// Two windows of two contributions and a step, zeroed after; one more that nothing consumed.
const NORMS = [1, 1, -1, -1, 1, 1, -1, -1, 1, -1];
const RUNS = [2, 2, 1, 2, 2, 1, 1, 1, 0];
const born = (fates, e) => live(fates, e).map((k) => fates.born[k]);

test("a contribution is live from its backward until it is erased", () => {
  const fates = decode(RUNS, NORMS);
  const found = NORMS.map((_, e) => born(fates, e));
  assert.deepEqual(found, [[0], [0, 1], [0, 1], [], [4], [4, 5], [4, 5], [], [8], []]);
});

test("the step that consumes a contribution stands beside what erases it", () => {
  const { erased, consumed } = decode(RUNS, NORMS);
  assert.deepEqual([...erased], [3, 3, 7, 7, 9]);
  assert.deepEqual([...consumed], [2, 2, 6, 6, NEVER]);
});

test("what is erased before a step used it is lost, unless a collective hands it on", () => {
  assert.deepEqual(lost(decode(RUNS, NORMS), 9), [8]);
  assert.deepEqual(lost(decode(RUNS, NORMS), 3), []);
  assert.deepEqual(lost(decode([...RUNS.slice(0, -1), -1], NORMS), 9), []);
});

test("what is never erased stays live to the end", () => {
  const fates = decode([3, 0, 0], [1, 2, 3]);
  assert.deepEqual(born(fates, 2), [0, 1, 2]);
  assert.deepEqual(lost(fates, 2), []);
});

test("of a group, an early part may outlive a later one", () => {
  const fates = decode([1, 9, 0, 1, 1, 0], [1, 1, -1, -1]);
  assert.deepEqual([born(fates, 1), born(fates, 2), born(fates, 3)], [[0, 1], [0], [0]]);
  assert.deepEqual(lost(fates, 2), [1]);
});

test("contributions that are not finite are contributions, and None is none", () => {
  assert.deepEqual(decode([2, 0, 0], [NaN, -1, Infinity]).born, [0, 2]);
  assert.deepEqual(decode([], [-1, -1]).born, []);
});

test("numbers are counted up to a limit, which belongs to them", () => {
  const counts = [-1, 0, 1, 2, 5, 9].map((limit) => countUpTo([0, 2, 5], limit));
  assert.deepEqual(counts, [0, 1, 1, 2, 3, 3]);
});
