/** One question on the page: a form that opens its fold once the reader has answered, or asked to be shown. */

/** @import { Secret, Way } from "./asking.js" */

import { byChoice, byNumber, copy } from "./asking.js";
import { h, KEYS_ARE_MINE, put } from "./dom.js";
import { memory } from "./memory.js";

const SIGNS = { right: "✓", wrong: "✗", skipped: "→" };

/** @param {string} name @param {string} text @param {() => void} click */
const button = (name, text, click) => h(`button.${name}`, { type: "button", click }, text);

/** The parts of a question that Python wrote. @param {HTMLElement} root */
function partsOf(root) {
  const ask = /** @type {HTMLElement} */ (root.querySelector(":scope > .av-ask"));
  const reveal = /** @type {HTMLDetailsElement} */ (root.querySelector(":scope > .av-reveal"));
  /** @type {NodeListOf<HTMLTableRowElement>} */
  const others = reveal.querySelectorAll(":scope > .av-others > tbody > tr");
  const reasons = [...others].map((row) => copy(row.cells[1]));
  const question = /** @type {HTMLElement} */ (ask.querySelector(".av-question"));
  const list = ask.querySelector(":scope > ul");
  return { ask, reveal, question, list, reasons };
}

/**
 * What is said about an answer.
 * @param {Way} way @param {keyof typeof SIGNS} state @param {string} said @param {Node[][]} reasons
 */
function verdictOn(way, state, said, reasons) {
  const told = h("p", {}, h("span.av-sign", { "aria-hidden": "true" }, SIGNS[state]));
  if (state === "right") told.append(h("b", {}, "Right."));
  else if (state === "skipped") told.append(h("b", {}, "Shown without a prediction."));
  else {
    const why = way.reason(said, reasons);
    const closing = why.length ? why : ["Compare it with what was recorded."];
    told.append(h("b", {}, "You said ", ...way.repeat(said), "."), " ", ...closing);
  }
  return told;
}

/** @param {HTMLElement} root the element that carries the question */
export function mount(root) {
  /** @type {Secret} */
  const secret = JSON.parse(atob(root.dataset.avPredict ?? ""));
  const past = memory(`accumviz.predict:${location.pathname}:${secret.id}`);
  const unique = `av-${Math.random().toString(36).slice(2)}`;
  const { ask, reveal, question, list, reasons } = partsOf(root);
  // A page saved from a browser holds what an earlier run had made.
  for (const old of ask.querySelectorAll(":scope > .av-made")) old.remove();
  const way = list ? byChoice(list, secret, unique) : byNumber(secret);
  const help = h("p.av-help", { id: `${unique}-help`, "aria-live": "polite" });
  const verdict = h("div.av-verdict.av-made", { "aria-live": "polite" });

  /** @param {string} text */
  function complain(text) {
    help.textContent = text || way.usual;
    help.classList.toggle("av-wanted", text !== "");
    way.invalid(text !== "");
  }
  /** Grade what was said (null: the reader asked to be shown) and open the fold. @param {string | null} said */
  function settle(said) {
    const state = said === null ? "skipped" : way.isRight(said) ? "right" : "wrong";
    verdict.replaceChildren(verdictOn(way, state, said ?? "", reasons.map(copyAll)));
    way.mark(said);
    root.dataset.avState = state;
    reveal.open = true;
    dispatchEvent(new Event("resize")); // what was folded away had no size
  }
  /** @param {string | null} said */
  function commit(said) {
    settle(said);
    past.keep(said);
    root.focus({ preventScroll: true }); // what had the focus is hidden now
  }
  function submit() {
    const said = way.answer();
    if (said !== null) return commit(said);
    complain(way.wanted);
    way.first.focus();
  }
  function begin() {
    root.dataset.avState = "asked";
    reveal.open = false;
    verdict.replaceChildren();
    way.clear();
    complain("");
  }
  function none() {
    way.first.value = "None";
    complain("");
    check.focus();
  }
  function again() {
    past.forget();
    begin();
    way.first.focus();
  }
  const check = button("av-check", "Check", submit);
  const row = list ? [check] : [...way.fields, button("av-nothing", "None", none), check];
  const form = h("div.av-form.av-made", {}, ...(list ? way.fields : []), h("div.av-row", {}, ...row), help);
  way.first.addEventListener("input", () => complain(""));
  form.addEventListener("keydown", (event) => {
    const target = /** @type {Element} */ (event.target);
    if (event.key !== "Enter" || event.isComposing || target.tagName === "BUTTON") return;
    event.preventDefault();
    if (!event.repeat) submit();
  });
  reveal.addEventListener("toggle", () => {
    if (reveal.open && root.dataset.avState === "asked") commit(null);
  });
  question.id = `${unique}-question`;
  root.tabIndex = -1;
  name([[root, "group"], way.role ?? [form, "radiogroup"]], question.id);
  way.first.setAttribute("aria-describedby", help.id);
  (list ?? question).after(form);
  ask.append(verdict, button("av-again.av-made", "Ask me again", again));
  for (const control of ask.querySelectorAll("input, button")) put(control, KEYS_ARE_MINE);

  begin();
  const said = past.kept()?.said;
  if (said === null || way.usable(said)) settle(/** @type {string | null} */ (said));
}

/** @param {Node[]} nodes */
const copyAll = (nodes) => nodes.map((node) => node.cloneNode(true));

/** @param {[HTMLElement, string][]} roles @param {string} question the id of the question, which names them */
function name(roles, question) {
  for (const [element, role] of roles) {
    element.setAttribute("role", role);
    element.setAttribute("aria-labelledby", question);
  }
}
