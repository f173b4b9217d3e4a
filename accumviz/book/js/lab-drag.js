/** Carrying a line with the mouse: a finger taps instead, since what it drags is the page. */

/** A place for a line, and what puts it there. @typedef {{role: string, el: HTMLElement, drop: () => void}} Slot */

/** A mouse that moves less was a click. */
const STILL = 4;

/** How far the middle of an element is from a height. @param {Element} el @param {number} y */
function away(el, y) {
  const { top, bottom } = el.getBoundingClientRect();
  return Math.abs((top + bottom) / 2 - y);
}

/**
 * The place that is nearest to a height; none where the line itself is nearer.
 * @param {Slot[]} slots @param {HTMLElement} line @param {number} y
 */
function nearest(slots, line, y) {
  const [first] = [...slots].sort((a, b) => away(a.el, y) - away(b.el, y));
  return first && away(first.el, y) < away(line, y) ? first : undefined;
}

/**
 * Scroll until an element stands at a height again: places that open above it would take it from under the pointer.
 * @param {Element} [el] @param {number} [top]
 */
export function hold(el, top) {
  for (let box = el?.parentElement; el && box && top; box = box.parentElement) {
    box.scrollBy({ top: el.getBoundingClientRect().top - top, behavior: "instant" });
  }
}

/** @param {Slot[]} slots @param {(role: string) => void} lift */
export function carrying(slots, lift) {
  let carried = false;

  /** @param {PointerEvent} event @param {string} role @param {HTMLElement} line */
  function begin({ pointerType, button, clientX, clientY }, role, line) {
    carried = false;
    if (pointerType === "touch" || button) return;
    const mine = slots.filter((slot) => slot.role === role);
    const ended = new AbortController();
    const { signal } = ended;
    /** @type {Slot | undefined} */
    let near;

    /** @param {PointerEvent} event */
    function follow(event) {
      if (!carried && Math.hypot(event.clientX - clientX, event.clientY - clientY) < STILL) return;
      if (!carried) lift(role);
      carried = true;
      near = nearest(mine, line, event.clientY);
      for (const slot of mine) slot.el.classList.toggle("av-near", slot === near);
    }
    /** @param {boolean} dropped */
    function end(dropped) {
      ended.abort();
      if (!carried) return;
      if (dropped) near?.drop();
      lift("");
    }
    addEventListener("pointermove", follow, { signal });
    addEventListener("pointerup", () => end(true), { signal });
    addEventListener("pointercancel", () => end(false), { signal });
  }
  /** Whether the click that comes now is the end of a way. */
  function ended() {
    const was = carried;
    carried = false;
    return was;
  }
  return { begin, ended };
}
