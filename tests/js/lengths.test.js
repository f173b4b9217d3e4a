import assert from "node:assert/strict";
import { test } from "node:test";

import { drawLanes } from "../../accumviz/views/js/lanes.js";
import { Ledger } from "../../accumviz/views/js/ledger.js";
import { drawSaved } from "../../accumviz/views/js/lines.js";

/** Backwards of −16, −4 and +6. */
function ledger() {
  const [added, grad] = [[[-16], [-4], [6]], [[-16], [-20], [-14]]];
  const norms = (side) => side.map(([value]) => Math.abs(value));
  return new Ledger({
    kinds: [["backward", "#000", []]],
    colors: [[0, "#0072B2", "#fff"]],
    e: { k: [0, 0, 0], h: [], l: [0, 0, 0], c: [], retained: [],
      b: [9000, 6000, 3000], a: [4500, 3000, 0] },
    count: 1,
    p: [{ n: "w", s: "w", d: [1], r: [-20, 6] }],
    lanes: { n: [[1, 2, 3]], age: [[0, 1, 0, 2, 1, 0]], by: [[-1, -1, -1, -1, -1, 1]], look: ["010110"] },
    x: { 0: [added, grad] },
    c: norms(added),
    g: norms(grad),
    digits: 4,
  });
}

/** What is drawn of so much: [colour, x, y, width, height]. */
function drawn(draw) {
  const boxes = [];
  const context = { strokeRect() {}, clearRect() {} };
  draw({ context, fill: (...box) => boxes.push(box), write() {} }, { dark: false, text: "ink", muted: "grey" });
  return boxes;
}

test("parts and totals of a lane of the page are drawn to one scale", () => {
  const place = { left: 0, column: 60, top: 0, lane: 400 };
  const boxes = drawn((pen, inks) => drawLanes(pen, inks, ledger(), place));
  const [[, , zero]] = boxes;
  const ends = boxes.filter(([color]) => color === "ink").map(([, , y]) => y + 1 - zero);
  const unit = ends[0] / 16;
  const near = (found, wanted) => found.forEach((one, i) => assert.ok(Math.abs(one - wanted[i]) < 0.01, `${found}`));
  near(ends, [16, 20, 14].map((grad) => unit * grad));
  const parts = boxes.filter(([color]) => color === "#0072B2").map(([, , , , height]) => Math.abs(height));
  assert.equal(parts.length, 6);
  near(parts, [16, 16, 4, 16, 4, 6].map((part) => unit * part));
});

test("saved bytes of the page are drawn to one scale", () => {
  const place = { left: 0, column: 60, bottom: 0, width: 200, height: 99 };
  const bars = drawn((pen, inks) => {
    pen.context = {};
    drawSaved(pen, inks, ledger(), place);
  }).slice(2).map(([, , , , height]) => height);
  const unit = bars[0] / 9000;
  assert.deepEqual(bars.map((tall) => Math.round(tall / unit)), [9000, 6000, 3000, 4500, 3000, 0]);
});
