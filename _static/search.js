/** Search by section: their text stands in searchindex.js, so that a page opened as a file finds, too. */
"use strict";
{
  /** @typedef {{url: string, title: string, page: string, text: string, shut: string, weight: number}} Section */
  /** @type {Section[]} */
  const sections = /** @type {any} */ (window).BOOK_SECTIONS || [];
  const typical = sections.reduce((sum, { text, shut }) => sum + text.length + shut.length, 0) / (sections.length || 1);
  const found = /** @type {HTMLElement} */ (document.getElementById("search-results"));
  const count = /** @type {HTMLElement} */ (document.getElementById("search-count"));

  /** A pattern for the places where one of the words begins. @param {string[]} words */
  function beginnings(words) {
    const escaped = words.map((word) => {
      const literal = word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
      return /^[\p{L}\p{N}_]/u.test(word) ? `(?<![\\p{L}\\p{N}_])${literal}` : literal;
    });
    return new RegExp(`(${escaped.join("|")})`, "giu");
  }

  /** How often a word begins in the text and in the title of each section. @param {string} word */
  function counted(word) {
    const pattern = beginnings([word]);
    const times = (/** @type {string} */ text) => (text.match(pattern) || []).length;
    const counts = sections.map(({ title, text, shut }) => ({ text: times(text) + times(shut), title: times(title) }));
    return { word, counts, spread: counts.filter(({ text, title }) => text + title).length };
  }

  /**
   * The sections with all of the words, or, where there is none, with as many as possible; the one that is most about
   * them first.
   * @param {ReturnType<typeof counted>[]} words
   */
  function ranked(words) {
    const rated = sections.map((section, index) => {
      const length = 0.25 + (0.75 * (section.text.length + section.shut.length)) / typical;
      let score = 0, matched = 0;
      for (const { counts, spread } of words) {
        const { text, title } = counts[index];
        if (!text && !title) continue;
        matched += 1;
        const rarity = Math.log(1 + sections.length / spread);
        score += rarity * ((2.2 * text) / (text + 1.2 * length) + 4 * Math.min(title, 1));
      }
      return { section, matched, score: score * section.weight };
    });
    const all = rated.some(({ matched }) => matched === words.length);
    return rated
      .filter(({ matched }) => (all ? matched === words.length : matched))
      .sort((a, b) => b.matched - a.matched || b.score - a.score);
  }

  /** The words that say what is sought: not "the", which is everywhere. @param {ReturnType<typeof counted>[]} words */
  function telling(words) {
    const rare = words.filter(({ spread }) => spread && spread < sections.length / 3);
    return (rare.length ? rare : words).map(({ word }) => word);
  }

  /** The text about the first of the words, these marked. @param {Section} section @param {string[]} words */
  function excerpt({ text, shut }, words) {
    const sought = beginnings(words);
    if (text.search(sought) < 0 && shut.search(sought) >= 0)
      return ["The words are in an answer, which opens with your prediction."];
    const at = Math.max(text.search(sought), 0);
    const from = at > 80 ? text.indexOf(" ", at - 80) + 1 : 0;
    const part = (from ? "… " : "") + text.slice(from, from + 220).replace(/\s\S*$/, "") + " …";
    return part.split(sought).map((piece, index) => (index % 2 ? element("mark", {}, piece) : piece));
  }

  /** @param {string} name @param {Record<string, string>} attributes @param {...(Node | string)} children */
  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** What the results are. @param {string} asked @param {number} count @param {boolean} all */
  function summary(asked, count, all) {
    if (!count) return `No section has “${asked}”. The beginning of a word finds more.`;
    if (all) return `${count} section${count === 1 ? "" : "s"} with “${asked}”.`;
    return `No section has all of “${asked}”. These have some of its words.`;
  }

  function show() {
    const asked = (new URLSearchParams(location.search).get("q") || "").trim();
    const words = [...new Set(asked.toLowerCase().split(/[\s()[\]"'`,;]+/).filter(Boolean))];
    const fields = /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("input[name=q]"));
    for (const field of fields) field.value = asked;
    if (!words.length) return;
    const sought = words.map(counted);
    const results = ranked(sought), marked = telling(sought);
    const list = element("ul", { class: "search" });
    for (const { section } of results.slice(0, 40)) {
      const [page, anchor] = section.url.split("#");
      const address = `${page}?marked=${encodeURIComponent(marked.join(" "))}${anchor ? `#${anchor}` : ""}`;
      const link = element("a", { href: address }, section.title);
      const where = section.page === section.title ? [] : [element("span", { class: "book-where" }, section.page)];
      list.append(element("li", {}, link, ...where, element("p", {}, ...excerpt(section, marked))));
    }
    found.append(list);
    count.textContent = summary(asked, results.length, results[0]?.matched === words.length);
  }
  show();
}
