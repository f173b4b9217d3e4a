// accumviz: turns each question on the page into a form that opens its fold; without this, a fold is a fold.

/** What a reader may type: a number, None as null, and undefined for anything else. */
const parse = (text) => {
  const tidy = text.trim().toLowerCase().replace(/[−–—]/g, "-").replace(/\s*[/⁄∕]\s*/, "/").replace(/^([-+])\s+/, "$1");
  if (tidy === "none") return null;
  if (tidy === "nan") return NaN;
  if (/^[-+]?(inf|infinity|∞)$/.test(tidy)) return tidy[0] === "-" ? -Infinity : Infinity;
  const number = "([-+]?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[-+]?\\d+)?)";
  const match = new RegExp(`^${number}(?:/${number})?$`).exec(tidy);
  const value = match ? Number(match[1]) / Number(match[2] ?? 1) : NaN;
  return Number.isFinite(value) ? value : undefined;
};

/** The rule of views/predict.py: the two are tested against each other. */
const same = (said, answer, tolerance) => {
  if (!Number.isFinite(said) || !Number.isFinite(answer)) return Object.is(said, answer);
  return answer === 0 ? Math.abs(said) <= 1e-9 : Math.abs(said - answer) <= (tolerance + 1e-12) * Math.abs(answer);
};

const make = (tag, properties, ...inside) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside);
  return element;
};
const button = (className, textContent, onclick) => make("button", { type: "button", className, textContent, onclick });
const copy = (element) => [...element.cloneNode(true).childNodes];

/** In a sandbox, to name the storage is an exception already: then a reload forgets. */
const stored = (use) => {
  try { return use(localStorage); } catch { return null; }
};

/** @param {HTMLElement} root the element that carries the question */
const mount = (root) => {
  const secret = JSON.parse(atob(root.dataset.avPredict));
  const key = `accumviz.predict:${location.pathname}:${secret.id}`;
  const unique = `av-${Math.random().toString(36).slice(2)}`;
  const [ask, reveal] = ["ask", "reveal"].map((name) => root.querySelector(`:scope > .av-${name}`));
  // A page saved from a browser holds what an earlier run had made.
  ask.querySelectorAll(":scope > .av-made").forEach((old) => old.remove());
  const question = ask.querySelector(".av-question");
  const list = ask.querySelector(":scope > ul");
  const reasons = [...reveal.querySelectorAll(":scope > .av-others > tbody > tr")].map((row) => row.cells[1]);
  question.id = `${unique}-question`;
  root.tabIndex = -1;

  const form = make("div", { className: "av-form av-made" });
  const verdict = make("div", { className: "av-verdict av-made" });
  const help = make("p", { className: "av-help", id: `${unique}-help` });
  const usual = list ? "" : `A number, a fraction, or None. Within ${+(100 * secret.tolerance).toPrecision(3)}\u00a0% counts.`;
  const complain = (text) => {
    help.textContent = text || usual;
    help.classList.toggle("av-wanted", text !== "");
    field?.setAttribute("aria-invalid", text !== "");
  };
  const radios = [...(list?.children ?? [])].map((item, i) => {
    const radio = make("input", { type: "radio", name: unique, value: i });
    form.append(make("label", { className: "av-choice" }, radio, make("span", {}, ...copy(item))));
    return radio;
  });
  const field = list ? null : make("input", { className: "av-field", autocomplete: "off", autocapitalize: "off",
    spellcheck: false, oninput: () => complain("") });
  const first = field ?? radios[0];

  /** Grade what was said (null: the reader asked to be shown) and open the fold. */
  const settle = (said) => {
    const value = said === null ? undefined : list ? Number(said) : parse(said);
    const right = list ? secret.right : parse(secret.right);
    const fits = (one) => (list ? value === one : same(value, one, secret.tolerance));
    const state = said === null ? "skipped" : fits(right) ? "right" : "wrong";
    const told = make("p", {}, make("span", { className: "av-sign", ariaHidden: "true",
      textContent: { right: "✓", wrong: "✗", skipped: "→" }[state] }));
    if (state === "wrong") {
      const shown = list ? copy(list.children[value]) : [value === null ? "None" : said.trim().replaceAll("-", "−")];
      const known = secret.keys.findIndex((one) => fits(list ? one : parse(one)));
      const why = known >= 0 ? copy(reasons[known])
        : list ? []
        : right === null && value === 0 ? ["None is not 0: nothing was there."]
        : right === 0 && value === null ? ["0 is not None: a value was there."]
        : right && same(-value, right, secret.tolerance) ? ["The size is right, the sign is not."] : [];
      told.append(make("b", {}, "You said ", ...shown, "."), " ", ...(why.length ? why : ["Compare it with what was recorded."]));
    } else told.append(make("b", {}, state === "right" ? "Right." : "Shown without a prediction."));
    verdict.replaceChildren(told);
    radios.forEach((radio, i) => {
      radio.disabled = true;
      radio.checked = i === value;
      const mark = i === right ? "recorded" : i === value ? "your answer" : "";
      if (mark) radio.parentElement.append(make("em", { className: "av-mark" }, mark));
      radio.parentElement.classList.toggle("av-right", i === right);
    });
    root.dataset.avState = state;
    reveal.open = true;
    dispatchEvent(new Event("resize")); // what was folded away had no size
  };
  const commit = (said) => {
    settle(said);
    stored((storage) => storage.setItem(key, JSON.stringify({ said })));
    root.focus({ preventScroll: true }); // what had the focus is hidden now
  };
  const submit = () => {
    const said = list ? radios.find((radio) => radio.checked)?.value : field.value;
    if (said !== undefined && (list || parse(said) !== undefined)) return commit(said);
    complain(list ? "Choose one first." : "Write a number such as −2.5, 1/2 or 2e3, or None.");
    first.focus();
  };
  const begin = () => {
    root.dataset.avState = "asked";
    reveal.open = false;
    verdict.replaceChildren();
    radios.forEach((radio) => {
      radio.disabled = radio.checked = false;
      radio.parentElement.classList.remove("av-right");
      radio.parentElement.querySelector(".av-mark")?.remove();
    });
    if (field) field.value = "";
    complain("");
  };

  const check = button("av-check", "Check", submit);
  const none = button("av-nothing", "None", () => { field.value = "None"; complain(""); check.focus(); });
  const again = button("av-again av-made", "Ask me again", () => {
    stored((storage) => storage.removeItem(key));
    begin();
    first.focus();
  });
  form.append(make("div", { className: "av-row" }, ...(field ? [field, none] : []), check), help);
  form.onkeydown = (event) => {
    if (event.key !== "Enter" || event.isComposing || event.target.tagName === "BUTTON") return;
    event.preventDefault();
    if (!event.repeat) submit();
  };
  reveal.addEventListener("toggle", () => { if (reveal.open && root.dataset.avState === "asked") commit(null); });
  for (const [element, role] of [[root, "group"], list ? [form, "radiogroup"] : [field, "textbox"]]) {
    element.setAttribute("role", role);
    element.setAttribute("aria-labelledby", question.id);
  }
  first.setAttribute("aria-describedby", help.id);
  for (const spoken of [help, verdict]) spoken.setAttribute("aria-live", "polite");
  (list ?? question).after(form);
  ask.append(verdict, again);
  ask.querySelectorAll("input, button").forEach((control) => { control.dataset.lmSuppressShortcuts = "true"; });

  begin();
  const kept = stored((storage) => JSON.parse(storage.getItem(key)));
  const usable = (said) => typeof said === "string" && (list ? radios[said] : parse(said) !== undefined);
  if (kept && (kept.said === null || usable(kept.said))) settle(kept.said);
};

document.querySelectorAll(".accumviz[data-av-predict]").forEach((root) => {
  if (root.accumvizAsks) return;
  root.accumvizAsks = true;
  try {
    mount(root);
  } catch (error) {
    delete root.dataset.avState; // the question stays a plain one
    console.warn(error);
  }
});
