"""A saved folder as one self-contained HTML page: ``facts`` gathers data, ``page`` draws it, ``write`` puts it down."""

from leanconv.report.write import REPORT, check_report, write_report

__all__ = ["REPORT", "check_report", "write_report"]
