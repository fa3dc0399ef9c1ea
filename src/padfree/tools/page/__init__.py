"""One self-contained HTML page: texts, tables and plotly figures in one file that needs no network."""

from padfree.tools.page.page import Cell, Page, plain
from padfree.tools.page.theme import COLOURS

__all__ = ["COLOURS", "Cell", "Page", "plain"]
