/** What moves by itself between two moments: a contribution into `.grad`. */

/** @import { App } from "./player.js" */
/** @import { gradPane } from "./grad.js" */
/** @import { At } from "./types.d.ts" */

import { h } from "./dom.js";
import { contributionText } from "./words.js";

/** More than so many at once are a swarm. */
const MOST = 6;
const FLIGHT = 620;

const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** The leaves that have run since. @param {App} app @param {At} was @param {At} now */
function arrived({ graph }, was, now) {
  if (!graph) return [];
  const here = graph.moment(now);
  const onward = was.e === now.e ? graph.moment(was).ran < here.ran : was.e === now.e - 1;
  if (!here.now || !onward) return [];
  const before = was.e === now.e ? graph.moment(was).done : new Set();
  return [...here.done].filter((i) => here.nodes[i].leaf !== undefined && !before.has(i)).slice(0, MOST);
}

/** @param {App} app @param {ReturnType<typeof gradPane> | null} grad */
export function motions(app, grad) {
  const { ledger, graph } = app;
  /** @type {At | undefined} */
  let was;

  /** A number on its way from a node to the bar that it is added to. @param {number} i @param {At} state */
  function fly(i, { e, n }) {
    const leaf = graph?.moment({ e, n }).nodes[i].leaf;
    const line = grad?.lines().find(({ row }) => row().n === leaf);
    const from = graph?.boxOf(i);
    const frame = line?.el.closest(".av-frame");
    if (!line?.bar.clientWidth || !from || !frame) return;
    const { bar, row } = line;
    const [home, to] = [frame.getBoundingClientRect(), bar.getBoundingClientRect()];
    const [color, ink] = ledger.color(e);
    const mark = h("b.av-flying", { "aria-hidden": "true", style: `background: ${color}; color: ${ink}` },
      contributionText(ledger, e, row()));
    frame.append(mark);
    const at = (/** @type {DOMRect} */ box) =>
      `translate(${box.x + box.width / 2 - home.x}px, ${box.y + box.height / 2 - home.y}px) translate(-50%, -50%)`;
    const easing = "ease-in-out";
    const flight = [{ transform: at(from) }, { transform: at(to), offset: 0.9 }, { transform: at(to), opacity: 0 }];
    mark.animate(flight, { duration: FLIGHT, easing }).onfinish = () => mark.remove();
  }
  /** Called before a moment is drawn; what it returns, after. @param {At} state */
  return (state) => {
    const before = was;
    was = state;
    if (!before || isStill()) return () => {};
    const flying = arrived(app, before, state);
    return () => flying.forEach((i) => fly(i, state));
  };
}
