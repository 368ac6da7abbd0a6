import pytest
import torch

from regard.models import GPT2, GPT2Config
from regard.models.gpt2_adapter import GPT2Adapter
from regard.text import Letters

CONTEXT, WORDS = 7, 5


def own(text=None):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=12, context=CONTEXT, vocabulary=WORDS))
    model.text = text
    return GPT2Adapter("mine", model)


@pytest.mark.parametrize(("most", "count"), [(None, CONTEXT), (3, 3), (100, CONTEXT)])
def test_it_reads_as_many_tokens_as_fit_and_as_are_asked_for_and_counts_all(most, count):
    ids, words, whole = own(Letters("ABCDE")).tokens("ABCDEABCDE", most)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 0, 1][:count]]
    assert words == list("ABCDEAB"[:count])
    assert whole == 10


def test_tokens_that_its_vocabulary_lacks_are_no_characters():
    adapter = own(Letters("ABC"))
    assert adapter.decode([0, 4, 2]) == "A\ufffdC"
    written = "".join(adapter.model.eval().complete("A", CONTEXT, seed=1))
    assert len(written) == CONTEXT
    assert set(written) <= set("ABC\ufffd")


def test_a_model_without_a_vocabulary_reads_and_writes_numbers():
    ids, words, _ = own().tokens("3 1 4", None)
    assert (ids.tolist(), words) == ([[3, 1, 4]], ["3", "1", "4"])
    assert own().decode([3, 1]) == " 3 1"
    assert own().pieces() == ["0", "1", "2", "3", "4"]


def test_what_it_says_are_the_logits_of_the_model():
    adapter = own()
    ids, _, _ = adapter.tokens("3 1 4", None)
    assert torch.equal(adapter.run(ids), adapter.model(ids))
    assert (adapter.context, adapter.layers) == (CONTEXT, 2)
