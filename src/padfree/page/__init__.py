"""One self-contained HTML page: texts, tables and plotly figures in one file that needs no network."""

from padfree.page.page import Cell, Page, plain
from padfree.page.theme import COLOURS

__all__ = ["COLOURS", "Cell", "Page", "plain"]
