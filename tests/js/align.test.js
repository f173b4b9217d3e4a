import assert from "node:assert/strict";
import { test } from "node:test";

import { aligned, differing, nearest } from "../../accumviz/book/js/align.js";

const ACCUMULATED = ["backward", "backward", "backward", "step", "zero_grad"];
const WHOLE = ["backward", "step", "zero_grad"];

test("steps of two runs stand side by side, and the shorter one waits before its own", () => {
  assert.deepEqual(aligned(ACCUMULATED, WHOLE), [[-1, -1], [0, 0], [1, 0], [2, 0], [3, 1], [4, 2]]);
  assert.deepEqual(aligned(WHOLE, ACCUMULATED).map(([a, b]) => [b, a]), aligned(ACCUMULATED, WHOLE));
});

test("every event of both runs is reached, in order", () => {
  const long = [...WHOLE, ...WHOLE, ...ACCUMULATED];
  for (const [a, b] of [[long, ACCUMULATED], [long, []], [["step", "step"], ACCUMULATED], [WHOLE, long]]) {
    const pairs = aligned(a, b, 0);
    [a, b].forEach((kinds, side) => {
      const seen = pairs.map((pair) => pair[side]);
      assert.deepEqual([...seen].sort((x, y) => x - y), seen);
      assert.deepEqual([...new Set(seen)].filter((e) => e >= 0 && e < kinds.length), kinds.map((_, e) => e));
    });
  }
});

test("a moment is found by where two runs stand", () => {
  const pairs = aligned(ACCUMULATED, WHOLE);
  assert.deepEqual(pairs[nearest(pairs, [3, 1])], [3, 1]);
  assert.deepEqual(pairs[nearest(pairs, [9, 2])], [4, 2]);
});

test("lines differ that the other run has not, or does not run", () => {
  const run = (texts, c) => ({ code: [{ lines: texts.map((text, i) => [i + 1, ...text]) }], e: { c } });
  const divided = run([["loss = f(x)"], ["(loss / 2)", ["string", ".backward()"]], ["zero()"], [""]], [1, 2]);
  const not = run([["loss = f(x)"], ["loss.backward()"], ["zero()"], [""]], [1]);
  const [absent, only] = ["not in the other run", "runs in one of the two only"];
  assert.deepEqual(differing(divided, not), { 1: absent, 2: only });
  assert.deepEqual(differing(not, divided), { 1: absent, 2: only });
  assert.deepEqual(differing(not, not), {});
});

test("a line that stands twice is two lines, of which one may run", () => {
  const run = (c) => ({ code: [{ lines: ["step()", "", "step()"].map((text, i) => [i + 1, text]) }], e: { c } });
  const [first, second] = [run([0]), run([2])];
  const only = "runs in one of the two only";
  assert.deepEqual([differing(first, second), differing(second, first)], [{ 0: only, 2: only }, { 0: only, 2: only }]);
});
