"""What transformers loads is counted, and its own bars come back."""

import pytest
import torch
from transformers import GPT2Config, GPT2Model
from transformers.utils import logging

from regard.cli.loading_progress import LoadingProgress, track_loading


@pytest.mark.slow
def test_the_parts_of_a_model_are_counted_as_it_is_loaded(tmp_path):
    torch.manual_seed(0)
    GPT2Model(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11)).save_pretrained(tmp_path)
    progress, seen = LoadingProgress(), []
    update = progress.update
    progress.update = lambda count=1: (update(count), seen.append((progress.done, progress.total)))
    with track_loading(progress):
        GPT2Model.from_pretrained(tmp_path)
    assert progress.total > 10
    assert progress.done == progress.total
    assert logging.set_tqdm_hook(None) is None


def test_a_bar_counts_the_items_it_hands_on():
    progress = LoadingProgress()
    bar = progress.start(None, ([1, 2, 3],), {})
    assert (progress.done, progress.total) == (0, 3)
    with bar as counted:
        assert list(counted) == [1, 2, 3]
        counted.set_postfix(name="x")
    assert progress.done == 3
    progress.start(None, (), {"total": 7})
    progress.update(2)
    assert (progress.done, progress.total) == (2, 7)
