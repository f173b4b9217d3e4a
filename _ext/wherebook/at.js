// Words that speak of a state of a figure: they move it there, and are lit while it is there.
const told = (hash) => new URLSearchParams(hash.slice(1));

/** Whether an address names all that the words name. */
function agree(words, shown) {
  return [...told(words)].every(([key, value]) => key === "side" || told(shown).get(key) === value);
}
for (const words of document.querySelectorAll("a.av-at")) {
  const { hash } = words;
  const id = hash.slice(1).split("&")[0];
  const card = words.dataset.card;
  const place = card ? document.getElementById(id)
    : document.querySelector(`[data-accumviz-player="${CSS.escape(id)}"], [data-accumviz-explorer="${CSS.escape(id)}"]`);
  if (!place) continue;
  const light = (on) => {
    words.classList.toggle("av-lit", on);
    if (on) words.setAttribute("aria-current", "true");
    else words.removeAttribute("aria-current");
  };
  if (card) {
    const node = [...place.querySelectorAll("svg g")].filter((g) => g.querySelector(":scope > .av-title"))[card];
    const point = (on) => { node?.classList.toggle("av-pointed", on); light(on); };
    for (const [on, off] of [["pointerenter", "pointerleave"], ["focus", "blur"]]) {
      words.addEventListener(on, () => point(true));
      words.addEventListener(off, () => point(false));
    }
    continue;
  }
  words.addEventListener("click", () => {
    // The address says it already, and would not tell anybody again.
    if (location.hash === hash) dispatchEvent(new Event("hashchange"));
  });
  const look = () => light([...place.querySelectorAll('a[href^="#"]')].some((a) => told(a.hash).has(id) && agree(hash, a.hash)));
  new MutationObserver(look).observe(place, { subtree: true, childList: true, attributeFilter: ["href"] });
  look();
}
