import js from "@eslint/js";

const BROWSER = [
  "AbortController", "Blob", "CSS", "DecompressionStream", "Event", "ImageData", "IntersectionObserver",
  "MutationObserver", "NodeFilter", "OffscreenCanvas", "ResizeObserver", "Response", "TextDecoder", "URLSearchParams",
  "addEventListener", "atob", "clearTimeout", "console", "devicePixelRatio", "dispatchEvent", "document",
  "getComputedStyle", "history", "innerWidth", "localStorage", "location", "matchMedia", "navigator",
  "requestAnimationFrame", "setTimeout", "window",
];

const NO_MARKUP = "What a recording says is never markup.";

export default [
  js.configs.recommended,
  {
    languageOptions: { globals: Object.fromEntries(BROWSER.map((name) => [name, "readonly"])) },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      complexity: ["error", 12],
      eqeqeq: "error",
      "max-len": ["error", { code: 120 }],
      "max-depth": ["error", 3],
      "max-lines-per-function": ["error", { max: 100, skipBlankLines: true, skipComments: true }],
      "max-lines": ["error", 280],
      "max-params": ["error", 6],
      "no-restricted-properties": [
        "error",
        ...["innerHTML", "outerHTML", "insertAdjacentHTML"].map((property) => ({ property, message: NO_MARKUP })),
        { object: "document", property: "write", message: NO_MARKUP },
      ],
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-restricted-syntax": ["error", { selector: "ImportExpression", message: "A page has one file." }],
      "no-var": "error",
      "prefer-const": "error",
    },
  },
];
