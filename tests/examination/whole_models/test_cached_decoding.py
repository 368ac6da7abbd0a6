"""A whole model is decoded with its cache token by token and several tokens at a time, if it takes several."""

import pytest
import torch
from torch import nn

from examination.whole_models import gpt2
from regard import examine
from regard.examination.whole_models.cached_decoding import SEVERAL, WHAT


class CachedAttention(nn.Module):
    """Causal heads that return their keys and values; `hide` gives what each of q queries may not see of k keys."""

    def __init__(self, hide):
        super().__init__()
        self.qkv, self.out, self.hide = nn.Linear(21, 63), nn.Linear(21, 21), hide

    def forward(self, x, past):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 7)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
        hidden = self.hide(q.shape[2], k.shape[2])
        weights = (q @ k.mT / 7**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), (k, v)


def hide_later(q, k):
    return torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)


def hide_nothing_with_a_cache(q, k):
    return hide_later(q, k) if q == k else torch.zeros(q, k, dtype=torch.bool)


def hide_from_the_first_key(q, k):  # as is_causal=True, but for single tokens
    return torch.ones(q, k, dtype=torch.bool).triu(1) if q > 1 else torch.zeros(q, k, dtype=torch.bool)


class Decoder(nn.Module):
    """Two layers of it, from ids to logits."""

    def __init__(self, hide=hide_later):
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 21), nn.Linear(21, 31)
        self.norms = nn.ModuleList(nn.LayerNorm(21) for _ in range(2))
        self.attentions = nn.ModuleList(CachedAttention(hide) for _ in range(2))

    def mix(self, x, state):
        return x, state

    def forward(self, input_ids, past_key_values=None):
        x, state = self.mix(self.embed(input_ids), None if past_key_values is None else past_key_values[2])
        made = []
        for i, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            y, kept = attention(norm(x), None if past_key_values is None else past_key_values[i])
            x = x + y
            made.append(kept)
        return self.head(x), (*made, state)


def examine_new(make, *args):
    torch.manual_seed(0)
    return examine(make(*args))


@pytest.mark.parametrize("make", [Decoder, gpt2])
def test_a_right_model_is_decoded_both_ways(make):
    report = examine_new(make)
    assert report
    assert WHAT in [one.what for one in report.checked]


@pytest.mark.parametrize("hide", [hide_nothing_with_a_cache, hide_from_the_first_key])
def test_a_wrong_mask_among_several_new_tokens_is_found(hide):
    (finding,) = examine_new(Decoder, hide).findings
    assert finding.kind == "wrong cache"
    assert SEVERAL in finding.evidence
