"""A policy is written as text on the command line."""

from dataclasses import fields

import pytest

from regard import ConfigError, MissingNameError
from regard.policies import H2O, DuoAttention, SnapKV, parse_policy
from regard.policies.parse_policy import POLICIES


def test_a_name_with_arguments_is_a_policy():
    assert parse_policy("snapkv:budget=0.1,window=32") == SnapKV(0.1, 32)
    assert parse_policy("H2O") == H2O()
    assert parse_policy("duoattention:retrieval=((0, 1), (2, 3)),window=9") == DuoAttention(((0, 1), (2, 3)), window=9)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
def test_every_policy_has_a_name_defaults_and_a_source(policy):
    assert parse_policy(policy.__name__.lower()) == policy()
    budgets = [one.default for one in fields(policy) if one.name == "budget" and one.default is not None]
    assert policy().label == f"{policy.__name__}({'budget=0.1' if budgets == [0.1] else ''})"
    assert "Source:" in policy.__doc__ or policy.__name__ == "Oracle"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("snapkv2", MissingNameError, "the policies are streamingllm, h2o"),
        ("snapkv:size=3", MissingNameError, "its arguments are budget, window, kernel"),
        ("snapkv:budget", ConfigError, "no such arguments"),
        ("snapkv:budget=", ConfigError, "no such arguments"),
        ("snapkv:budget=__import__('os')", ConfigError, "no such arguments"),
        ("snapkv:budget=2.0", ConfigError, "above 0 and at most 1"),
        (3, ConfigError, "a policy must be"),
    ],
)
def test_another_text_is_refused(text, error, says):
    with pytest.raises(error, match=says):
        parse_policy(text)
