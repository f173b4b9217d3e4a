/** What a prediction keeps shut beyond its own fold: the page marks it with the prediction's id. */

const SHUT = "[data-answers]:not([data-given])";
const ASKING = '.av-predict:is([data-av-state="asked"], [data-av-state="retry"])';

/** Open or shut what answers a prediction elsewhere on its page. @param {HTMLElement} root @param {boolean} open */
export function gate(root, open) {
  if (!root.id) return;
  for (const answer of document.querySelectorAll(`[data-answers="${CSS.escape(root.id)}"]`)) {
    answer.toggleAttribute("data-given", open);
    if (!open) continue;
    // What scrolls sideways is reached by the keyboard; a page that looked for it earlier found no width here.
    for (const pre of answer.querySelectorAll("pre")) if (pre.scrollWidth > pre.clientWidth) pre.tabIndex = 0;
  }
}

/** An address may name what is shut still: its prediction is the place to go to. */
export function lead() {
  const name = location.hash.slice(1).split("&")[0];
  const target = name && (document.getElementById(name) ?? document.querySelector(`[data-done="${CSS.escape(name)}"]`));
  if (!target) return;
  const answer = /** @type {HTMLElement | null} */ (target.closest(SHUT));
  const asking = answer ? document.getElementById(answer.dataset.answers ?? "") : target.parentElement?.closest(ASKING);
  asking?.scrollIntoView({ block: "nearest" });
}
