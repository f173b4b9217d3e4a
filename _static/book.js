/** What a page of the book does beside its figures: colours, the list of chapters, search, copying, printing. */
"use strict";
{
  const root = document.documentElement;
  const wide = matchMedia("(min-width: 62rem)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const modes = ["auto", "light", "dark"];
  const words = { auto: "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };

  /** @template {HTMLElement} E @param {string} selector @returns {E[]} */
  const all = (selector) => [...document.querySelectorAll(selector)].map((element) => /** @type {E} */ (element));
  /** @param {string} selector @param {(event: MouseEvent) => void} act */
  const pressed = (selector, act) => all(selector).forEach((button) => button.addEventListener("click", act));

  /** @param {string} mode */
  function colour(mode) {
    root.dataset.mode = mode;
    root.dataset.theme = mode === "auto" ? (dark.matches ? "dark" : "light") : mode;
    const said = words[/** @type {"auto"} */ (mode)];
    for (const button of all(".theme-switch-button")) {
      button.title = said;
      const name = button.querySelector(".book-name");
      if (name) name.textContent = said;
    }
  }

  function colours() {
    colour(root.dataset.mode || "auto");
    dark.addEventListener("change", () => colour(root.dataset.mode || "auto"));
    pressed(".theme-switch-button", () => {
      const mode = modes[(modes.indexOf(root.dataset.mode || "auto") + 1) % modes.length];
      colour(mode);
      try {
        localStorage.setItem("mode", mode);
      } catch {
        // a reader who keeps nothing still sees the colours change
      }
    });
    // paper is light
    addEventListener("beforeprint", () => { root.dataset.theme = "light"; });
    addEventListener("afterprint", () => colour(root.dataset.mode || "auto"));
  }

  /** Whether questions come before their answers: remembered, and said by the button. */
  function predictions() {
    const first = "avPredicts" in root.dataset;
    for (const button of all(".book-predict")) {
      button.setAttribute("aria-pressed", String(first));
      button.title = first ? "Show everything" : "Predict first: what answers a question opens with your answer";
    }
    pressed(".book-predict", () => {
      try {
        if (first) localStorage.removeItem("predict");
        else localStorage.setItem("predict", "first");
      } catch {
        // the address says it instead
      }
      location.search = first ? "?show" : "?predict";
    });
  }

  function chapters() {
    const [side] = all("#book-side");
    const [drawer] = /** @type {HTMLDialogElement[]} */ (all(".book-drawer"));
    const [menu] = all(".book-menu");
    if (!side || !drawer || !menu) return;
    const place = /** @type {Element} */ (side.parentElement);
    const settle = () => {
      if (!drawer.open) place.prepend(side);
      const shown = wide.matches ? !root.classList.contains("book-narrowed") : drawer.open;
      menu.setAttribute("aria-expanded", String(shown));
    };
    menu.addEventListener("click", () => {
      if (wide.matches) root.classList.toggle("book-narrowed");
      else {
        drawer.append(side);
        drawer.showModal();
      }
      settle();
    });
    drawer.addEventListener("close", settle);
    drawer.addEventListener("click", (event) => {
      const on = /** @type {Element} */ (event.target);
      if (on === drawer || on.closest("a, .book-close, .book-find")) drawer.close();
    });
    wide.addEventListener("change", () => (drawer.open ? drawer.close() : settle()));
    settle();
  }

  function searching() {
    const [dialog] = /** @type {HTMLDialogElement[]} */ (all(".book-asked"));
    const toggle = () => (dialog.open ? dialog.close() : dialog.showModal());
    pressed(".book-find", toggle);
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
        event.preventDefault();
        toggle();
      }
    });
  }

  /** What is typed into the dialog of the search is answered below it; the index comes with the first letter. */
  function answering() {
    const [field] = /** @type {HTMLInputElement[]} */ (all(".book-asked input"));
    const [told, listed] = all(".book-listed > *");
    const [{ content }] = /** @type {HTMLTemplateElement[]} */ (all(".book-finder"));
    const root = /** @type {HTMLFormElement} */ (field.form).action.replace(/[^/]*$/, "");
    let /** @type {Promise<any> | undefined} */ there;
    const load = (/** @type {Element} */ { attributes: [{ value: src }] }) => new Promise((onload) => {
      document.head.append(Object.assign(document.createElement("script"), { src, async: false, onload }));
    });
    field.addEventListener("input", async () => {
      await (there ??= Promise.all([...content.children].map(load)));
      const { list, said } = /** @type {any} */ (window).BOOK_ANSWERS(field.value.trim(), 6, root);
      told.textContent = field.value.trim() && said;
      listed.replaceChildren(...(told.textContent ? [list] : []));
    });
  }

  /** The section being read is marked in the list of chapters. */
  function following() {
    /** @type {Map<Element, Element>} */
    const links = new Map();
    for (const link of all(".book-inside a")) {
      const section = document.getElementById(decodeURIComponent((link.getAttribute("href") || "").slice(1)));
      if (section) links.set(section, link);
    }
    const seen = new Set();
    const watch = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target);
      const current = [...links.keys()].filter((section) => seen.has(section)).at(-1);
      for (const [section, link] of links) {
        if (section === current) link.setAttribute("aria-current", "location");
        else link.removeAttribute("aria-current");
      }
    }, { rootMargin: "-20% 0px -70% 0px" });
    for (const section of links.keys()) watch.observe(section);
  }

  /** What can be scrolled can be reached by keyboard, and what can be copied has a button. */
  function code() {
    for (const pre of all(".bd-article div.highlight pre")) {
      const holder = /** @type {Element} */ (pre.parentElement);
      if (pre.closest(".cell_output, .accumviz")) continue;
      const button = document.createElement("button");
      button.className = "book-copy";
      button.type = "button";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        const copy = /** @type {Element} */ (pre.cloneNode(true));
        for (const number of copy.querySelectorAll(".linenos")) number.remove();
        try {
          await navigator.clipboard.writeText(copy.textContent || "");
          button.textContent = "Copied";
        } catch {
          button.textContent = "Not allowed";
        }
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
      holder.append(button);
    }
    const scrolls = ".bd-article .pst-scrollable-table-container";
    const boxes = all(`.bd-article pre, .bd-article .book-scrolls, .bd-article .cell_output, ${scrolls}`);
    const watch = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        if (target.scrollWidth > target.clientWidth + 1) target.setAttribute("tabindex", "0");
        else target.removeAttribute("tabindex");
      }
    });
    for (const box of boxes) watch.observe(box);
  }

  /** @param {string} text @param {RegExp} sought @returns {(string | Element)[]} */
  function parted(text, sought) {
    return text.split(sought).map((part, index) => {
      if (index % 2 === 0) return part;
      const mark = document.createElement("mark");
      mark.textContent = part;
      return mark;
    });
  }

  /** The words that a search led here for, marked until Escape. */
  function marks() {
    const asked = (new URLSearchParams(location.search).get("marked") || "").split(/\s+/).filter(Boolean);
    const [article] = all(".bd-article");
    if (!asked.length || !article) return;
    const escaped = asked.map((word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
    const sought = new RegExp(`((?<![\\p{L}\\p{N}_])(?:${escaped.join("|")}))`, "giu");  // where a word begins
    const walk = document.createTreeWalker(article, NodeFilter.SHOW_TEXT, (node) =>
      node.parentElement?.closest(".accumviz, script, style, math, svg") ? 2 : 1);
    const found = [];
    while (walk.nextNode()) if (walk.currentNode.nodeValue?.match(sought)) found.push(walk.currentNode);
    for (const node of found) /** @type {Text} */ (node).replaceWith(...parted(node.nodeValue || "", sought));
    const clear = () => {
      for (const mark of all("mark")) mark.replaceWith(...mark.childNodes);
      document.getElementById("book-marks")?.replaceChildren();
    };
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Take the marks away";
    button.addEventListener("click", clear);
    document.getElementById("book-marks")?.append(button);
    addEventListener("keydown", ({ key }) => { if (key === "Escape") clear(); });
    // what was folded or laid out since may have moved the place that the address names
    if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
  }

  /** The audit's marks lead to rows of a table, also to those that are left out. */
  function claims() {
    const [sought] = /** @type {HTMLInputElement[]} */ (all("figure.claims input[type=search]"));
    const [every] = /** @type {HTMLInputElement[]} */ (all("figure.claims input[value=all]"));
    if (!sought || !every) return;
    const rows = all("table.claims tbody tr");
    const seek = () => {
      const words = sought.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const missed = !words.every((word) => row.textContent?.toLowerCase().includes(word));
        row.classList.toggle("book-unsought", missed);
        all(`figure.claims a[href="#${row.id}"]`).forEach((mark) => mark.classList.toggle("book-unsought", missed));
      }
    };
    const go = () => {
      const row = rows.find(({ id }) => `#${id}` === location.hash);
      if (!row) return;
      if (!row.checkVisibility()) {
        every.checked = true;
        sought.value = "";
        seek();
      }
      row.scrollIntoView();
    };
    for (const set of all("fieldset.claims")) set.addEventListener("input", seek);
    addEventListener("hashchange", go);
    /** @type {HTMLElement} */ (sought.parentElement).hidden = false;
    go();
  }

  /** Whatever fills the screen goes back; else this fills it. @param {Element} part */
  const filling = (part) => (document.fullscreenElement ? document.exitFullscreen() : part.requestFullscreen());

  /** A figure fills the screen, and comes back by the same button or Escape. */
  function enlarging() {
    if (!document.fullscreenEnabled) return;
    for (const caption of all("figure > figcaption")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "book-enlarge";
      button.title = button.ariaLabel = "Enlarge this figure";
      button.textContent = "⤢";
      button.addEventListener("click", () => filling(caption.parentElement || root));
      (caption.querySelector("p:last-of-type") ?? caption).append(button);
    }
  }

  predictions();
  pressed(".book-full", () => filling(root));
  colours();
  chapters();
  searching();
  answering();
  following();
  code();
  marks();
  claims();
  enlarging();
}
