"""Decoding with a cache is the full forward, or the finding says where it is not."""

import pytest
import torch
import torch.nn.functional as F

from examination.given import Layer, case_of, hiding, kinds, later
from regard import Everything, MultiHeadAttention
from regard.examination.probes.cache import look


class Cached(Layer):
    """A layer that takes its keys and values again; `join` puts the past before the new, `mask` hides."""

    def __init__(self, join=lambda past, new: torch.cat((past, new), 1), diagonal=lambda q, k: k - q + 1):
        super().__init__(None)
        self.join, self.diagonal = join, diagonal

    def forward(self, x, past_key_value=None, use_cache=False):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        if past_key_value is not None:
            k, v = (self.join(past, new) for past, new in zip(past_key_value, (k, v), strict=True))
        hidden = later(q.shape[1], k.shape[1], self.diagonal(q.shape[1], k.shape[1]))
        context = hiding(lambda *_: hidden)(q @ k.mT / 5**0.5) @ v
        return (context, (k, v)) if use_cache else context


def test_a_right_cache_is_checked():
    (checked,) = look(case_of(Cached()))
    assert "the full forward" in checked.what


def test_regards_own_cache_is_checked():
    (checked,) = look(case_of(MultiHeadAttention(12, 12, 13, 0.0, 3)))
    assert "the full forward" in checked.what


@pytest.mark.parametrize(
    ("layer", "how"),
    [
        (Cached(diagonal=lambda q, k: 1), "token by token"),  # is_causal, which counts from the first key
        (Cached(join=lambda past, new: new), "token by token"),  # forgets
        (Cached(join=lambda past, new: torch.cat((new, past), 1)), "several tokens"),  # before, not after
        (Cached(diagonal=lambda q, k: k), "several tokens"),  # hides nothing among several new ones
    ],
)
def test_a_wrong_cache_is_found(layer, how):
    if how == "several tokens" and layer.diagonal(2, 3) == 3:
        layer.diagonal = lambda q, k: 1 if q == k else k
    (finding,) = look(case_of(layer))
    assert finding.kind == "wrong cache"
    assert how in finding.evidence


def test_another_form_of_cache_is_said_not_to_be_known():
    class Other(Layer):
        def forward(self, x, cache=None):
            if cache is not None:
                raise TypeError("a cache of my own")
            return super().forward(x)

    (unknown,) = look(case_of(Other(hiding(later))))
    assert "`cache`" in unknown.what


@pytest.mark.parametrize(
    ("subject", "expects"),
    [(Layer(hiding(later)), None), (F.scaled_dot_product_attention, Everything()), (Cached(), Everything())],
)
def test_nothing_is_said_where_there_is_no_cache_or_it_is_not_causal(subject, expects):
    assert kinds(look(case_of(subject, expects))) == []
    assert list(look(case_of(subject, expects))) == []
