"""What leanconv finds on this machine, what is missing, and what for."""

from leanconv.cli.doctor_checks.run import Examination, examine

__all__ = ["Examination", "examine"]
