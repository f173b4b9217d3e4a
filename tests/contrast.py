"""WCAG's contrast of two colours, written once for every page that is looked at."""

from typing import Any

# What a script of a test begins with: `contrast` of two colours, each [red, green, blue] of 0 to 255; and `painted`,
# what a browser makes of colours over each other, each followed by an opacity or not.
CONTRAST = """const light = color => color.slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
};
const painted = (...colors) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    for (const [color, opacity = 1] of colors) {
        [canvas.fillStyle, canvas.globalAlpha] = [color, opacity];
        canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};"""


def contrast(page: Any, one: list[int], other: list[int]) -> float:
    """Return the contrast of two colours, in any page."""
    return float(page.evaluate(f"colors => {{ {CONTRAST} return contrast(...colors); }}", [one, other]))
