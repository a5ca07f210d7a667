"""Saved folders as one self-contained HTML page: ``facts`` gathers data, ``render`` draws it and writes the file."""

from leanconv.report.render import COMPARISON, REPORT, check_page, write_comparison, write_report

__all__ = ["COMPARISON", "REPORT", "check_page", "write_comparison", "write_report"]
