/** The explorer: controls that switch between recorded runs; behind the one that is shown, another is an outline. */

/** @import { Choice, Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { ExplorerData, Shown } from "./types.d.ts" */

import { choicesIn, choicesLink, momentIn } from "../../views/js/address.js";
import { arrive, group, h, swatch } from "../../views/js/dom.js";
import { read } from "../../views/js/packed.js";
import { choiceOf } from "./choices.js";
import { figures } from "./figures.js";
import { runsOf } from "./runs.js";
import { stageOf } from "./stage.js";

/**
 * Put in an explorer.
 * @param {Host} host
 * @param {typeof import("./recording.js").recording} [kernel]  what records other runs, in a notebook
 * @returns {Promise<Dispose>}
 */
export async function explore({ model, el }, kernel) {
  const { data } = await read(model.get("data"));
  const { controls, start, against } = /** @type {ExplorerData} */ (data);
  const id = model.get("id");
  const key = `avx${Math.random().toString(36).slice(2, 8)}`;
  const recorded = runsOf(data);
  const runs = kernel ? kernel(model, controls, recorded, draw) : recorded;
  const tabs = controls[0].kind === "tabs";

  /** @returns {Shown} */
  const at = () => ({ a: start, b: against, ...model.get("at") });
  /** @param {Partial<Shown>} change */
  function go(change) {
    model.set("at", { ...at(), ...change });
  }
  const offered = controls.map((control, i) => choiceOf(control, {
    key: `${key}-${i}`,
    other: runs.other,
    choose: (place) => go({ a: at().a.map((old, k) => (k === i ? place : old)) }),
  }));
  const keep = h("button.av-compare", { type: "button", click: () => go({ b: at().b ? null : at().a }) });
  const name = h("span.av-behind");
  const top = h("div.av-xtop", group("Run"), ...offered.map((one) => one.el), h("span.av-xbehind", {}, name, keep));
  const result = figures();
  const stage = stageOf({ begins: tabs, also: [result.pane], link: () => choicesLink(id, at().a, at().b) });
  const frame = h(`div.av-xframe${tabs ? ".av-tabs" : ""}`, group("Explorer"), top, stage.slot);

  /** What tells a run from the one that is shown. @param {Choice} other @param {Choice} mine */
  const differences = (other, mine) => controls.flatMap(({ name, labels }, i) => {
    const label = labels[Number(other[i])] ?? other[i];
    return other[i] === mine[i] ? [] : tabs ? label : `${name} ${label}`;
  }).join(", ");

  function draw() {
    const { a, b } = at();
    const run = runs.at(a);
    const choice = b ?? (run.right ? null : recorded.right(a));
    const behind = choice && runs.at(choice);
    const other = behind === run ? null : behind;
    const told = choice && (differences(choice, a) || "this run");
    offered.forEach((one, i) => one.draw(a[i]));
    name.replaceChildren(...(told ? [swatch([`outline: ${told}${b ? "" : ", a right run"}`, "ghost", ""])] : []));
    keep.textContent = b ? "Drop the outline" : "Keep as outline";
    result.draw(run, other);
    stage.draw(run, other);
  }
  /** A permalink names its explorer, the run, the one behind it, and the moment. */
  function follow() {
    const moment = momentIn(location.hash, id);
    const told = moment && choicesIn(location.hash, controls.map(({ labels }) => labels.length));
    if (!told) return;
    stage.place(moment);
    go(told);
    arrive(frame);
  }
  model.on("change:at", draw);
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  el.append(frame);
  draw();
  follow();
  return () => ended.abort();
}
