"""Colours and fonts of a page.

    `THEMES` holds the colours of the light and the dark theme. They are used in two places:
        custom CSS properties of templates/page.css    as light-dark(light, dark)
        plotly templates, one per theme                relayout({template}) recolours a drawn figure

The page follows the system's preference for light or dark until the reader presses the page's theme button. The layout
of a figure overrides the template, so a figure should not set the colours of text, grid and background.
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
"""Colours of curves and bars in plots, visible on a light and on a dark background."""

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


def template(theme: str) -> dict[str, Any]:
    """Return the plotly template of a theme: defaults for everything that the layout of a figure does not set."""
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
