import assert from "node:assert/strict";
import { test } from "node:test";

import { Ledger } from "../../accumviz/views/js/ledger.js";
import { drawn, joined, look, stack, state } from "../../accumviz/views/js/parts.js";
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
    p: [{ n: "w", s: "w", d: [1], r: [-20, 0], f: 0 }],
    flow: [{ runs: [2, 3, 2], by: [[2, 0.05]] }],
    x: { 0: [added, grad] },
    c: norms(added),
    g: norms(grad),
    strings: ["loss", ""],
    digits: 4,
    ...change,
  });
}
const amounts = (parts) => parts.map(({ amount }) => amount);

test("parts add up to .grad, also once a clip has scaled the whole of it", () => {
  const run = ledger();
  assert.deepEqual(amounts(stack(1, run.rows[0])), [-16, -4]);
  assert.deepEqual(amounts(stack(2, run.rows[0])), [-0.8, -0.2]);
  assert.deepEqual(stack(4, run.rows[0]), []);
});

test("a part is new, then live, then used", () => {
  const run = ledger();
  const looks = [0, 1, 2, 3].map((e) => stack(e, run.rows[0]).map(look));
  assert.deepEqual(looks, [["new"], ["live", "new"], ["live", "live"], ["used", "used"]]);
});

const row = (z, o) => [{ n: "w", s: "w", d: [1], r: [-20, 0], f: 0, z, o }];
const flow = (runs, by) => [{ runs, by }];

test("what is in .grad and was not seen to come is a part of its own", () => {
  const run = ledger({ flow: flow([1, 1, 0, 1, 3, 2], []), p: row([1, 2]) });
  assert.deepEqual(stack(1, run.rows[0]).map(({ born, amount }) => [born, amount]), [[-1, -16], [1, -4]]);
});

test("what is there by an unknown factor is one part, beside what came later", () => {
  const run = ledger({ flow: flow([2, 3, 2], [[1, null]]), p: row([1, 4]) });
  assert.deepEqual(stack(1, run.rows[0]).map(({ born, amount }) => [born, amount]), [[-1, -16], [1, -4]]);
  const norms = ledger({ flow: flow([2, 3, 2], [[2, null]]), x: {} });
  assert.deepEqual(stack(3, norms.rows[0]).map((part) => [look(part), part.amount, part.used]), [["unseen", 20, true]]);
});

test("an average over two ranks leaves each part half of itself, and the rest to others", () => {
  const run = ledger({ flow: flow([2, 3, 2], [[2, 0.05], [3, 1, 0.5]]), p: row([3, 4]) });
  assert.deepEqual(amounts(stack(3, run.rows[0])), [-0.5, -0.4, -0.1]);
});

test("what came from other ranks is used by the step that uses the average", () => {
  const statesOf = (by) => [2, 3].map((e) => {
    const run = ledger({ flow: flow([1, 4, 3], by), c: [16, -1, -1, -1, -1], p: row([1, 5], by[0]?.[0]) });
    return stack(e, run.rows[0]).map((part) => [look(part), state(part)].join(" "));
  });
  assert.deepEqual(statesOf([[1, 1, 0.5]]), [["unseen live", "live live"], ["unseen used", "used used"]]);
  assert.deepEqual(statesOf([])[1], ["unseen live", "used used"], "what was not recorded may be newer than the step");
});

test("the norms of parts share the height of the norm of .grad", () => {
  const run = ledger({ p: [{ n: "w", s: "w", d: [2], r: [0, 20], f: 0 }], x: {}, c: [3, 4, -1, -1, -1] });
  const { grad, parts } = drawn(1, run.rows[0]);
  assert.equal(grad, 20);
  assert.ok(Math.abs(parts.reduce((whole, { height }) => whole + height, 0) - 20) < 1e-9);
});

test("neighbours of one look and sign that are too thin for lines between them are one", () => {
  const part = (height, born) => ({ born, amount: height, height, fresh: born === 6, used: false });
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
  const run = ledger({ e, flow: flow([7, 0, 0], []), x: { 0: [added, grad] }, c: norms(added), g: norms(grad) });
  const told = "w.grad = 0 (2 earlier) + 1 (event 2) − 1 (event 3) + 1 (event 4) − 1 (event 5) + 1 (event 6) = 1";
  assert.equal(equation(run, 6, run.rows[0]), told);
  assert.equal(run.rows[0].grad(5), 0);
  assert.equal(run.rows[0].grad(-1), null);
});

test("what is erased before a step used it is said to be", () => {
  const run = ledger({ flow: [{ runs: [2, 3, 0], by: [] }] });
  assert.match(sentence(run, 4), /erased −16, −4 before any step used it/);
});
