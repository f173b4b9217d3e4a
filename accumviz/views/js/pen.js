/** A canvas to draw on, in the inks and fonts of the page around it. */

/**
 * @typedef {object} Inks
 * @property {string} text
 * @property {string} muted
 * @property {string} line
 * @property {number} pale  how much of a colour what is live has
 * @property {string} font
 * @property {string} mono
 */

/** Read what the theme makes of our colours; `probe` is an element whose colour may be changed. */
export function inksOf(/** @type {HTMLElement} */ plot, /** @type {HTMLElement} */ probe) {
  const [text, muted, line] = ["text", "muted", "line"].map((name) => {
    probe.style.color = `var(--av-${name})`;
    return getComputedStyle(probe).color;
  });
  const look = getComputedStyle(plot);
  const pale = parseFloat(look.getPropertyValue("--av-pale")) / 100;
  return { text, muted, line, pale, font: look.fontFamily, mono: look.getPropertyValue("--av-mono") };
}

/** @param {string} color as getComputedStyle writes it */
export function isBright(color) {
  const [red, green, blue] = (color.match(/[\d.]+/g) ?? []).map(Number);
  return (0.299 * red + 0.587 * green + 0.114 * blue) / (color.startsWith("rgb") ? 255 : 1) > 0.5;
}

/** How far the lines of a hatching are apart. */
const HATCH = 5;

/** @param {HTMLCanvasElement} canvas @param {number} width @param {number} height @param {Inks} inks */
export function penOn(canvas, width, height, inks) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const ratio = Math.min(devicePixelRatio || 1, 2);
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  canvas.style.height = `${height}px`;
  context.scale(ratio, ratio);

  /** @param {string} ink @param {[number, number, number, number]} box left, top, width, height */
  function fill(ink, ...box) {
    context.fillStyle = ink;
    context.fillRect(...box);
  }
  /** What is not known. @param {string} ink @param {[number, number, number, number]} box */
  function hatch(ink, ...[left, top, width, height]) {
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.beginPath();
    for (let x = HATCH * Math.floor((left - height) / HATCH); x < left + width; x += HATCH) {
      context.moveTo(x, top + height);
      context.lineTo(x + height, top);
    }
    Object.assign(context, { strokeStyle: ink, lineWidth: 0.8 }).stroke();
    context.restore();
  }
  /**
   * @param {string} text @param {number} x @param {number} y
   * @param {{align?: CanvasTextAlign, look?: string, ink?: string, family?: string}} [how]
   */
  function write(text, x, y, { align = "left", look = "", ink = inks.text, family = inks.font } = {}) {
    const font = `${look} 11px ${family}`;
    Object.assign(context, { font, textAlign: align, textBaseline: "middle", fillStyle: ink });
    context.fillText(text, x, y);
  }
  return { context, fill, hatch, write };
}

/** @typedef {ReturnType<typeof penOn>} Pen */
