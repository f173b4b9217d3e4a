/** One question on the page: a form that opens its fold once the reader has answered, or asked to be shown. */

/** @import { Secret, Way } from "./asking.js" */

import { byChoice, byNumber, copy } from "./asking.js";
import { h, KEYS_ARE_MINE, put } from "../../views/js/dom.js";
import { gate } from "./gate.js";
import { memory } from "./memory.js";

const SIGNS = { right: "✓", wrong: "✗", retry: "✗", skipped: "→" };

/** @param {string} name @param {string} text @param {() => void} click */
const button = (name, text, click) => h(`button.${name}`, { type: "button", click }, text);

/** The parts of a question that Python wrote. @param {HTMLElement} root */
function partsOf(root) {
  const ask = /** @type {HTMLElement} */ (root.querySelector(".av-ask"));
  const reveal = /** @type {HTMLDetailsElement} */ (root.querySelector(".av-reveal"));
  /** @type {NodeListOf<HTMLTableRowElement>} */
  const others = reveal.querySelectorAll(":scope > .av-others > tbody > tr");
  const reasons = () => [...others].map((row) => copy(row.cells[1]));
  const question = /** @type {HTMLElement} */ (ask.querySelector(".av-question"));
  const list = ask.querySelector(":scope > ul");
  return { ask, reveal, question, list, reasons };
}

/**
 * What is said about an answer.
 * @param {Way} way @param {keyof typeof SIGNS} state @param {string} said @param {Node[][]} reasons
 * @param {string | null} first  the first of the tries
 */
function verdictOn(way, state, said, reasons, first) {
  const told = h("p", {}, h("span.av-sign", { "aria-hidden": "true" }, SIGNS[state]));
  // A choice is seen where it was made; the field of a number is gone.
  if (state === "right") {
    told.append(h("b", {}, "Right."), ...(way.role ? [" You said ", ...way.repeat(said), "."] : []));
  } else if (state === "skipped") told.append(h("b", {}, `Shown ${first ? "after one try" : "without a prediction"}.`));
  else {
    const why = way.reason(said, reasons);
    const plain = state === "retry" ? "That is not what was recorded." : "Compare it with what was recorded.";
    told.append(h("b", {}, "You said ", ...way.repeat(said), "."), " ", ...(why.length ? why : [plain]));
    if (state === "retry") told.append(" Try once more.");
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
  for (const old of ask.querySelectorAll(".av-made")) old.remove();
  const way = list ? byChoice(list, secret, unique) : byNumber(secret);
  const help = h("p.av-help", { id: `${unique}-help`, "aria-live": "polite" });
  const verdict = h("div.av-verdict.av-made", { "aria-live": "polite" });

  /** @param {string} text */
  function complain(text) {
    help.textContent = text || way.usual;
    help.classList.toggle("av-wanted", text !== "");
    way.invalid(text !== "");
  }
  const isAsked = () => /asked|retry/.test(root.dataset.avState ?? "");
  /** Show a state, and what it opens. @param {string} state */
  function show(state) {
    root.dataset.avState = state;
    reveal.open = !isAsked();
    gate(root, reveal.open);
  }
  /** What was said so far, last of all null when the reader asked to be shown. @type {(string | null)[]} */
  let tries = [];

  /** Grade the last of the tries, and open what it opens. */
  function settle() {
    const said = tries[tries.length - 1] ?? "";
    const state = stateOf(way, tries);
    verdict.replaceChildren(verdictOn(way, state, said, reasons(), tries[0]));
    if (state === "retry") way.ruleOut(said);
    else way.mark(state === "skipped" ? null : said);
    show(state);
    if (reveal.open) dispatchEvent(new Event("resize")); // what was folded away had no size
  }
  /** @param {string | null} said */
  function commit(said) {
    tries.push(said);
    settle();
    past.keep(tries);
    if (reveal.open) root.focus({ preventScroll: true }); // what had the focus is hidden now
    else way.refocus();
  }
  function submit() {
    const said = way.answer();
    if (said === null || tries.includes(said)) {
      complain(said === null ? way.wanted : "That was your first answer.");
      way.first.focus();
    } else commit(said);
  }
  function begin() {
    tries = [];
    show("asked");
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
    if (reveal.open && isAsked()) commit(null);
  });
  // Paper holds every answer.
  let screen = "";
  addEventListener("beforeprint", () => {
    screen = root.dataset.avState ?? "";
    if (isAsked()) show("printed");
  });
  addEventListener("afterprint", () => show(screen));
  question.id = `${unique}-question`;
  root.tabIndex = -1;
  put(root, { role: "group", "aria-labelledby": question.id });
  const [answered, role] = way.role ?? [form, "radiogroup"];
  put(answered, { role, "aria-labelledby": question.id });
  way.first.setAttribute("aria-describedby", help.id);
  (list ?? question).after(form);
  ask.append(verdict, button("av-again.av-made", "Ask me again", again));
  for (const control of ask.querySelectorAll("input, button")) put(control, KEYS_ARE_MINE);

  begin();
  for (const said of remembered(past.kept()?.said, way)) {
    tries.push(said);
    settle();
  }
}

/** The tries that a browser kept, if they make sense. @param {unknown} kept @param {Way} way */
function remembered(kept, way) {
  const usable = Array.isArray(kept) && kept.every((said) => said === null || way.usable(said));
  return usable ? kept.slice(0, 2) : [];
}

/** Whether the question is over: a wrong answer has a second try, where one is left to be wrong in. */
function stateOf(/** @type {Way} */ way, /** @type {(string | null)[]} */ tries) {
  const said = tries[tries.length - 1];
  if (said === null) return "skipped";
  if (way.isRight(said)) return "right";
  return tries.length < way.tries ? "retry" : "wrong";
}
