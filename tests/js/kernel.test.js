import assert from "node:assert/strict";
import { test } from "node:test";

import { recording } from "../../accumviz/book/js/recording.js";
import { heard } from "../../accumviz/views/js/kernel.js";

/** A notebook's model, and what its kernel hears. */
function notebook() {
  const [state, saved, listeners] = [{}, [], {}];
  let unsaved = {};
  return {
    saved,
    tell(name, value) {
      state[name] = value;
      return listeners[`change:${name}`]();
    },
    get: (name) => state[name],
    set(name, value) { unsaved[name] = state[name] = value; },
    save_changes() {
      saved.push(unsaved);
      unsaved = {};
    },
    on(name, listener) { listeners[name] = listener; },
  };
}
const CONTROLS = [{ name: "k", kind: "slider", labels: ["1", "2"] }, { name: "on", kind: "switch", labels: ["yes"] }];
const RUN = { figures: [["steps", "1"]] };

test("what is set reaches the kernel at once", () => {
  const model = notebook();
  heard(model).set("at", { e: 1 });
  assert.deepEqual([model.saved, heard(model).get("at")], [[{ at: { e: 1 } }], { e: 1 }]);
});

test("a recorded run is the page's, and a kernel is asked once for another, which then is there", async () => {
  const model = notebook();
  let drawn = 0;
  const runs = recording(heard(model), CONTROLS, { at: () => RUN }, () => { drawn++; });
  assert.equal(runs.at([1, 0]), RUN);
  assert.deepEqual(model.saved, []);
  assert.equal(runs.at(["5", 0]).waits, "The kernel is recording this run.");
  assert.equal(runs.at(["5", 0]), runs.at(["5", 0]));
  assert.deepEqual(model.saved, [{ ask: { choice: ["5", 0], n: 1 } }]);
  await model.tell("told", { choice: ["5", 0], run: JSON.stringify({ error: "five" }) });
  assert.deepEqual([runs.at(["5", 0]).error, drawn], ["five", 1]);
  await model.tell("told", { choice: ["7", 0], run: JSON.stringify({ ...RUN, data: { count: 2 } }) });
  const { whole, figures, data } = runs.at(["7", 0]);
  assert.deepEqual([whole.data, figures, data], [{ count: 2 }, RUN.figures, undefined]);
});
