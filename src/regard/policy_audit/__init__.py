"""What policies of sparse attention and cache compression drop, measured exactly and then by running the model with them."""

from regard.policy_audit.apply_policy import ApplyPolicy
from regard.policy_audit.audit import Audit, WorstRow, audit
from regard.policy_audit.certificate import AuditCertificate
from regard.policy_audit.downstream import Downstream, measure_downstream
from regard.policy_audit.needle_answers import find_needles
from regard.policy_audit.needle_tasks import NeedleTask, make_needle_tasks
from regard.policy_audit.summary import Summary

__all__ = [
    "ApplyPolicy",
    "Audit",
    "AuditCertificate",
    "Downstream",
    "NeedleTask",
    "Summary",
    "WorstRow",
    "audit",
    "find_needles",
    "make_needle_tasks",
    "measure_downstream",
]
