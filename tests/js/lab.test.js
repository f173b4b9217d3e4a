import assert from "node:assert/strict";
import test from "node:test";

import { choiceIn, linkOf } from "../../accumviz/book/js/lab-address.js";
import { arrangementsOf } from "../../accumviz/book/js/lab-runs.js";

const OFFERS = [
  { name: "step", title: "step", values: ["window", "epoch"], labels: ["", ""], line: "s" },
  { name: "k", title: "K", values: ["3", "2", "1"], labels: ["", "", ""], line: "" },
  { name: "tail", title: "tail", values: ["step", "drop"], labels: ["", ""], line: "" },
];
const START = [0, 0, 0];
const DATA = {
  offers: OFFERS, start: START,
  tallest: [1],
  grid: { "0.0.0": 0, "1.0.0": 1, "0.2.0": 1, "1.2.0": 0, "0.0.1": 1 },
  runs: [[0, 0, -1], [0, 1, 0]],
  parts: { "e.k": [[1, 2]], "e.h": ["a", "b"], note: ["n"] },
};

test("a run is put together from its own parts, and has no others", () => {
  const { at } = arrangementsOf(DATA);
  assert.deepEqual(at([0, 0, 0]), { e: { k: [1, 2], h: "a" } });
  assert.deepEqual(at([0, 2, 0]), { e: { k: [1, 2], h: "b" }, note: "n" });
  assert.equal(at([1, 1, 1]), null);
});

test("what was changed longest ago goes back first, and no more than it takes", () => {
  const { nearest } = arrangementsOf(DATA);
  assert.deepEqual(nearest([1, 2, 0], [0, 1]), { choice: [1, 2, 0], back: [] });
  assert.deepEqual(nearest([1, 0, 1], [0, 2]), { choice: [0, 0, 1], back: [0] });
  assert.deepEqual(nearest([1, 0, 1], [2, 0]), { choice: [1, 0, 0], back: [2] });
  assert.deepEqual(nearest([1, 2, 1], [2, 1, 0]), { choice: [1, 2, 0], back: [2] });
});

test("a link names what differs from the start, and leads back to it", () => {
  const link = linkOf("av1", OFFERS, START, [1, 2, 0], 7);
  assert.equal(link, "#av1&step=epoch&k=1&e=7");
  assert.deepEqual(choiceIn(link, "av1", OFFERS, START), { choice: [1, 2, 0], lost: [], e: 7 });
  assert.equal(choiceIn(link, "av2", OFFERS, START), null);
});

test("what a link names and nobody knows is told", () => {
  const { choice, lost, e } = choiceIn("#av1&k=9&turn=left&step=epoch", "av1", OFFERS, START);
  assert.deepEqual([choice, lost, e], [[1, 0, 0], ["k=9", "turn=left"], null]);
});
