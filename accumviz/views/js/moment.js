/** Where a backward stands: which nodes of its graph have run by a moment, and how that is told. */

/** @import { Ledger } from "./ledger.js" */
/** @import { At, Data, GraphData, NodeData } from "./types.d.ts" */

import { clamp, counted } from "./numbers.js";

/**
 * @typedef {object} Moment
 * @property {number} owner  the backward whose graph this is
 * @property {GraphData | undefined} graph
 * @property {NodeData[]} nodes
 * @property {boolean} now  whether the graph runs at this event
 * @property {number} total
 * @property {number} ran  how many nodes have run
 * @property {number | undefined} last  the node that ran last
 * @property {Set<number>} done
 * @property {boolean} kept  whether what the nodes saved outlives the backward
 */

/** @param {Ledger} ledger @param {Data} data @param {Pick<At, "e" | "n">} at @returns {Moment} */
export function moment(ledger, data, { e, n }) {
  const owner = ledger.length ? ledger.backward[e] : 0;
  const graph = data.graphs[data.of[owner]];
  const now = owner === e && Boolean(graph);
  const order = graph?.order ?? [];
  const total = order.length;
  const ran = now && n !== null ? clamp(n, 0, total) : total;
  const nodes = graph ? data.layouts[graph.l].n : [];
  const done = new Set(order.slice(0, ran));
  return { owner, graph, nodes, now, total, ran, last: order[ran - 1], done, kept: ledger.retained.has(owner) };
}

/** A node and its numbers; its gradient is not known before it has run. @param {Moment} moment @param {number} i */
function about({ graph, nodes }, i, done = true) {
  const node = nodes[i];
  const values = graph?.v[i] ?? [];
  const told = values.map((text, k) => (node.n[k] === "grad" && !done ? "" : `, ${node.n[k]} ${text}`));
  return node.t + (node.leaf === undefined ? "" : " (AccumulateGrad)") + told.join("");
}

/** How far the backward has come ("" when it is through). @param {Moment} moment */
export function progress(moment) {
  const { now, total, ran, last } = moment;
  if (!now || ran === total) return "";
  if (last === undefined) return `The forward has built ${counted(total, "node")}; none has run backward yet.`;
  return `${ran} of ${total} nodes have run, the last is ${about(moment, last)}.`;
}

/** The selected node ("" when there is none). @param {Moment} moment @param {number} i */
export function selection(moment, i) {
  const { nodes, now, done, kept } = moment;
  if (!now || !nodes[i]) return "";
  const holding = done.has(i) && !kept ? ", freed" : ", holding what it saved";
  return `Selected: ${about(moment, i, done.has(i))}${nodes[i].s ? holding : ""}.`;
}

/** What stands below the graph. @param {Ledger} ledger @param {Data} data @param {Moment} moment */
export function remark(ledger, data, { owner, graph, now, kept }) {
  if (!graph) return data.undrawn[owner] || noGraph(owner);
  const past = `The graph of event ${ledger.index(owner)}, ${kept ? "retained" : "freed by its backward"}.`;
  return [now ? data.remark : past, ...data.layouts[graph.l].notes].join(" ").trim();
}

/** @param {number} owner */
function noGraph(owner) {
  return owner < 0 ? "No graph yet: a forward builds it." : "The graph of this backward was not kept.";
}
