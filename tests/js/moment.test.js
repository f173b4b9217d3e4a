import assert from "node:assert/strict";
import { test } from "node:test";

import { choicesIn, choicesLink, linkTo, momentIn } from "../../accumviz/views/js/address.js";
import { geometry } from "../../accumviz/views/js/geometry.js";
import { listed, seenUntil } from "../../accumviz/views/js/grad.js";
import { moment, progress, selection } from "../../accumviz/views/js/moment.js";
import { nextMoment } from "../../accumviz/views/js/playing.js";

const NODES = ["PowBackward0", "SubBackward0", "w"].map((t, i) => ({ t, n: ["value", "grad"], s: i ? null : "x" }));
NODES[2].leaf = "w";
const DATA = {
  graphs: [{ l: 0, order: [0, 1, 2], v: [["16", "1"], ["4", "8"], ["1", "[−16]"]], x: ["× 8", "× −2"] }],
  layouts: [{ n: NODES, e: [[0, 1, "", ""], [1, 2, "", ""]] }],
  of: { 0: 0 },
};
const LEDGER = { length: 2, backward: [0, 0], kinds: ["backward", "step"], retained: new Set() };

test("a backward is told node by node, and nothing is said once it is through", () => {
  const told = [0, 1, 3, null].map((n) => progress(moment(LEDGER, DATA, { e: 0, n })));
  assert.equal(told[0], "The forward has built 3 nodes; none has run backward yet.");
  assert.equal(told[1], "1 of 3 nodes have run, the last is PowBackward0, value 16, grad 1.");
  assert.deepEqual(told.slice(2), ["", ""]);
});

test("the gradient of a node is not told before it has run", () => {
  const at = (n) => selection(moment(LEDGER, DATA, { e: 0, n }), 0);
  assert.equal(at(0), "Selected: PowBackward0, value 16, holding what it saved.");
  assert.equal(at(1), "Selected: PowBackward0, value 16, grad 1, freed.");
});

test("the forward makes nodes in the order opposite to that in which they run", () => {
  const built = [-3, -2, -1, 0].map((n) => [...moment(LEDGER, DATA, { e: 0, n }).built]);
  assert.deepEqual(built, [[], [2], [1, 2], [0, 1, 2]]);
  assert.equal(progress(moment(LEDGER, DATA, { e: 0, n: -2 })), "The forward builds the graph: 1 of 3 nodes.");
  assert.equal(selection(moment(LEDGER, DATA, { e: 0, n: -2 }), 0), "", "it is not there yet");
});

test("before the first backward its graph is still to come, and nothing has run", () => {
  const { owner, coming, now, ran, built, total } = moment(LEDGER, DATA, { e: -1, n: null });
  assert.deepEqual([owner, coming, now, ran, built.size, total], [0, true, false, 0, 0, 3]);
});

test("a node that is asked says what times what its gradient is", () => {
  const told = selection(moment(LEDGER, DATA, { e: 0, n: 3 }), 2);
  assert.equal(told, "Selected: w (AccumulateGrad), value 1, grad [−16]: 8 × −2 = −16.");
  assert.doesNotMatch(selection(moment(LEDGER, DATA, { e: 0, n: 2 }), 2), /×/);
});

test("after its backward, a graph is shown as it was left", () => {
  const { now, owner, ran } = moment(LEDGER, DATA, { e: 1, n: 1 });
  assert.deepEqual([now, owner, ran], [false, 0, 3]);
});

test("a graph is retained or not by its backward, whatever comes after", () => {
  const run = { ...LEDGER, retained: new Set([0]) };
  assert.deepEqual([0, 1].map((e) => moment(run, DATA, { e, n: null }).kept), [true, true]);
});

test("a .grad is as it was until its AccumulateGrad or its module has run", () => {
  const rows = [{ n: "net.w", c: [1, 1] }];
  assert.equal(seenUntil(rows, 1, null), 1);
  assert.equal(seenUntil(rows, 1, []), 0);
  assert.equal(seenUntil(rows, 1, [{ leaf: "net.w" }]), 1);
  assert.equal(seenUntil(rows, 1, [{ in: "net" }]), 1);
  assert.equal(seenUntil([{ n: "v", c: [1, -1] }], 1, []), 1);
});

test("rows are groups until one is opened or a name is searched for", () => {
  const every = ["a.x", "a.y", "b.x"].map((n) => ({ n }));
  const groups = [{ n: "a", in: [0, 2] }, { n: "b", in: [2, 3] }];
  const names = (rows) => rows.map(({ n }) => n);
  assert.deepEqual(names(listed(every, groups, new Set(), "")), ["a", "b.x"]);
  assert.deepEqual(names(listed(every, groups, new Set([groups[0]]), "")), ["a", "a.x", "a.y", "b.x"]);
  assert.deepEqual(names(listed(every, groups, new Set(), "x")), ["a.x", "b.x"]);
  assert.deepEqual(names(listed(every, [], new Set(), "")), ["a.x", "a.y", "b.x"]);
});

test("playing walks through nodes, then to the next event, and ends", () => {
  const tape = { length: 2, nodes: (e) => (e === 0 ? 3 : 0) };
  const seen = [];
  for (let at = { e: 0, n: 0 }; at && seen.length < 9; ) {
    seen.push([at.e, at.n]);
    const next = nextMoment(tape, at);
    at = next && { ...at, ...next };
  }
  assert.deepEqual(seen, [[0, 0], [0, 1], [0, 2], [0, null], [1, null]]);
  assert.deepEqual(nextMoment(tape, { e: -1, n: null }), { e: 0, n: -3 }, "the forward comes first");
  assert.deepEqual(nextMoment(tape, { e: 0, n: -1 }), { n: 0 });
});

test("of many events several are passed at a time", () => {
  assert.equal(nextMoment({ length: 6000, nodes: () => 5 }, { e: 0, n: null }).e, 4);
});

test("a link leads back to its moment, and one to another view does not", () => {
  const at = { e: 3, n: 2, p: 0, node: -1 };
  assert.equal(linkTo("av1", at), "#av1&e=3&n=2&p=0");
  assert.deepEqual(momentIn(linkTo("av1", at), "av1"), at);
  assert.equal(momentIn(linkTo("av1", at), "av2"), null);
  assert.equal(momentIn("#&e=1", ""), null);
  for (const other of [{ ...at, e: -1, n: null }, { ...at, n: -4 }]) {
    assert.deepEqual(momentIn(linkTo("av1", other), "av1"), other);
  }
});

test("a link to an explorer names its run and the one behind, kept within what there is", () => {
  const link = `#${choicesLink("avx", [0, 1], [1, 1])}`;
  assert.deepEqual(choicesIn(link, [2, 2]), { a: [0, 1], b: [1, 1] });
  assert.deepEqual(choicesIn("#avx&a=9.-1", [2, 2]), { a: [1, 0], b: null });
  assert.equal(choicesIn("#avx&a=1", [2, 2]), null);
});

const ALL = { lane: 84 };
const NONE = { lane: 0 };

test("bars need room, and a heat map takes what is left", () => {
  const [few, many] = [4, 30].map((events) => geometry(800, events, 1, 1, false, ALL));
  assert.deepEqual([few.bars, few.words, many.bars, many.words], [true, true, true, false]);
  assert.equal(geometry(800, 100, 1, 1, false, ALL).bars, false);
  assert.equal(geometry(800, 4, 9, 1, false, NONE).bars, false);
  const tops = [4, 20, 40, 100].map((events) => geometry(800, events, 9, 1, false, NONE).top);
  assert.deepEqual(tops, [38, 94, 94, 6], "headings stand above a heat map, too, where they have room");
  assert.equal(geometry(800, 4, 9, 1, true, NONE).height - geometry(800, 4, 9, 1, false, NONE).height, 34);
});

test("runs that come to stand in one place are as tall as the tallest of them, and fill their height", () => {
  for (const parameters of [1, 2, 9]) {
    const sizes = [4, 20, 100];
    const all = parameters > 8 ? NONE : ALL;
    const alone = sizes.map((size) => geometry(800, size, parameters, 1, false, all).height);
    const places = sizes.map((size) => geometry(800, size, parameters, 1, false, { sizes, ...all }));
    assert.deepEqual(new Set(places.map(({ height }) => height)), new Set([Math.max(...alone)]));
    for (const { top, lane, bottom } of places) assert.equal(top + lane * parameters, bottom);
  }
});
