"""What a comparison looks like: a table for the terminal, Markdown, plots, and a page that needs nothing but a browser.

All of it reads rows (see ``kvlearn.rows``) and imports no model code.
"""

from kvlearn.report.page import Section, write_report
from kvlearn.report.plots import plot_png
from kvlearn.report.results import write_results
from kvlearn.report.tables import markdown_table, render_table

__all__ = ["Section", "markdown_table", "plot_png", "render_table", "write_report", "write_results"]
