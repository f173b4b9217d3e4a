/** What stands above the panes: previous, play, next, the scrubber, a link to the moment, and the event in words. */

/** @import { Ledger } from "./ledger.js" */
/** @import { At } from "./types.d.ts" */

import { button, h, icon, named, put, range, slide, tell } from "./dom.js";

/**
 * @typedef {object} Controlled
 * @property {Ledger} ledger
 * @property {number} first  -1 where there is a moment before the first event
 * @property {(by: number) => void} move
 * @property {() => void} toggle
 * @property {(e: number) => void} scrub
 */

/** @param {Controlled} app */
export function controls({ ledger, first, move, toggle, scrub }) {
  const slider = range("event", () => scrub(Number(slider.value) + first), "av-scrub");
  const count = h("span.av-count");
  const kind = h("strong.av-kind");
  const words = h("span");
  const line = h("p.av-say", { "aria-live": "polite" }, kind, words);
  const more = button("more", "more: the whole sentence", unfold, "… more");
  function unfold() {
    const whole = say.classList.toggle("av-whole");
    more.textContent = whole ? "less" : "… more";
    put(more, { "aria-expanded": whole });
  }
  put(more, { "aria-expanded": false });
  const say = h("div.av-saying", {}, line, more);
  const play = button("play", "play", toggle);
  const copied = h("span", { role: "status" });
  const link = h("a.av-b", { ...named("link to this moment"), click: copy }, icon("link"));
  /** @param {Event} event */
  async function copy(event) {
    event.preventDefault();
    try {
      await navigator.clipboard.writeText(link.href);
      tell(copied, "Link copied");
    } catch {
      history.replaceState(null, "", link.href); // moves nothing, as location.href would
      tell(copied, "The link is in the address bar");
    }
  }
  link.hidden = location.protocol === "about:"; // nothing can link into a frame without an address
  const back = button("back", "previous event", () => move(-1));
  const next = button("next", "next event", () => move(1));
  const steps = [back, play, next, slider];
  for (const one of steps) one.hidden = ledger.length - first < 2; // there is no other moment to go to
  const bar = h("div.av-top", {}, ...steps, count, copied, link);

  /** @param {boolean} on */
  function showPlaying(on) {
    const face = on ? "pause" : "play";
    play.replaceChildren(icon(face));
    put(play, named(face));
    line.setAttribute("aria-live", on ? "off" : "polite");
  }
  /** @param {At} state @param {string} told @param {string} address */
  function draw({ e, n }, told, address) {
    if (ledger.length) {
      slide(slider, e - first, ledger.length - 1 - first, ledger.head(e));
      const last = ledger.index(ledger.length - 1).toLocaleString("en");
      tell(count, e < 0 ? "start" : `event ${ledger.index(e).toLocaleString("en")} / ${last}`);
      const happens = (n ?? 0) < 0 ? "forward" : ledger.kinds[e];
      tell(kind, e < 0 ? "start" : happens);
      kind.style.setProperty("--av-kind", ledger.kindColor(e));
      tell(copied, "");
      link.href = address;
    }
    tell(words, told);
    // What fits on one line needs no more; asked last, for all that is new has to be laid out for it.
    more.hidden = !say.classList.contains("av-whole") && line.scrollHeight <= line.clientHeight;
  }
  return { bar, say, play, showPlaying, draw };
}
