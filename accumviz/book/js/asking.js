/** The two ways of answering: among choices, or with a number. Each has its field, its marks and its words. */

import { parse, same, usualReason } from "./answers.js";
import { h } from "../../views/js/dom.js";

/**
 * What the script grades with.
 * @typedef {{right: any, keys: any[], tolerance: number, id: string}} Secret
 */

/**
 * @typedef {object} Way
 * @property {HTMLElement[]} fields  what the reader answers with
 * @property {HTMLInputElement} first  which of them takes the focus
 * @property {number} tries  after so many wrong answers the recorded one is shown
 * @property {[HTMLElement, string] | null} role  of an element that is named by the question
 * @property {string} usual  what help says before anything went wrong
 * @property {string} wanted  what it says when there is no answer
 * @property {() => string | null} answer  what was said, if it is an answer
 * @property {(said: unknown) => boolean} usable
 * @property {(said: string) => boolean} isRight
 * @property {(said: string) => (string | Node)[]} repeat  what was said, as it is shown again
 * @property {(said: string, reasons: Node[][]) => (string | Node)[]} reason  what lies behind a wrong answer
 * @property {(said: string | null) => void} mark  shows what was said and what was recorded
 * @property {(said: string) => void} ruleOut  a first answer that is wrong
 * @property {() => void} refocus  where a second one is given
 * @property {() => void} clear
 * @property {(wrong: boolean) => void} invalid
 */

/** @param {Element} element */
export const copy = (element) => [.../** @type {Element} */ (element.cloneNode(true)).childNodes];

/** @param {Element} list @param {Secret} secret @param {string} unique @returns {Way} */
export function byChoice(list, { right, keys }, unique) {
  const items = [...list.children];
  const radios = items.map((_, i) => h("input", { type: "radio", name: unique, value: i }));
  const labels = radios.map((radio, i) => h("label.av-choice", {}, radio, h("span", {}, ...copy(items[i]))));

  /** @param {number} i @param {string} told */
  function note(i, told) {
    labels[i].querySelector(".av-mark")?.remove();
    if (told) labels[i].append(h("em.av-mark", {}, told));
  }
  /** @param {string} said */
  function ruleOut(said) {
    radios[Number(said)].checked = false;
    radios[Number(said)].disabled = true;
    note(Number(said), "not this");
  }
  /** @param {string | null} said */
  function mark(said) {
    radios.forEach((radio, i) => {
      const mine = said !== null && i === Number(said);
      radio.disabled = true;
      radio.checked = mine;
      if (mine || i === right) note(i, i === right ? "recorded" : "your answer");
      labels[i].classList.toggle("av-right", i === right);
    });
  }
  function clear() {
    radios.forEach((radio, i) => {
      radio.disabled = radio.checked = false;
      labels[i].classList.remove("av-right");
      note(i, "");
    });
  }
  return {
    fields: labels,
    first: radios[0],
    tries: Math.min(radios.length - 1, 2), // of two choices, one is left
    role: null,
    usual: "",
    wanted: "Choose one first.",
    answer: () => radios.find((radio) => radio.checked)?.value ?? null,
    usable: (said) => typeof said === "string" && Boolean(radios[Number(said)]),
    isRight: (said) => Number(said) === right,
    repeat: (said) => copy(items[Number(said)]),
    reason: (said, reasons) => reasons[keys.indexOf(Number(said))] ?? [],
    mark,
    ruleOut,
    refocus: () => radios.find((radio) => !radio.disabled)?.focus(),
    clear,
    invalid() {},
  };
}

/** @param {Secret} secret @returns {Way} */
export function byNumber({ right: recorded, keys, tolerance }) {
  const field = h("input.av-field", { autocomplete: "off", autocapitalize: "off", spellcheck: false });
  const right = parse(recorded);
  const fits = (/** @type {string} */ said, /** @type {string} */ one) => same(parse(said), parse(one), tolerance);
  /** @param {string} said @param {Node[][]} reasons */
  function reason(said, reasons) {
    const known = keys.findIndex((key) => fits(said, key));
    if (known >= 0) return reasons[known];
    const usual = usualReason(parse(said), right, tolerance);
    return usual ? [usual] : [];
  }
  const usable = (/** @type {unknown} */ said) => typeof said === "string" && parse(said) !== undefined;
  return {
    fields: [field],
    first: field,
    tries: 2,
    role: [field, "textbox"],
    usual: `A number, a fraction, or None. Within ${Number((100 * tolerance).toPrecision(3))}\u00a0% counts.`,
    wanted: "Write a number such as −2.5, 1/2 or 2e3, or None.",
    answer: () => (usable(field.value) ? field.value : null),
    usable,
    isRight: (said) => fits(said, recorded),
    repeat: (said) => [parse(said) === null ? "None" : said.trim().replaceAll("-", "−")],
    reason,
    mark() {},
    ruleOut() {},
    refocus() { field.select(); },
    clear() { field.value = ""; },
    invalid(wrong) { field.setAttribute("aria-invalid", String(wrong)); },
  };
}
