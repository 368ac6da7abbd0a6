"""StreamingLLM and DuoAttention read the first keys and the last ones."""

import pytest
import torch

from policies.reference import G, R, T, make_inputs, table
from regard import ConfigError, OutOfRangeError
from regard.policies import DuoAttention, StreamingLLM


def expect_streaming(sinks, window):
    return torch.tensor([[j <= i and (j < sinks or i - j < window) for j in range(T)] for i in range(T)])


@pytest.mark.parametrize(("sinks", "window"), [(4, 7), (0, 3), (1, 1)])
def test_a_query_reads_the_sinks_and_the_window(sinks, window):
    found = table(StreamingLLM(sinks, window), make_inputs())
    assert (found == expect_streaming(sinks, window)).all()


def test_retrieval_heads_read_everything():
    found = table(DuoAttention(((0, 4), (1, 0)), 2, 5), make_inputs())
    streaming = expect_streaming(2, 5)
    for head in range(G * R):
        expected = torch.ones(T, T, dtype=torch.bool).tril() if head == 4 else streaming
        assert (found[:, head] == expected).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StreamingLLM(-1), "sinks"),
        (lambda: StreamingLLM(window=0), "window"),
        (lambda: StreamingLLM(budget=0), "at least 1"),
        (lambda: StreamingLLM(sinks=9, budget=9).choose_keys(make_inputs()), "no window after its 9 sinks"),
        (lambda: DuoAttention((3,)), "pairs"),
        (lambda: DuoAttention(((0, 9),)).choose_keys(make_inputs()), "layer 0 has 6"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(make, says):
    with pytest.raises((ConfigError, OutOfRangeError), match=says):
        make()
