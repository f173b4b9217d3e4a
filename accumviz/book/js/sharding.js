/** What two ranks hold of each layer, moment by moment: two switches choose the recording, a slider the moment. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { ShardingData } from "./types.d.ts" */

import { group, h, KEYS_ARE_MINE, put, range, slide, tell } from "../../views/js/dom.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

/** @param {Host} host @returns {Promise<Dispose>} */
async function sharding({ model, el }) {
  const { start, runs } = /** @type {ShardingData} */ ((await read(model.get("data"))).data);
  const root = /** @type {HTMLElement} */ (el.parentElement);
  const map = /** @type {HTMLElement} */ (root.querySelector(".av-map"));
  const says = /** @type {HTMLElement} */ (root.querySelector(".av-says"));
  const switches = ["reshard_after_forward", "set_requires_gradient_sync"].map((name) =>
    h("input", { type: "checkbox", role: "switch", "aria-label": name, ...KEYS_ARE_MINE, input: draw }));
  const [reshard, sync] = switches;
  switches.forEach((one, i) => { one.checked = start[i] === 1; });
  const moments = range("moment", point);
  moments.value = "1"; // at 0 nothing has happened
  const now = h("p.av-points");
  put(el, { class: "av-keys", ...group("One window of two ranks") }).append(
    h("label", {}, reshard, h("code", {}, "reshard_after_forward")),
    h("label", {}, sync, h("code", {}, "set_requires_gradient_sync"), " in each micro-batch"),
    h("label.av-moment", {}, h("span", {}, "moment"), moments), now);

  const run = () => runs[2 * Number(reshard.checked) + Number(sync.checked)];

  function draw() {
    const { says: text, phases, paths } = run();
    const length = run().moments.length;
    tell(says, text);
    put(map, { "aria-label": text });
    map.querySelectorAll("path").forEach((path, i) => put(path, { d: paths[i] }));
    for (const lane of map.querySelectorAll("svg")) {
      put(lane, { viewBox: `0 0 ${length} ${lane.viewBox.baseVal.height}` });
    }
    map.querySelectorAll(".av-heads span").forEach((head, i) => put(head, { style: `flex-grow:${phases[i]}` }));
    point();
  }

  function point() {
    const texts = run().moments;
    const at = Math.min(Number(moments.value), texts.length - 1);
    slide(moments, at, texts.length - 1, texts[at]);
    tell(now, texts[at]);
    put(map, { style: `--av-at:${at / texts.length};--av-width:${1 / texts.length}` });
  }
  /** @param {PointerEvent} event */
  function follow({ type, buttons, clientX }) {
    if (type === "pointermove" && !buttons) return;
    const { left, width } = /** @type {Element} */ (map.querySelector("svg")).getBoundingClientRect();
    moments.value = `${Math.floor((run().moments.length * (clientX - left)) / width)}`;
    point();
  }
  put(map, { pointerdown: follow, pointermove: follow });
  draw();
  return () => {};
}

startAll("sharding", sharding, "the picture, and what it shows in words");
