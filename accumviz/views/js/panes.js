/** Which panes are seen: the first two, or all; on a phone one of them, below the line of code that runs. */

/** @import { Pane } from "./player.js" */

import { group, h, put } from "./dom.js";

/**
 * @param {Pane[]} also  what is seen on a wide page anyhow @param {Pane[]} panes
 * @param {{all?: boolean, here?: string}} view  what a reader has opened, which outlives the run that is shown
 * @param {() => void} fit  called when others are seen
 */
export function choosing(also, panes, view, fit) {
  /** @param {Partial<typeof view>} change */
  const show = (change) => {
    Object.assign(view, change);
    draw();
    fit();
  };
  const two = panes.slice(0, 2);
  const all = [...panes, ...also];
  const tabs = all.map(({ name, el }) => {
    const [label] = `${el.getAttribute("aria-label")}`.split(" "); // a phone has room for a word
    return h("button.av-tab", { type: "button", click: () => show({ here: name }) }, label);
  });
  const body = h("div.av-body", {}, ...also.map(({ el }) => el), ...panes.map(({ el }) => el));
  const more = h("button.av-b.av-b-panes", { type: "button", click: () => show({ all: !view.all }) });
  more.hidden = panes.length < 3;

  function draw() {
    const here = all.find(({ name }) => name === view.here) ?? two.at(-1);
    all.forEach((pane, i) => {
      pane.el.classList.toggle("av-here", pane === here);
      put(tabs[i], { "aria-pressed": pane === here });
    });
    for (const { el } of two) el.classList.add("av-lead");
    body.classList.toggle("av-all", Boolean(view.all));
    more.textContent = view.all ? "Fewer panes" : "More panes";
    put(more, { "aria-expanded": Boolean(view.all) });
  }
  draw();
  return { body, more, tabs: h("div.av-choose", group("Panes"), ...tabs) };
}
