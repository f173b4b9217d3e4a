"""Old addresses of chapters lead to the new ones, with the section that they named."""

from __future__ import annotations

import json
from pathlib import Path

from sphinx.application import Sphinx

# What was chapter 4 is two chapters; those after it have the next number.
PAGES = {
    "04_recipe": "05_recipe",
    "05_choosing": "06_choosing",
    "06_memory": "07_memory",
    "07_gan": "08_gan",
    "08_ddp": "09_ddp",
    "09_fsdp": "10_fsdp",
    "10_your_own": "11_your_own",
    "11_museum": "12_museum",
    "12_audit": "13_audit",
}
SECTIONS = {
    "04_recipe": {
        "04_shares": [
            *("sec-switches", "how-to-test-a-loop-cut-the-batch-differently", "fig-switches"),
            *("sec-unequal", "weigh-samples-not-micro-batches", "fig-unequal"),
            *("sec-tokens", "texts-weigh-tokens", "fig-tokens"),
            *("sec-divide", "divide-the-loss-or-divide-grad", "sec-flags", "does-your-trainer-divide-already"),
        ]
    }
}
STUB = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>This page has moved</title><meta name="robots" content="noindex">
<script>
const elsewhere = {elsewhere}, hash = location.hash.slice(1);
const page = Object.keys(elsewhere).find((one) => elsewhere[one].includes(hash)) || "{page}";
location.replace(page + ".html" + location.search + location.hash);
</script>
<noscript><meta http-equiv="refresh" content="0; url={page}.html"></noscript>
<p>This page has moved to <a href="{page}.html">its new address</a>.</p></html>
"""


def leave_stubs(app: Sphinx, error: Exception | None) -> None:
    """Write a page at each old address, once the book is built."""
    folder = Path(app.outdir) / "chapters"
    if error is None and app.builder.format == "html" and (folder / "05_recipe.html").exists():
        for old, page in PAGES.items():
            elsewhere = json.dumps(SECTIONS.get(old, {}))
            (folder / f"{old}.html").write_text(STUB.format(page=page, elsewhere=elsewhere), "utf-8")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", leave_stubs)
