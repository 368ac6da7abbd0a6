"""Policies of sparse attention and of cache compression, as frozen values: which keys each query may use."""

from regard.policies.attention_inputs import AttentionInputs
from regard.policies.budget import spread_budget
from regard.policies.eviction import H2O, TOVA
from regard.policies.key_masks import ChosenPages, Lifetime, Lines
from regard.policies.parse_policy import parse_policy
from regard.policies.policy import Policy, PromptPolicy, check_causality
from regard.policies.prompt_policies import ExpectedAttention, Knorm, ObservedAttention, SnapKV
from regard.policies.quantised import Quantised
from regard.policies.query_policies import BlockSparse, Oracle, Quest, VerticalSlash
from regard.policies.streaming import DuoAttention, StreamingLLM

__all__ = [
    "H2O",
    "TOVA",
    "AttentionInputs",
    "BlockSparse",
    "ChosenPages",
    "DuoAttention",
    "ExpectedAttention",
    "Knorm",
    "Lifetime",
    "Lines",
    "ObservedAttention",
    "Oracle",
    "Policy",
    "PromptPolicy",
    "Quantised",
    "Quest",
    "SnapKV",
    "StreamingLLM",
    "VerticalSlash",
    "check_causality",
    "parse_policy",
    "spread_budget",
]
