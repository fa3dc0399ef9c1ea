"""`padfree report`: run folders to one page of plots and tables."""

from padfree.report.build import write_report

__all__ = ["write_report"]
