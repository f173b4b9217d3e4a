/** The explorer: controls that switch between recorded runs, two of them side by side when asked. */

/** @import { Dispose, Host, Whole } from "../../views/js/types.d.ts" */
/** @import { ExplorerData, Shown } from "./types.d.ts" */

import { choicesIn, choicesLink, linkTo, momentIn } from "../../views/js/address.js";
import { arrive, group, h } from "../../views/js/dom.js";
import { figures } from "./figures.js";
import { read } from "../../views/js/packed.js";
import { runsOf, besides, withWays } from "./runs.js";
import { sideOf } from "./side.js";
import { leveling, together } from "./together.js";

/**
 * Put in an explorer.
 * @param {Host} host
 * @param {typeof import("./recording.js").recording} [kernel]  what records other runs, in a notebook
 * @returns {Promise<Dispose>}
 */
export async function explore({ model, el }, kernel) {
  const { data, bytes } = await read(model.get("data"));
  const { controls, start, against } = /** @type {ExplorerData} */ (data);
  const id = model.get("id");
  const uid = `avx${Math.random().toString(36).slice(2, 8)}`;
  const recorded = runsOf(data, bytes);
  const runs = kernel ? kernel(model, controls, recorded, draw) : recorded;

  /** @returns {Shown} */
  const at = () => ({ a: start, b: against, ...model.get("at") });
  /** @param {Partial<Shown>} change */
  function go(change) {
    model.set("at", { ...at(), ...change });
  }
  /** @param {"a" | "b"} name */
  function side(name) {
    /** @param {number} i @param {number | string} place */
    const choose = (i, place) => go({ [name]: at()[name]?.map((old, k) => (k === i ? place : old)) });
    const link = () => choicesLink(id, name, at().a, at().b);
    const leader = () => (at().b ? both.leader : null);
    const how = { leader, moved: both.follow, begins: tabs, dress: dressOf(name) };
    return sideOf(name, { controls, uid, other: runs.other, choose, link, ...how });
  }
  /**
   * How a run is shown beside others: what differs from that of the other side, and the ways of all presets.
   * @param {"a" | "b"} name @returns {(whole: Whole, other: Whole | undefined) => Whole}
   */
  const dressOf = (name) => (whole, other) => {
    const shown = other ? besides(whole, other) : whole;
    const { labels } = controls[0];
    if (tabs) return withWays(shown, Number(at()[name]?.[0]), labels.map((label, i) => [label, runs.at([i]).whole]));
    if (!other) return shown;
    const [a, b] = name === "a" ? [whole, other] : [other, whole];
    return withWays(shown, Number(b === whole), [["A", a], ["B", b]]);
  };
  const tabs = controls[0].kind === "tabs";
  const both = together(() => sides, (side, e) => linkTo(choicesLink(id, side, at().a, at().b), { e }));
  const sides = { a: side("a"), b: side("b") };
  const result = figures();
  /** What A is compared with, where no other was named: the nearest run, one choice away. */
  function another() {
    const { a } = at();
    const near = controls.map(({ labels }, i) => a.map((old, k) => {
      const place = Number(old);
      return k === i ? (labels[place + 1] ? place + 1 : place && labels.length - 2) : old;
    }));
    return near.find((one) => runs.at(one) !== runs.at(a)) ?? near[0];
  }
  const click = () => go({ b: at().b ? null : against && `${against}` !== `${at().a}` ? against : another() });
  const compare = h("button.av-compare", { type: "button", click });
  const top = h("div.av-xtop", {}, sides.a.panel, sides.b.panel, compare);
  const slots = h("div.av-slots", {}, sides.a.slot, sides.b.slot);
  const level = leveling(slots);
  const frame = h(`div.av-xframe${tabs ? ".av-tabs" : ""}`, group("Explorer"), top, result.el, both.bar, slots);
  const sizes = new ResizeObserver(([{ target }]) => {
    const { clientWidth } = target;
    if (at().b) requestAnimationFrame(() => level(clientWidth));
  });
  sizes.observe(slots);

  function draw() {
    const { a, b } = at();
    const [run, beside] = [runs.at(a), b && runs.at(b)];
    frame.classList.toggle("av-two", Boolean(b));
    compare.textContent = b ? "Show one run" : "Compare with another run";
    sides.a.draw(a, run, b ? beside : undefined);
    sides.b.draw(b, beside, run);
    result.draw(b ? [run, beside] : [run]);
    both.draw(b && run, b && beside);
  }
  /** A permalink names its explorer, the choices of both sides, and the moment of one. */
  function follow() {
    const moment = momentIn(location.hash, id);
    const told = moment && choicesIn(location.hash, controls.map(({ labels }) => labels.length));
    if (!told) return;
    sides[told.side].place(moment);
    go({ a: told.a, b: told.b });
    both.find(told.side === "b" ? 1 : 0, moment.e);
    arrive(frame);
  }
  model.on("change:at", draw);
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  el.append(frame);
  draw();
  follow();
  return () => {
    ended.abort();
    sizes.disconnect();
  };
}
