"""What leanconv finds on this machine, what is missing, and what for."""

from leanconv.doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
