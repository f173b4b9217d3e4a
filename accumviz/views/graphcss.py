"""The look of a drawn graph, for ours and for foreign drawings: one style sheet on the page's own colours."""

from __future__ import annotations

from string import Template

from accumviz.views.style import CSS, CYCLE, MONO

TITLE, SMALL = 14.0, 12.5  # px
SHRINK = 0.88  # the smallest text stays 11 px

STYLE = CSS + Template("""
.av-graph { margin: 0.75rem 0; --av-leaf: $leaf; --av-root: $root; }
html[data-theme="dark"] .av-graph, [data-jp-theme-light="false"] .av-graph { --av-leaf: $leaf_dark; }
.av-graph .av-scroll { overflow: auto; max-height: 75rem; }
.av-graph svg { display: block; height: auto; margin: 0 auto;
  width: var(--av-width); max-width: 100%; min-width: calc(var(--av-width) * $shrink); }
:where(.av-graph:not(.av-drawn)) text { font-size: ${small}px; fill: var(--av-text); unicode-bidi: isolate; }
.av-graph .av-mono { font-family: $mono; }
.av-graph .av-title { font-family: $mono; font-size: ${title}px; font-weight: 600; }
.av-graph .av-quiet { fill: var(--av-muted); }
.av-graph .av-box { fill: var(--av-surface); stroke: var(--av-line); stroke-width: 1.2; }
.av-graph .av-behind { fill: var(--av-surface); stroke: var(--av-line); opacity: 0.75; }
.av-graph .av-rule { stroke: var(--av-line); }
.av-graph .av-accumulate .av-box { fill: var(--av-leaf); fill-opacity: 0.13; stroke: var(--av-leaf); }
.av-graph .av-root .av-box { fill: var(--av-root); fill-opacity: 0.13; stroke: var(--av-root); stroke-width: 2.2; }
.av-graph .av-freed .av-box { fill: none; stroke-dasharray: 5 4; }
.av-graph .av-freed:not(.av-root) .av-box { stroke: var(--av-muted); }
.av-graph .av-freed text { fill: var(--av-muted); }
.av-graph .av-edge { fill: none; stroke: var(--av-muted); stroke-width: 1.4; }
.av-graph .av-tip { fill: var(--av-muted); stroke: none; }
.av-graph figcaption { color: var(--av-muted); font-size: 0.8125rem; text-align: center; margin-top: 0.5rem; }
.av-graph .av-key { display: inline-block; margin: 0 0.6em; }
.av-graph .av-key i { display: inline-block; width: 1.1em; height: 0.8em; margin-right: 0.4em;
  border: 1.5px solid var(--av-muted); background: var(--av-surface); border-radius: 3px; vertical-align: -0.05em; }
.av-graph .av-key .av-accumulate { border-color: var(--av-leaf); border-radius: 0.4em; }
.av-graph .av-key .av-root { border-color: var(--av-root); border-width: 2px; }
.av-graph .av-key .av-freed { border: 1.5px dashed var(--av-muted); background: none; }
.av-graph .av-key .av-fold { box-shadow: 3px 3px 0 -1px var(--av-line); }
.av-graph details { font-size: 0.8125rem; margin-top: 0.25rem; text-align: left; }
.av-graph summary { cursor: pointer; color: var(--av-muted); text-align: center; }
@media print {
  .av-graph .av-scroll { overflow: visible; max-height: none; }
  .av-graph svg { min-width: 0; }
}
""").substitute(leaf=CYCLE[0], leaf_dark=CYCLE[4], root=CYCLE[2], shrink=SHRINK, small=SMALL, title=TITLE, mono=MONO)
