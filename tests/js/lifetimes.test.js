import assert from "node:assert/strict";
import { test } from "node:test";

import { countUpTo, decode, live, lost, NEVER } from "../../accumviz/views/js/lifetimes.js";

// Two windows of two contributions and a step, zeroed after; one more that nothing consumed.
const NORMS = [1, 1, -1, -1, 1, 1, -1, -1, 1, -1];
const RUNS = [2, 2, 1, 2, 2, 1, 1, 1, 0];
const born = (row, e) => live(row, e).map((k) => row.born[k]);

test("a contribution is live from its backward until it is erased", () => {
  const row = decode({ runs: RUNS, by: [] }, NORMS);
  const found = NORMS.map((_, e) => born(row, e));
  assert.deepEqual(found, [[0], [0, 1], [0, 1], [], [4], [4, 5], [4, 5], [], [8], []]);
});

test("the step that consumes a contribution stands beside what erases it", () => {
  const { erased, consumed } = decode({ runs: RUNS, by: [] }, NORMS);
  assert.deepEqual([...erased], [3, 3, 7, 7, 9]);
  assert.deepEqual([...consumed], [2, 2, 6, 6, NEVER]);
});

test("what is erased before a step used it is lost, unless a collective hands it on", () => {
  assert.deepEqual(lost(decode({ runs: RUNS, by: [] }, NORMS), 9), [8]);
  assert.deepEqual(lost(decode({ runs: RUNS, by: [] }, NORMS), 3), []);
  assert.deepEqual(lost(decode({ runs: [...RUNS.slice(0, -1), -1], by: [] }, NORMS), 9), []);
});

test("what is never erased stays live to the end", () => {
  const row = decode({ runs: [3, 0, 0], by: [] }, [1, 2, 3]);
  assert.deepEqual(born(row, 2), [0, 1, 2]);
  assert.deepEqual(lost(row, 2), []);
});

test("of a group, an early part may outlive a later one", () => {
  const row = decode({ runs: [1, 9, 0, 1, 1, 0], by: [] }, [1, 1, -1, -1]);
  assert.deepEqual([born(row, 1), born(row, 2), born(row, 3)], [[0, 1], [0], [0]]);
  assert.deepEqual(lost(row, 2), [1]);
});

test("contributions that are not finite are contributions, and None is none", () => {
  assert.deepEqual(decode({ runs: [2, 0, 0], by: [] }, [NaN, -1, Infinity]).born, [0, 2]);
  assert.deepEqual(decode({ runs: [], by: [] }, [-1, -1]).born, []);
});

test("numbers are counted up to a limit, which belongs to them", () => {
  const counts = [-1, 0, 1, 2, 5, 9].map((limit) => countUpTo([0, 2, 5], limit));
  assert.deepEqual(counts, [0, 1, 1, 2, 3, 3]);
});
