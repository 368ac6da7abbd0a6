"""No policy looks ahead, and one that does is refused."""

from dataclasses import dataclass

import pytest
import torch

from policies.reference import P, T, make_inputs, table
from regard import Causal, ConfigError, Given
from regard.policies import (
    H2O,
    TOVA,
    BlockSparse,
    DuoAttention,
    ExpectedAttention,
    Knorm,
    ObservedAttention,
    Oracle,
    Policy,
    Quantised,
    Quest,
    SnapKV,
    StreamingLLM,
    VerticalSlash,
    check_causality,
    spread_budget,
)
from regard.policies.policy import label_policies

SHIPPED = [
    StreamingLLM(2, 5),
    H2O(9),
    TOVA(9),
    SnapKV(13, 5, 3),
    ObservedAttention(7),
    Knorm(7),
    ExpectedAttention(7),
    Quest(10, 5),
    BlockSparse(10, 5),
    VerticalSlash(4, 3, 5),
    DuoAttention(((0, 1),), 2, 5),
    Quantised(3, 4),
    Oracle(7),
]


@pytest.mark.parametrize("policy", SHIPPED, ids=lambda policy: policy.label)
@pytest.mark.parametrize("cut", [P, P + 1, T - 1])
def test_no_shipped_policy_looks_ahead(policy, cut):
    check_causality(policy, make_inputs(), cut)


@pytest.mark.parametrize("policy", SHIPPED, ids=lambda policy: policy.label)
def test_a_policy_knows_whether_it_spares_the_prompt(policy):
    prompt = table(policy, make_inputs())[:, :, :P, :P]
    assert policy.reads_whole_prompt == torch.equal(prompt, torch.ones(P, P, dtype=torch.bool).tril().expand_as(prompt))


@dataclass(frozen=True)
class Prophet(Policy):
    """Keep the keys that receive most from all queries, later ones too."""

    def choose_keys(self, inputs):
        received = inputs.build_map().received()
        kept = received >= received.median(-1, keepdim=True).values
        return Given(kept.unsqueeze(2)) | ~Causal() | Given(torch.eye(inputs.tokens, dtype=torch.bool))


def test_a_policy_that_looks_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"Prophet\(\) looks ahead: the keys that query \d+ uses changed with tokens from 40"):
        check_causality(Prophet(), make_inputs(), 40)


@pytest.mark.parametrize("cut", [P - 1, T])
def test_the_cut_lies_after_the_prompt(cut):
    with pytest.raises(ConfigError, match="cut must be at least the prompt's 31 tokens and below all 53"):
        check_causality(Knorm(7), make_inputs(), cut)


def test_policies_that_differ_in_long_arguments_have_other_labels():
    pyramids = [Knorm(spread_budget(budget, 30)) for budget in (0.1, 0.2)]
    assert [one.label for one in pyramids] == ["Knorm(budget=(0.195, ..., 0.005))", "Knorm(budget=(0.39, ..., 0.01))"]
    heads = [DuoAttention(((0, 1), (second, 2), (5, 3), (7, 4))) for second in (1, 2)]
    label = "DuoAttention(retrieval=((0, 1), ..., (7, 4)))"
    assert label_policies([*heads, *pyramids]) == (label, f"{label} #2", *(one.label for one in pyramids))
