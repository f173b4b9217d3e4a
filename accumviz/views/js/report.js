/** The report on a recording: its first line is said aloud; findings and suggestions are below. */

/** @import { FindingData, ReportData } from "./types.d.ts" */

import { h, pane, put } from "./dom.js";

const SIGNS = { healthy: "✓", findings: "✗", "no verdict": "?" };

/** @param {string} line */
const suggestedLine = (line) => {
  const tag = line.startsWith("+") ? "ins" : line.startsWith("-") ? "del" : "span";
  return h(tag, {}, `${line}\n`);
};

/** @param {string} name @param {...Node} content */
const details = (name, ...content) => h("details", {}, h("summary", {}, name), ...content);

/** A text in which backticks mark code. @param {string} text */
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** @param {FindingData} found @param {(e: number) => void} go */
function articleOf({ rule, severity, event, line, cause, evidence, suggestion, read }, go) {
  const leads = h("button.av-leads", { type: "button", click: () => go(event) }, `line ${line}`);
  const head = h("p", {}, h("b", {}, rule), ` (${severity}) `, ...(line ? [leads] : []));
  const about = { tabindex: 0, role: "group", "aria-label": "the suggestion" };
  const lines = h("pre.av-suggestion", about, ...suggestion.map(suggestedLine));
  const { book } = document.documentElement.dataset;
  const page = read || (book && `${book}../api.html#rule-${rule}`);
  const link = page ? h("a", { href: page }, rule) : `the reference of the book, under ${rule}`;
  const more = [...(evidence ? [[evidence]] : []), ["Read: ", link]];
  return h("article", {}, head, h("p", {}, ...marked(cause)), ...(suggestion.length ? [lines] : []),
    ...more.map((parts) => h("p.av-quiet", {}, ...parts)));
}

/** @param {(e: number) => void} go */
export function reportPane(go) {
  const sign = h("span.av-judged", { "aria-hidden": "true" });
  const said = h("b");
  const aside = h("span.av-aside");
  const live = h("p.av-said", { "aria-live": "polite" }, sign, " ", said, " ", aside);
  const found = h("div.av-found.av-scroll");
  const made = pane("report", "Report of check", live, found);

  /** @param {ReportData} report @param {string} note what else is to be said */
  function draw(report, note) {
    put(made.el, { "data-verdict": report.verdict });
    sign.textContent = SIGNS[report.verdict];
    said.textContent = report.said;
    aside.textContent = note;
    // Beside a player the first one is read first, and the player stays in sight.
    found.replaceChildren(...report.findings.map((one, i) => {
      const article = articleOf(one, go);
      return i && report.about ? details(`${one.rule} (${one.severity})`, article) : article;
    }));
    const unjudged = report.unjudged?.map((text) => h("p.av-quiet", {}, text));
    if (unjudged) found.append(details("Not judged", ...unjudged));
  }
  return { ...made, draw };
}
