"""WCAG's contrast of two colours, written once for every page that is looked at."""

from typing import Any

# What a script of a test begins with: `contrast` of two colours, each [red, green, blue] of 0 to 255.
CONTRAST = """const light = color => color.slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
};"""


def contrast(page: Any, one: list[int], other: list[int]) -> float:
    """Return the contrast of two colours, in any page."""
    return float(page.evaluate(f"colors => {{ {CONTRAST} return contrast(...colors); }}", [one, other]))
