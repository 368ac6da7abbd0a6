"""Is this attention right? Properties checked on anyone's layer, with a report."""

from regard.examination.examine import examine
from regard.examination.report import Checked, Finding, Report, Unknown

__all__ = ["Checked", "Finding", "Report", "Unknown", "examine"]
