"""Colours, style sheet and script of a page: everything in it that does not depend on what it shows.

    THEMES ----> custom properties of the style sheet       light-dark(light, dark)
           `---> plotly templates, one a theme              relayout({template}) recolours a drawn figure

The page follows the system's preference until the reader presses the button. What a figure's own layout sets wins over
the template, so a figure leaves colours of text, grid and background alone.
"""

from __future__ import annotations

from typing import Any

COLOURS = (
    "#2f7fe0",  # blue
    "#d9690a",  # orange
    "#14936b",  # green
    "#cf4699",  # pink
    "#8a63e8",  # violet
    "#a58200",  # ochre
    "#0e8fa3",  # cyan
    "#e0474c",  # red
    "#7d8791",  # grey
    "#9c6b45",  # brown
)
"""Of traces; each stands out from the light and from the dark background."""

THEMES = {
    "light": {
        "ink": "#1c2126",
        "faint": "#5d6770",
        "line": "#dfe3e7",
        "paper": "#f5f6f8",
        "card": "#ffffff",
        "accent": "#1763b8",
    },
    "dark": {
        "ink": "#e6e9ec",
        "faint": "#9aa5af",
        "line": "#333b43",
        "paper": "#111417",
        "card": "#191d22",
        "accent": "#75b2f5",
    },
}

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_CSS = """
:root { color-scheme: light dark; VARIABLES }
:root[data-theme="light"] { color-scheme: light; }
:root[data-theme="dark"] { color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 FONTS; overflow-wrap: anywhere; }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { display: flex; gap: 16px; align-items: flex-start; justify-content: space-between; padding-top: 20px; }
h1 { margin: 0; font-size: 24px; line-height: 1.25; }
h2 { margin: 32px 0 10px; font-size: 18px; }
p { margin: 8px 0; max-width: 80ch; }
.subtitle { margin: 4px 0 0; color: var(--faint); }
button.theme { flex: none; padding: 5px 12px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card); color: var(--ink); font: inherit; font-size: 13px; cursor: pointer; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; margin: 12px 0; }
figure, .table, details { margin: 0; min-width: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
figure { padding: 10px 12px 4px; }
figure.wide, figure:only-child { grid-column: 1 / -1; }
figcaption, caption { color: var(--ink); font-size: 14px; font-weight: 600; text-align: left; }
.plot { width: 100%; height: 300px; }
.table { margin: 12px 0; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; overflow-wrap: normal; }
caption { padding: 10px 12px 6px; }
th, td { padding: 5px 12px; border-top: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
td { max-width: 60ch; overflow-wrap: break-word; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.short { white-space: nowrap; }
.long { min-width: 34ch; }
details { margin: 12px 0; }
summary { padding: 8px 12px; cursor: pointer; font-weight: 600; }
pre { margin: 0; padding: 4px 12px 12px; overflow-x: auto; font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { height: 40px; }
@media (max-width: 700px) {
  header, main { padding-left: 10px; padding-right: 10px; }
  header { padding-top: 12px; }
  h1 { font-size: 20px; }
  .figures { grid-template-columns: minmax(0, 1fr); }
  .plot { height: 260px; }
  figure { padding: 8px 6px 2px; }
  figcaption { padding: 0 4px; }
  table { font-size: 13px; }
  th, td { padding: 4px 7px; }
}
@media print { button.theme { display: none; } figure { break-inside: avoid; } }
"""

SCRIPT = """
"use strict";
(() => {
  const { figures, templates } = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement, button = document.querySelector("button.theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const settings = {
    displaylogo: false,
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    showSendToCloud: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  };
  const drawn = new Map();  // plots and the width each was drawn for
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (drawn.get(target) === target.clientWidth) continue;
      drawn.set(target, target.clientWidth);
      Plotly.Plots.resize(target);
    }
  });
  const recolour = () => {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    for (const plot of drawn.keys()) Plotly.relayout(plot, { template: templates[theme()] });
  };
  button.hidden = false;
  button.onclick = () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; recolour(); };
  system.addEventListener("change", recolour);
  recolour();
  // One figure at a time, the page stays usable while the rest is drawn.
  const draw = async (index) => {
    if (index === figures.length) { root.dataset.drawn = index; return; }
    const plot = document.getElementById("plot-" + index), { data, layout } = figures[index];
    const width = plot.clientWidth, before = theme();
    await Plotly.newPlot(plot, data, { ...layout, template: templates[before] }, settings);
    if (theme() !== before) await Plotly.relayout(plot, { template: templates[theme()] });
    drawn.set(plot, width);
    resized.observe(plot);
    setTimeout(draw, 0, index + 1);
  };
  draw(0);
})();
"""


def style_sheet() -> str:
    pairs = ((name, THEMES["light"][name], THEMES["dark"][name]) for name in THEMES["light"])
    variables = " ".join(f"--{name}: light-dark({light}, {dark});" for name, light, dark in pairs)
    return _CSS.replace("VARIABLES", variables).replace("FONTS", FONTS)


def template(theme: str) -> dict[str, Any]:
    """What a plotly figure has where its own layout says nothing."""
    colours = THEMES[theme]
    axis = {
        "gridcolor": colours["line"],
        "linecolor": colours["line"],
        "zerolinecolor": colours["line"],
        "tickcolor": colours["line"],
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 12, "color": colours["faint"]}},
        "tickfont": {"color": colours["faint"]},
    }
    layout = {
        "autosize": True,
        "colorway": list(COLOURS),
        "font": {"family": FONTS, "size": 12, "color": colours["ink"]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "xaxis": axis,
        "yaxis": axis,
        "coloraxis": {"colorbar": {"outlinewidth": 0}},
        "hoverlabel": {
            "bgcolor": colours["card"],
            "bordercolor": colours["line"],
            "font": {"color": colours["ink"]},
            "namelength": -1,
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": colours["faint"], "activecolor": colours["accent"]},
    }
    return {"layout": layout}
