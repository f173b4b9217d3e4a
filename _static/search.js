/** Search by section: their text stands in searchindex.js, so that a page opened as a file finds, too. */
"use strict";
{
  /** @typedef {{url: string, title: string, page: string, text: string, shut: string, weight: number}} Section */
  /** @type {Section[]} */
  const sections = /** @type {any} */ (window).BOOK_SECTIONS || [];
  const typical = sections.reduce((sum, { text, shut }) => sum + text.length + shut.length, 0) / (sections.length || 1);

  /** What other texts call otherwise: each word of a line finds the others. */
  const SAME = [
    "micro-batch|microbatch|mini-batch|minibatch", "inplace|in-place", "warm-up|warmup",
    "batchnorm|batch norm|batch-norm", "checkpoint|gradient checkpoint|activation checkpoint",
    "float16|fp16|half precision", "bfloat16|bf16", "float32|fp32|32 bits", "rank|world size|number of gpus",
    "zero_grad|zero grad|reset gradient|clear gradient", "retain_graph|retain graph",
  ].map((line) => line.split("|"));
  /** Words of a question that do not say what it is about. */
  const EMPTY = new Set(("a an and any are at be between by can did difference do does for from has have how i if in " +
    "is it its my need of on or our should so than that the then there this to use using vs was we what when where " +
    "which why will with you").split(" "));

  /** A pattern for the places where one of the words begins. @param {string[]} words */
  function beginnings(words) {
    const escaped = words.map((word) => {
      const literal = word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
      return /^[\p{L}\p{N}_]/u.test(word) ? `(?<![\\p{L}\\p{N}_])${literal}` : literal;
    });
    return new RegExp(`(${escaped.join("|")})`, "giu");
  }

  /** A word without its ending: "clipping" and "clipped" find "clip". @param {string} word */
  function stem(word) {
    const bare = word.replace(/^([a-z]{4,}?)(?:(?<=([bdgmnprt]))\2)?(?:ations?|ating|ated?|ing|ed|er|es)$/, "$1");
    return bare === word ? word.replace(/^([a-z]{2,}[^s])s$/, "$1") : bare;
  }

  /** What a question is about: for each thing, the words that stand for it. @param {string} question */
  function things(question) {
    let rest = question.toLowerCase();
    const named = SAME.filter((words) => {
      const before = rest;
      rest = rest.replace(new RegExp(`${beginnings(words).source}\\p{L}*`, "giu"), " ");
      return rest !== before;
    });
    const words = rest.split(/[\s()[\]"'`,.:;?!=]+/).filter(Boolean);
    const telling = words.filter((word) => !EMPTY.has(word));
    const kept = telling.length || named.length ? telling : words;
    return [...named, ...[...new Set(kept.map(stem))].map((word) => [word])];
  }

  /** How often a thing is named in the text and in the title of each section. @param {string[]} words */
  function counted(words) {
    const pattern = beginnings(words);
    const times = (/** @type {string} */ text) => (text.match(pattern) || []).length;
    const counts = sections.map(({ title, text, shut }) => ({ text: times(text) + times(shut), title: times(title) }));
    const spread = counts.filter(({ text, title }) => text + title).length;
    return { words, counts, spread, rarity: spread && Math.log(1 + sections.length / spread) };
  }

  /**
   * The sections that name any of the things, the one that is most about them first.
   * @param {ReturnType<typeof counted>[]} sought
   */
  function ranked(sought) {
    const sum = (/** @type {number[]} */ numbers) => numbers.reduce((total, number) => total + number, 0);
    const all = sum(sought.map(({ rarity }) => rarity));
    const rated = sections.map((section, index) => {
      const length = 0.25 + (0.75 * (section.text.length + section.shut.length)) / typical;
      const named = sought.filter(({ counts }) => counts[index].text + counts[index].title);
      const score = sum(named.map(({ counts, rarity }) => {
        const { text, title } = counts[index];
        return rarity * ((2.2 * text) / (text + 1.2 * length) + 4 * Math.min(title, 1));
      }));
      const share = sum(named.map(({ rarity }) => rarity)) / all;
      return { section, whole: named.length === sought.length, score: score * share * section.weight };
    });
    return rated.filter(({ score }) => score).sort((a, b) => b.score - a.score);
  }

  /** The words to mark: not those that are everywhere. @param {ReturnType<typeof counted>[]} sought */
  function telling(sought) {
    const rare = sought.filter(({ spread }) => spread && spread < sections.length / 3);
    return (rare.length ? rare : sought).flatMap(({ words }) => words.filter((word) => !/\s/.test(word)));
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

  /** What the results are. @param {string} asked @param {number} count @param {boolean} some */
  function summary(asked, count, some) {
    if (count) return `${count} section${count === 1 ? "" : "s"} with “${asked}”.`;
    return some ? `No section has all of “${asked}”. These have some of its words.` :
      `No section has “${asked}”. The beginning of a word finds more.`;
  }

  /** What answers a question, the best first: so many sections, with addresses from the book's root, and a summary. */
  function answers(/** @type {string} */ asked, most = 40, root = "") {
    const sought = things(asked).map(counted);
    const results = ranked(sought), marked = telling(sought);
    const list = element("ul", { class: "search" });
    for (const { section } of results.slice(0, most)) {
      const [page, anchor] = section.url.split("#");
      const address = `${root}${page}?marked=${encodeURIComponent(marked.join(" "))}${anchor ? `#${anchor}` : ""}`;
      const link = element("a", { href: address }, section.title);
      const where = section.page === section.title ? [] : [element("span", { class: "book-where" }, section.page)];
      list.append(element("li", {}, link, ...where, element("p", {}, ...excerpt(section, marked))));
    }
    return { list, said: summary(asked, results.filter(({ whole }) => whole).length, results.length > 0) };
  }

  /** On the page of the search: what its address asks. @param {HTMLElement} found */
  function show(found) {
    const asked = (new URLSearchParams(location.search).get("q") || "").trim();
    const fields = /** @type {NodeListOf<HTMLInputElement>} */ (document.querySelectorAll("input[name=q]"));
    for (const field of fields) field.value = asked;
    if (!asked) return;
    const { list, said } = answers(asked);
    found.append(list);
    /** @type {HTMLElement} */ (document.getElementById("search-count")).textContent = said;
  }
  /** @type {any} */ (window).BOOK_ANSWERS = answers;
  const place = document.getElementById("search-results");
  if (place) show(place);
}
