import assert from "node:assert/strict";
import { test } from "node:test";

import { abbreviated } from "../../accumviz/views/js/names.js";

const LAYER = [
  "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias",
  "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias", "norm1.weight", "norm1.bias",
];
const NAMES = ["embed.weight", ...[0, 1, 10].flatMap((n) => LAYER.map((name) => `layers.${n}.${name}`)), "head.weight"];
const RANKS = ["0.weight", "1.weight", "0.weight (unsharded)", "1.weight (unsharded)"];

test("a name that fits stays whole", () => {
  const write = abbreviated(NAMES);
  assert.deepEqual(NAMES.map((name) => write(name, 40)), NAMES);
});

test("outer parts are cut first, and each part keeps what tells it apart", () => {
  const write = abbreviated(NAMES);
  assert.equal(write("layers.0.linear1.weight", 18), "l.0.linear1.weight");
  assert.equal(write("layers.10.self_attn.in_proj_weight", 18), "l.10.s.in_proj_we…");
  assert.equal(write("layers.0.self_attn.in_proj_bias", 18), "l.0.s.in_proj_bias");
});

test("no two names are written alike where there is room for what tells them apart", () => {
  for (const [names, least] of [[NAMES, 18], [RANKS, 8]]) {
    for (let limit = least; limit < 40; limit++) {
      const written = names.map((name) => abbreviated(names)(name, limit));
      assert.equal(new Set(written).size, names.length, `${limit}: ${written.join(", ")}`);
      assert.ok(written.every((name) => name.length <= limit));
    }
  }
});

test("what was cut at its end shows it", () => {
  assert.equal(abbreviated(RANKS)("0.weight (unsharded)", 12), "0.w (unshar…");
});

test("a name without parts is cut in the middle or at its end", () => {
  assert.equal(abbreviated(["abcdefghijkl"])("abcdefghijkl", 6), "abcde…");
  assert.equal(abbreviated([])("", 5), "");
});
