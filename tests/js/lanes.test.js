import assert from "node:assert/strict";
import { test } from "node:test";

import { drawLanes, totals } from "../../accumviz/views/js/lanes.js";
import { Ledger } from "../../accumviz/views/js/ledger.js";

/** Windows of four backwards, a step and a zero_grad. */
function ledger(part) {
  const kinds = ["backward", "backward", "backward", "backward", "step", "zero_grad"];
  const added = kinds.map((kind) => (kind === "backward" ? [part] : null));
  const grad = kinds.map((kind, e) => (kind === "zero_grad" ? null : [part * Math.min(e + 1, 4)]));
  const norms = (side) => side.map((value) => (value ? Math.abs(value[0]) : -1));
  return new Ledger({
    kinds: [["backward", "#000"], ["step", "#222"], ["zero_grad", "#333"]],
    colors: [[0, "#0072B2", "#fff"]],
    e: { k: [0, 0, 0, 0, 1, 2], h: kinds, l: kinds.map(() => 0), c: [], skipped: [], retained: [] },
    count: 1,
    p: [{ n: "w", s: "w", d: [1], r: [Math.min(0, 4 * part), Math.max(0, 4 * part)] }],
    lanes: { n: [[1, 2, 3, 4, 4, 0]], age: [[0, 1, 0, 2, 1, 0, 3, 2, 1, 0, 4, 3, 2, 1]],
      by: [Array(14).fill(Math.sign(part))],
      look: ["01011011102222"] },
    x: { 0: [added, grad] },
    c: norms(added),
    g: norms(grad),
    digits: 4,
  });
}
const told = (part, column) => totals(ledger(part), ledger(part).rows[0], column);

test("totals stand at all bars, or at those that steps used, with the same digits", () => {
  assert.deepEqual(told(-0.3, 60), ["−0.3", "−0.6", "−0.9", "−1.2", "−1.2", ""]);
  assert.deepEqual(told(-1.25, 22), ["", "", "", "", "−5", ""], "two digits have no room in these columns");
  assert.deepEqual(told(-1.25, 20), ["", "", "", "", "−5", ""], "beside a step nothing else is told");
  assert.deepEqual(told(-1.25, 9), ["", "", "", "−5", "", ""], "or the largest alone");
  assert.deepEqual(told(1.234e-7, 20), ["", "", "", "4.936e−7", "", ""], "with all of its digits");
});

test("of steps that follow each other the last one has the total", () => {
  const run = ledger(-1.25);
  run.kinds = ["backward", "backward", "backward", "step", "step", "zero_grad"];
  assert.deepEqual(totals(run, run.rows[0], 22), ["", "", "", "", "−5", ""]);
});

test("a part has the colour of the backward that added it", () => {
  const run = ledger(-1);
  const asked = [];
  run.color = (born) => { asked.push(born); return ["#000", "#fff"]; };
  const context = { strokeRect() {}, clearRect() {} };
  drawLanes({ ...OTHERS, context }, {}, run, { left: 0, column: 60, top: 0, lane: 84 });
  assert.deepEqual(asked, [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]);
});

test("before anything is in .grad a bar has no parts, and takes none of the next one", () => {
  const run = ledger(-1);
  run.rows[0].lanes = { n: [[0, 0, 1, 2, 0, 0]], age: [[0, 1, 0]], by: [[-1, -1, -1]], look: ["010"] };
  const asked = [];
  run.color = (born) => { asked.push(born); return ["#000", "#fff"]; };
  const context = { strokeRect() {}, clearRect() {} };
  drawLanes({ ...OTHERS, context }, {}, run, { left: 0, column: 60, top: 0, lane: 84 });
  assert.deepEqual(asked, [2, 2, 3]);
});

const OTHERS = { fill() {}, write() {} };

test("a part that is too thin for an outline has one at its sides only", () => {
  const outlines = [];
  const sides = [];
  const context = { strokeRect: (...box) => outlines.push(box), clearRect() {} };
  const fill = (color, x, y, wide) => { if (wide === 1.2) sides.push(x); };
  const draw = (lane) => drawLanes({ ...OTHERS, fill, context }, {}, ledger(-1), { left: 0, column: 60, top: 0, lane });
  draw(84);
  assert.deepEqual([outlines.length, sides.length], [1 + 2 + 3 + 4 + 4, 0]);
  draw(36);
  assert.deepEqual([outlines.length, sides.length], [14, 2 * 14]);
});

test("a total stands at the line of .grad, on a ground of its own", () => {
  const done = [];
  const context = { strokeRect() {}, clearRect: (...box) => done.push(["clear", ...box]) };
  const pen = { context, fill() {}, write: (text, x, y) => done.push([text, x, y]) };
  drawLanes(pen, {}, ledger(-1), { left: 0, column: 60, top: 0, lane: 84 });
  const [[, left, top, width, height], [text, x, y]] = done;
  assert.equal(text, "−1");
  assert.deepEqual([left + width / 2, top + height / 2], [x, y]);
  assert.ok(width >= 16 && height >= 11);
});
