/** Search by section: their text stands in searchindex.js, so that a page opened as a file finds, too. */
"use strict";
{
  /** @typedef {{url: string, title: string, page: string, text: string, weight: number}} Section */
  /** @type {Section[]} */
  const sections = /** @type {any} */ (window).BOOK_SECTIONS || [];
  const typical = sections.reduce((sum, { text }) => sum + text.length, 0) / (sections.length || 1);
  const found = /** @type {HTMLElement} */ (document.getElementById("search-results"));
  const count = /** @type {HTMLElement} */ (document.getElementById("search-count"));

  /** How often a word begins, in lower case. @param {string} text @param {string} word */
  function times(text, word) {
    let seen = 0;
    for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + word.length)) {
      if (at === 0 || !/[\p{L}\p{N}_]/u.test(text[at - 1])) seen += 1;
    }
    return seen;
  }

  /** The sections with all of the words, the one that is most about them first. @param {string[]} words */
  function ranked(words) {
    const lower = sections.map(({ title, text }) => [title.toLowerCase(), text.toLowerCase()]);
    const rare = words.map((word) => {
      const having = lower.filter(([title, text]) => times(title, word) + times(text, word)).length;
      return Math.log(1 + sections.length / (having || 1));
    });
    return sections
      .map((section, index) => {
        const [title, text] = lower[index];
        const length = 0.25 + (0.75 * text.length) / typical;
        let score = 0;
        for (const [at, word] of words.entries()) {
          const inText = times(text, word), inTitle = times(title, word);
          if (!inText && !inTitle) return { section, score: 0 };
          score += rare[at] * ((2.2 * inText) / (inText + 1.2 * length) + 4 * Math.min(inTitle, 1));
        }
        return { section, score: score * section.weight };
      })
      .filter(({ score }) => score > 0)
      .sort((a, b) => b.score - a.score);
  }

  /** The text about the first of the words, these marked. @param {string} text @param {string[]} words */
  function excerpt(text, words) {
    const lower = text.toLowerCase();
    const at = Math.min(...words.map((word) => lower.indexOf(word)).filter((place) => place >= 0), text.length);
    const from = at > 80 ? text.indexOf(" ", at - 80) + 1 : 0;
    const part = (from ? "… " : "") + text.slice(from, from + 220).replace(/\s\S*$/, "") + " …";
    const sought = new RegExp(`(${words.map((word) => word.replace(/[^\w\s]/g, "\\$&")).join("|")})`, "gi");
    return part.split(sought).map((piece, index) => (index % 2 ? element("mark", {}, piece) : piece));
  }

  /** @param {string} name @param {Record<string, string>} attributes @param {...(Node | string)} children */
  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function show() {
    const asked = (new URLSearchParams(location.search).get("q") || "").trim();
    const words = [...new Set(asked.toLowerCase().split(/[\s()[\]"'`,;]+/).filter(Boolean))];
    const fields = /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("input[name=q]"));
    for (const field of fields) field.value = asked;
    if (!words.length) return;
    const results = ranked(words);
    const list = element("ul", { class: "search" });
    for (const { section } of results.slice(0, 40)) {
      const [page, anchor] = section.url.split("#");
      const address = `${page}?marked=${encodeURIComponent(words.join(" "))}${anchor ? `#${anchor}` : ""}`;
      const link = element("a", { href: address }, section.title);
      const where = section.page === section.title ? [] : [element("span", { class: "book-where" }, section.page)];
      list.append(element("li", {}, link, ...where, element("p", {}, ...excerpt(section.text, words))));
    }
    found.append(list);
    count.textContent = results.length
      ? `${results.length} section${results.length === 1 ? "" : "s"} with “${asked}”.`
      : `No section has “${asked}”. Fewer words, or the beginning of one, find more.`;
  }
  show();
}
