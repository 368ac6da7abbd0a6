"""Decoding with a cache equals the full forward, or the finding says where it does not."""

import pytest
import torch
import torch.nn.functional as F

from examination import wrong_positions as wrong
from examination.subjects import Layer, case_of, hiding, kinds, later
from observe.models import CACHE
from regard import Everything, MultiHeadAttention
from regard.examination.probes.cache import check_case


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
    (checked,) = check_case(case_of(Cached()))
    assert "the full forward" in checked.what


def test_regards_own_cache_is_checked():
    (checked,) = check_case(case_of(MultiHeadAttention(12, 12, 13, 0.0, 3)))
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
    (finding,) = check_case(case_of(layer))
    assert finding.kind == "wrong cache"
    assert how in finding.evidence


@pytest.mark.parametrize(
    ("subject", "expects"),
    [(Layer(hiding(later)), None), (F.scaled_dot_product_attention, Everything()), (Cached(), Everything())],
)
def test_nothing_is_said_where_there_is_no_cache_or_it_is_not_causal(subject, expects):
    assert kinds(check_case(case_of(subject, expects))) == []
    assert list(check_case(case_of(subject, expects))) == []


def hugging_face(name, **settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=24, n_head=4, n_layer=2, vocab_size=50, bos_token_id=1, eos_token_id=1)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return getattr(transformers.models.gpt2.modeling_gpt2, name)(config, **settings).eval()


@pytest.mark.parametrize("name", ["GPT2Attention", "GPT2Block"])
def test_a_layer_that_takes_hugging_faces_cache_is_checked(name):
    (checked,) = check_case(case_of(hugging_face(name, layer_idx=1)))
    assert "the full forward" in checked.what


def test_a_layer_that_forgets_what_hugging_faces_cache_holds_is_found():
    layer = hugging_face("GPT2Attention", layer_idx=0)
    own = layer.forward

    class Forgetful(type(layer)):
        def forward(self, x, cache=None, **more):
            context = own(x, **{CACHE: cache}, **more)
            return context if cache is None else own(x)

    layer.__class__ = Forgetful
    (finding,) = check_case(case_of(layer))
    assert finding.kind == "wrong cache"


class Placed(wrong.Rotary):
    """Rotary attention whose places the caller gives; `kept` is what of them it uses."""

    def __init__(self, kept=lambda places: places):
        super().__init__()
        self.kept = kept

    def forward(self, x, position_ids=None, past_kv=None):
        b, t, _ = x.shape
        places = self.kept(torch.arange(t) if position_ids is None else position_ids[0])
        q, k, v = (f(x).view(b, t, wrong.H, wrong.D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (wrong.rotate_half_pairs(one, places[:, None] * self.inv_freq) for one in (q, k))
        if past_kv is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_kv, (k, v), strict=True))
        hidden = torch.ones(t, k.shape[2], dtype=torch.bool).triu(k.shape[2] - t + 1)
        weights = (q @ k.mT / wrong.D**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), (k, v), {"loss": 0.0}


def test_places_that_the_caller_gives_are_given():
    (checked,) = check_case(case_of(Placed()))
    assert "the full forward" in checked.what
    (finding,) = check_case(case_of(Placed(lambda places: places - places[0])))  # which begins anew with each call
    assert finding.kind == "wrong cache"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_cache_in_any_dtype_is_classified_as_right_or_wrong(dtype):
    (finding,) = check_case(case_of(Cached(join=lambda past, new: new).to(dtype)))
    assert finding.kind == "wrong cache"
    (checked,) = check_case(case_of(Cached().to(dtype)))
    assert float(checked.sensitivity.split()[3]) < 1e-4


def test_a_layer_that_leaks_is_not_tested_for_its_cache():
    assert not list(check_case(case_of(Cached(diagonal=lambda q, k: k))))
