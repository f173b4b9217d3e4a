/** A box in which a drawing is zoomed, fitted and panned. */

import { put } from "./dom.js";
import { clamp } from "./numbers.js";

/** A pointer that moved further than this was dragging, not clicking. */
const STILL = 4;

/** Letters are as small as may be at the one; two graphs that would fit side by side are compared down to the other. */
const [READ, COMPARED] = [0.88, 0.76];

/** @param {HTMLElement} box @param {{w: number, h: number, tall: number} | undefined} room  of two graphs */
export function zooming(box, room) {
  let [scale, moved] = [1, 0];
  /** @type {{w: number, h: number} | undefined} */
  let size;

  /** Zoom by a factor (0: until all is in view) around the middle. @param {number} factor */
  function zoom(factor, least = 0.1, most = 3) {
    if (!size) return;
    const { clientWidth: width, clientHeight: height } = box;
    const middle = [(box.scrollLeft + width / 2) / scale, (box.scrollTop + height / 2) / scale];
    scale = clamp(factor ? scale * factor : Math.min(...fits()), least, most);
    const drawing = /** @type {SVGElement} */ (box.firstChild);
    drawing.style.cssText = `width: ${size.w * scale}px; height: ${size.h * scale}px`;
    box.scrollLeft = middle[0] * scale - width / 2;
    box.scrollTop = middle[1] * scale - height / 2;
  }

  /** The scales at which the width fits, and the height: the same for two graphs side by side. */
  function fits() {
    const [w, h] = [Math.max(size?.w ?? 0, room?.w ?? 0), Math.max(size?.h ?? 0, room?.h ?? 0)];
    return [(box.clientWidth - 4) / w, (Math.min(box.clientHeight, room?.tall ?? Infinity) - 4) / h];
  }
  /** As large as fits, but never too small to read. */
  function fit() {
    const [across, up] = fits();
    const least = room && [Math.min(across, up), across].find((one) => one >= COMPARED);
    zoom(0, Math.min(least ?? READ, READ), 1.15);
    box.scrollLeft = (box.scrollWidth - box.clientWidth) / 2;
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
    isStill: () => moved < STILL,
    scale: () => scale,
    /** @param {{w: number, h: number} | undefined} now */
    resize(now) { size = now; },
  };
}
