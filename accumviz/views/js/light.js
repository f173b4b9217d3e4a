/** What a reader points at, or comes to by key, lights up in all panes at once: code, graph, shares and timeline. */

/** @import { App, Pane } from "./player.js" */

import { put } from "./dom.js";

/** @param {Pane[]} panes @returns {(events: number[]) => void} */
export function lighting(panes) {
  let now = "";
  return (events) => {
    const next = events.join();
    if (next === now) return;
    now = next;
    for (const pane of panes) pane.light?.(new Set(events.filter((e) => e >= 0)));
  };
}

/**
 * @param {App} app @param {Element} el
 * @param {(event: any) => number[] | undefined} eventsAt  the events under a pointer, or of what has the focus
 */
export function pointedAt(app, el, eventsAt) {
  const on = (/** @type {Event} */ event) => {
    const found = eventsAt(event);
    // A box that a tap has given the focus says nothing of the line that was tapped.
    if (found || event.type !== "focusin") app.light?.(found ?? []);
  };
  // What a finger has touched stays lit: it cannot hover.
  const off = (/** @type {PointerEvent} */ { pointerType }) => pointerType === "touch" || app.light?.([]);
  put(el, { pointerdown: on, pointermove: on, focusin: on, pointerleave: off, focusout: off });
}
