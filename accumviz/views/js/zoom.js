/** A box in which a drawing is zoomed, fitted and panned. */

import { button, put } from "./dom.js";
import { clamp } from "./numbers.js";

/** A pointer that moved further than this was dragging, not clicking. */
const STILL = 4;

/** @type {[string, string, number][]} */
const TOOLS = [["−", "zoom out", 0.8], ["+", "zoom in", 1.25], ["fit", "fit the whole graph", 0]];

/** Letters are as small as may be. */
const READ = 0.88;

/** @param {HTMLElement} box */
export function zooming(box) {
  let [scale, moved] = [1, 0];
  /** @type {{w: number, h: number} | undefined} */
  let size;
  const tools = TOOLS.map(([face, label, by]) => button("zoom", label, () => zoom(by), face));

  /** Zoom by a factor (0: until all is in view) around the middle. @param {number} factor */
  function zoom(factor, least = 0.1, most = 3) {
    if (!size) return;
    const { clientWidth: width, clientHeight: height } = box;
    const middle = [(box.scrollLeft + width / 2) / scale, (box.scrollTop + height / 2) / scale];
    scale = clamp(factor ? scale * factor : whole(), least, most);
    const drawing = /** @type {SVGElement} */ (box.firstChild);
    drawing.style.cssText = `width: ${size.w * scale}px; height: ${size.h * scale}px`;
    box.scrollLeft = middle[0] * scale - width / 2;
    box.scrollTop = middle[1] * scale - height / 2;
  }

  /** The scale at which all is seen. */
  const whole = () => Math.min((box.clientWidth - 4) / (size?.w ?? 1), (box.clientHeight - 4) / (size?.h ?? 1));
  /** As large as fits, but never too small to read; what is seen whole needs no tools. */
  function fit() {
    zoom(0, READ, 1.15);
    const over = box.scrollWidth - box.clientWidth;
    for (const tool of tools) tool.hidden = !over && box.scrollHeight === box.clientHeight;
    box.scrollLeft = over / 2;
  }

  put(box, {
    pointerdown() { moved = 0; },
    pointermove({ pointerType, buttons, movementX: x, movementY: y }) {
      if (pointerType !== "mouse" || !buttons) return;
      moved += Math.abs(x) + Math.abs(y);
      if (moved >= STILL) box.scrollBy(-x, -y);
    },
  });

  return {
    zoom,
    fit,
    tools,
    isStill: () => moved < STILL,
    scale: () => scale,
    /** @param {{w: number, h: number} | undefined} now */
    resize(now) { size = now; },
  };
}
