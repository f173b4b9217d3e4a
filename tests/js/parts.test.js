import assert from "node:assert/strict";
import { test } from "node:test";

import { Ledger } from "../../accumviz/views/js/ledger.js";
import { drawn, joined } from "../../accumviz/views/js/parts.js";
import { equation, sentence } from "../../accumviz/views/js/words.js";

/** A backward of −16, one of −4, a clip to −1, a step, a zero_grad. */
function ledger(change = {}) {
  const [added, grad] = [[[-16], [-4], null, null, null], [[-16], [-20], [-1], [-1], null]];
  const norms = (side) => side.map((value) => (value ? Math.abs(value[0]) : -1));
  return new Ledger({
    kinds: [["backward", "#000"], ["clip", "#111"], ["step", "#222"], ["zero_grad", "#333"]],
    colors: [[0, "#0072B2", "#fff"]],
    e: { k: [0, 0, 1, 2, 3], h: ["backward", "backward", "clip", "step", "zero_grad"], l: [0, 0, 1, 1, 1],
      c: [-1, -1, -1, -1, -1], skipped: [], retained: [] },
    count: 1,
    p: [{ n: "w", s: "w", d: [1], r: [-20, 0] }],
    lanes: {
      n: [[1, 2, 2, 2, 0]], age: [[0, 1, 0, 2, 1, 3, 2]], by: [[-1, -1, -1, -0.05, -0.05, -0.05, -0.05]],
      look: ["0101122"],
    },
    x: { 0: [added, grad] },
    c: norms(added),
    g: norms(grad),
    digits: 4,
    ...change,
  });
}
const amounts = (parts) => parts.map(({ amount }) => amount);

test("parts are of the backwards that added them, and as long as they are told to be", () => {
  const [row] = ledger().rows;
  assert.deepEqual(amounts(row.parts(1)), [-16, -4]);
  assert.deepEqual(amounts(row.parts(2)), [-0.8, -0.2]);
  assert.deepEqual(row.parts(3).map(({ born, look }) => [born, look]), [[0, "used"], [1, "used"]]);
  assert.deepEqual(row.parts(4), []);
});

test("what was added at another event than the one that is shown is not new", () => {
  const looks = (now) => drawn(1, ledger().rows[0], now).parts.map(({ look }) => look);
  assert.deepEqual([looks(1), looks(2)], [["live", "new"], ["live", "live"]]);
});

test("what is in .grad and was not recorded is a part of its own", () => {
  const lanes = { n: [[1]], age: [[-1]], by: [["Infinity"]], look: ["3"] };
  assert.deepEqual(ledger({ lanes }).rows[0].parts(0), [{ born: -1, amount: Infinity, look: "unseen" }]);
});

test("the norms of parts share the height of the norm of .grad", () => {
  const run = ledger({ p: [{ n: "w", s: "w", d: [2], r: [0, 20] }], x: {}, c: [3, 4, -1, -1, -1] });
  const { grad, parts } = drawn(1, run.rows[0]);
  assert.equal(grad, 20);
  assert.ok(Math.abs(parts.reduce((whole, { height }) => whole + height, 0) - 20) < 1e-9);
});

test("a bar of a large run is not split, and what it is made of is not told", () => {
  const run = ledger({ lanes: {} });
  const parts = drawn(1, run.rows[0]).parts.map(({ born, height, look }) => [born, height, look]);
  assert.deepEqual(parts, [[-1, -20, "live"]]);
  assert.match(equation(run, 1, run.rows[0]), /^w.grad: −20. In a run as large as this one/);
});

test("neighbours of one look and sign that are too thin for lines between them are one", () => {
  const part = (height, born) => ({ born, amount: height, height, look: born === 6 ? "new" : "live" });
  const parts = [1, 1, -1, 1, 9, 1, 1].map(part);
  const run = { color: () => ["#000", "#fff"] };
  const at = (scale) => joined(run, parts, scale).map(({ height, told }) => [height, told]);
  assert.deepEqual(at(9), parts.map(({ height }) => [height, undefined]), "each has room");
  assert.deepEqual(at(2), [[3, "3 parts"], [-1, undefined], [9, undefined], [1, undefined], [1, undefined]]);
});

test("an event is told in a sentence, and .grad as a sum", () => {
  const run = ledger();
  assert.equal(sentence(run, 1), "Event 1, backward: w receives −4, .grad −20.");
  assert.equal(sentence(run, 4), "Event 4, zero_grad: w.grad None.");
  assert.equal(equation(run, 0, run.rows[0]), "w.grad = −16 (event 0)", "one number is told once");
  assert.equal(equation(run, 1, run.rows[0]), "w.grad = −16 (event 0) − 4 (event 1) = −20");
  assert.equal(equation(run, 4, run.rows[0]), "w.grad is None: there is no tensor, which is not zero.");
});

test("of many parts the last five are told one by one, and no number is 0 that is None", () => {
  const added = Array.from({ length: 7 }, (_, e) => [e % 2 ? -1 : 1]);
  const grad = [1, 0, 1, 0, 1, 0, 1].map((value) => [value]);
  const norms = (side) => side.map(([value]) => Math.abs(value));
  const empty = { skipped: [], retained: [] };
  const e = { k: Array(7).fill(0), h: Array(7).fill("backward"), l: Array(7).fill(0), c: Array(7).fill(-1), ...empty };
  const ages = added.flatMap((_, last) => Array.from({ length: last + 1 }, (_, k) => last - k));
  const by = added.flatMap((_, last) => added.slice(0, last + 1).map(([one]) => one));
  const lanes = { n: [[1, 2, 3, 4, 5, 6, 7]], age: [ages], by: [by], look: ["1".repeat(28)] };
  const run = ledger({ e, lanes, x: { 0: [added, grad] }, c: norms(added), g: norms(grad) });
  const told = "w.grad = 0 (2 earlier) + 1 (event 2) − 1 (event 3) + 1 (event 4) − 1 (event 5) + 1 (event 6) = 1";
  assert.equal(equation(run, 6, run.rows[0]), told);
  assert.equal(run.rows[0].grad(5), 0);
  assert.equal(run.rows[0].grad(-1), null);
});

test("what is erased before a step used it is said to be", () => {
  const run = ledger({ p: [{ n: "w", s: "w", d: [1], r: [-20, 0], lost: { 4: [0, 1] } }] });
  assert.match(sentence(run, 4), /erased −16, −4 before any step used it/);
});
