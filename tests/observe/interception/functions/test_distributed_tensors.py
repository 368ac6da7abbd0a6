"""Attention on DTensors in two processes: each rank records what it computes, and what no rank has whole is missed."""

from pathlib import Path

import pytest

from ranks import run_ranks

pytestmark = pytest.mark.slow
CHECKS = [  # of distributed_tensors.py
    *("attend", "attend_causally", "attend_grouped", "attend_by_bmm", "attend_by_einsum", "attend_with_biases"),
    *("attend_with_dropout", "attend_to_top_keys", "attend_by_relu", "attend_by_difference", "attend_by_kernel"),
    *("GPTNeo", "GPTJ", "MPNet", "Llama by its plan", "Gemma2 by its plan"),
    *("check_split_tokens", "check_unlike_splits", "check_mixed_heads", "check_joined_rows"),
    *("check_changes", "check_refused_changes"),
]


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory) -> list[dict[str, str]]:
    """What each rank printed of each check."""
    texts = run_ranks(Path(__file__).with_name("distributed_tensors.py"), tmp_path_factory.mktemp("models"))
    return [dict(line.split(": ", 1) for line in text.splitlines() if ": " in line) for text in texts]


@pytest.mark.parametrize("check", CHECKS)
def test_what_a_rank_computes_of_dtensors_is_recorded_and_changed(rank_results, check):
    assert [rank.get(check) for rank in rank_results] == ["", ""]


def test_every_check_is_listed(rank_results):
    assert [set(rank) - set(CHECKS) for rank in rank_results] == [set(), set()]
