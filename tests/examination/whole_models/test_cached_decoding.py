"""A whole model is decoded with its cache token by token and several tokens at a time, if it takes several."""

import pytest
import torch
from torch import nn

from examination.whole_models import gpt2
from regard import examine
from regard.examination.whole_models.cached_decoding import SEVERAL, SINGLE, WHAT


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


class Recurrent(Decoder):
    """A recurrence before the attention, which continues for one token and begins anew with several."""

    def mix(self, x, state):
        if state is None or x.shape[1] > 1:
            state = torch.zeros_like(x[:, 0])
        outputs = []
        for i in range(x.shape[1]):
            state = 0.5 * state + x[:, i]
            outputs.append(state)
        return torch.stack(outputs, 1), state


class OneAtATime(Decoder):
    """Raises for several tokens with a cache."""

    def forward(self, input_ids, past_key_values=None):
        if past_key_values is not None and input_ids.shape[1] > 1:
            raise ValueError("one token at a time")
        return super().forward(input_ids, past_key_values)


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


@pytest.mark.parametrize("make", [Recurrent, OneAtATime])
def test_no_more_is_claimed_than_was_tested_of_a_model_that_takes_one_token_at_a_time(make):
    report = examine_new(make)
    assert not report.findings
    assert f"{WHAT}, {SINGLE}" in [one.what for one in report.checked]
    assert WHAT not in [one.what for one in report.checked]


class KeptCache(nn.Module):
    """Causal heads that keep keys and values in buffers, and write those of new tokens `late` places after start_pos."""

    def __init__(self, late=0, is_kept=True):
        super().__init__()
        self.qkv, self.out, self.late, self.is_kept = nn.Linear(21, 63), nn.Linear(21, 21), late, is_kept
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(8, 3, 320, 7), persistent=False)

    def forward(self, x, start_pos=0):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 7)).permute(2, 0, 3, 1, 4)
        first = start_pos + (self.late if start_pos else 0)
        if self.is_kept and not torch.is_grad_enabled() and b <= 8 and first + t <= 320:
            self.keys[:b, :, first : first + t], self.values[:b, :, first : first + t] = k, v
            k, v = self.keys[:b, :, : first + t], self.values[:b, :, : first + t]
        weights = (q @ k.mT / 7**0.5).masked_fill(hide_later(t, k.shape[2]), -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_layer_that_keeps_its_cache_is_decoded_by_its_positions():
    report = examine(KeptCache())
    assert report, str(report)
    assert WHAT in [one.what for one in report.checked]
    finding = examine(KeptCache(late=1)).findings[0]
    assert finding.kind == "wrong cache"
    assert SINGLE in finding.evidence
