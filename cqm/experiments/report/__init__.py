"""Results of a run as one self-contained HTML page."""

from cqm.experiments.report.page import write_report

__all__ = ["write_report"]
