"""Progress on stderr: a live table on a terminal, plain lines elsewhere, nothing when off."""

from leanconv.progress.reporter import reporter
from leanconv.progress.stage import Progress, Solved, Stage

__all__ = ["Progress", "Solved", "Stage", "reporter"]
