"""`padfree report`: one page of plots and tables from run folders."""

from padfree.tools.report.build import default_output, write_report

__all__ = ["default_output", "write_report"]
