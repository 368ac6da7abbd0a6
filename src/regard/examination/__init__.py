"""Check whether an attention layer is right, by properties that are measured on it, and report the result."""

from regard.examination.examine import examine
from regard.examination.kernel_checks.examine_kernel import examine_kernel
from regard.examination.report import Checked, Finding, Report, Unknown

__all__ = ["Checked", "Finding", "Report", "Unknown", "examine", "examine_kernel"]
