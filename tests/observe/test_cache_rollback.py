"""Caches that are cut back between steps, and keys that repeat or are zeros: the map is that of one forward over the text."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from observe.family import Widened
from observe.models import CACHE, bart, gpt2, words
from observe.recording_checks import EQUAL
from regard import load
from regard.observe import record

B, WINDOW, SLOTS, STEPS = 2, 5, 47, 7
SIZES = {"vocab_size": 11, "hidden_size": 24, "num_attention_heads": 3, "initializer_range": 0.4, "pad_token_id": 0}
SHARED = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1, "intermediate_size": 29}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {**SIZES, "n_layer": 2}),  # keys without positions
    "llama": ("Llama", SHARED),
    "mistral": ("Mistral", {**SHARED, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3Text", {**SHARED, "head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
}


class Step(NamedTuple):
    """Tokens (b, t) that are fed, and how many of them are then cut from the cache."""

    ids: Tensor
    cut: int


@st.composite
def draw_steps(draw: st.DrawFn, can_cut: bool = True, has_zeros: bool = True) -> list[Step]:
    """Steps of few different tokens; the embedding of token 0 is 0. Nothing is cut after the last."""
    rows = [(3, 3), (3, 4), (4, 4), *([(0, 0)] if has_zeros else [])]
    columns = st.lists(st.sampled_from(rows), min_size=1, max_size=7)
    ids = [torch.tensor(one).T for one in draw(st.lists(columns, min_size=2, max_size=STEPS))]
    cuts = [draw(st.integers(0, x.shape[1] - (not n))) if can_cut else 0 for n, x in enumerate(ids)]
    return [Step(x, cut if n < len(ids) - 1 else 0) for n, (x, cut) in enumerate(zip(ids, cuts, strict=True))]


def join_tokens(steps: list[Step]) -> Tensor:
    """The tokens that remain."""
    return torch.cat([ids[:, : ids.shape[1] - cut] for ids, cut in steps], 1)


@functools.cache
def build_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    family, sizes = MODELS[name]
    config = getattr(transformers, family.removesuffix("Text") + ("TextConfig" if "Text" in family else "Config"))(
        **sizes, **ENDS
    )
    model = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config).double().eval()
    model.get_input_embeddings().weight.data[0] = 0
    return model


def assert_one_run(model: nn.Module, recording: Any, ids: Tensor, **options: Any) -> None:
    """Fail unless all that was recorded is one run, equal to a forward over the tokens (b, t) that remain."""
    assert not recording.missed
    assert not recording.notes
    assert len(recording.runs) == 1
    with record(model) as expected:
        model(ids, **options)
    for layer in range(2):
        ours, theirs = recording.map(layer), expected.map(layer)
        assert ours.shape == theirs.shape
        assert (ours.dense() - theirs.dense()).abs().max() < EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=12)
@torch.no_grad()
def test_steps_and_cuts_are_one_map_equal_to_that_of_one_forward(name, is_static, data):
    model = build_model(name)
    cache: Any = DynamicCache(config=model.config)
    if is_static:
        cache = StaticCache(config=model.config, max_cache_len=SLOTS)
    steps = data.draw(draw_steps(can_cut=cache.is_croppable))
    if not is_static:
        cache.activate_past_recording()
    with Widened():
        with record(model) as recording:
            for ids, cut in steps:
                model(ids, **{CACHE: cache, "use_cache": True})
                if cache.is_croppable:
                    cache.crop(-cut)
        assert_one_run(model, recording, join_tokens(steps), use_cache=False)


class CachedAttention(nn.Module):
    """Attention with a cache that states no length: it grows, has slots under a mask, or holds a window."""

    def __init__(self, form: str, has_positions: bool) -> None:
        super().__init__()
        self.form, self.has_positions = form, has_positions
        self.project = nn.Linear(8, 24, bias=False)
        self.at, self.cached = 0, torch.zeros(2, B, 2, SLOTS if form == "slots" else 0, 4).double()

    def cut(self, count: int) -> None:
        """Forget the last tokens."""
        self.at -= count
        self.cached = self.cached[..., : self.at, :] if self.form == "growing" else self.cached

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys (b, h, t, 4) by their positions."""
        if not self.has_positions:
            return x
        angles = torch.arange(self.at, self.at + x.shape[2]).double()[:, None] * torch.tensor([1.0, 0.1])
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def store(self, new: Tensor) -> Tensor:
        """Return the keys and values (2, b, h, k, 4) of the cache with new ones appended."""
        if self.form == "slots":
            self.cached[..., self.at : self.at + new.shape[3], :] = new
            return self.cached.clone()
        full = torch.cat([self.cached, new], 3)
        self.cached = full[..., 1 - WINDOW :, :] if self.form == "window" else full
        return full

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (b, h, t, 4)
        q, (k, v) = self.rotate(q), self.store(torch.stack([self.rotate(k), v]))
        distance = torch.arange(t)[:, None] - torch.arange(k.shape[2])
        distance += self.at if self.form == "slots" else k.shape[2] - t
        hidden = (distance < 0) | (distance >= (WINDOW if self.form == "window" else SLOTS))
        scores = (q @ k.mT / 2 - 0.1 * distance).masked_fill(hidden, -torch.inf)
        self.at += t
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def build_own_model(form: str, has_positions: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [CachedAttention(form, has_positions) for _ in range(2)]
    return nn.Sequential(nn.Embedding(11, 8, padding_idx=0), *layers).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "has_positions"),
    [("growing", False), ("growing", True), ("slots", False), ("slots", True), ("window", True)],
)
@given(data=st.data())
@settings(max_examples=25)
@torch.no_grad()
def test_so_are_those_of_a_cache_that_states_no_length(form, has_positions, data):
    model = build_own_model(form, has_positions)
    is_window = form == "window"  # where it does not say how long it is, a window of zeros may be a cache that was cut
    steps = data.draw(draw_steps(can_cut=not is_window, has_zeros=not is_window))
    with record(model) as recording:
        for ids, cut in steps:
            model(ids)
            for layer in model[1:]:
                layer.cut(cut)
    assert_one_run(build_own_model(form, has_positions), recording, join_tokens(steps))


@torch.no_grad()
def test_slots_of_equal_tokens_that_were_cut_are_no_keys():
    """The same token throughout, without positions: slots behind the text hold its key since tokens were cut."""
    model, fed = build_own_model("slots", False), [(1, 0), (1, 0), (4, 4), (2, 1), (2, 0)]
    steps = [Step(torch.full((B, n), 3), cut) for n, cut in fed]
    with record(model) as recording:
        for ids, cut in steps:
            model(ids)
            for layer in model[1:]:
                layer.cut(cut)
    assert_one_run(build_own_model("slots", False), recording, join_tokens(steps))


@pytest.mark.parametrize("name", MODELS)
def test_guesses_that_were_rejected_leave_every_layer(name):
    model, prompt = build_model(name), torch.tensor([[3, 7, 7, 7, 7, 3, 7, 7, 3]])
    guessing = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    with Widened():
        with record(model) as recording:
            output = model.generate(prompt, suppress_tokens=[0, 1, 2], **guessing)
        fed = [call.map.shape[2] for call in recording.calls if call.name == recording.layers()[0]]
        tokens = recording.map(0).shape[2]
        assert output.shape[1] - 1 <= tokens <= output.shape[1] < sum(fed)
        assert recording.last.rows == [0]
        assert_one_run(model, recording, output[:, :tokens], use_cache=False)


@torch.no_grad()
def test_a_recording_of_one_row_is_saved_after_a_cut(tmp_path):
    """The mask of a call that was cut is a part of the mask that the call itself keeps, in the same memory."""
    model, ids, mask = gpt2(), words(1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]])
    cache = DynamicCache()
    with record(model) as recording:
        model(ids[:, :5], attention_mask=mask[:, :5], **{CACHE: cache})
        cache.crop(-2)
        model(ids[:, 3:4], attention_mask=mask[:, :4], **{CACHE: cache})
    recording.save(tmp_path / "cut.regard")
    loaded = load(tmp_path / "cut.regard")
    for ours, saved in zip(recording.calls, loaded.calls, strict=True):
        assert torch.equal(saved.map.dense(), ours.map.dense())
    assert torch.equal(loaded.map(0).dense(), recording.map(0).dense())


@pytest.mark.parametrize("keep", [None, "values"])
@torch.no_grad()
def test_tokens_that_were_cut_leave_cross_attention_too(keep):
    model, source, ids = bart().double(), words(1, 7), words(1, 11)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with record(model, keep=keep) as recording:
        encoded = model.get_encoder()(source)
        for first, last, cut in ((0, 3, 0), (3, 8, 4), (4, 6, 0), (6, 11, 2)):
            model(encoder_outputs=encoded, decoder_input_ids=ids[:, first:last], **{CACHE: cache})
            cache.crop(-cut)
        model(encoder_outputs=encoded, decoder_input_ids=ids[:, 9:], **{CACHE: cache})
    with record(model, keep=keep) as expected:
        model(source, decoder_input_ids=ids, use_cache=False)
    assert len(recording.runs) == 1
    for kind in ("self", "cross"):
        for layer in range(3):
            ours, theirs = (one.map(layer, kind=kind, part="decoder") for one in (recording, expected))
            assert ours.shape == theirs.shape
            assert (ours.dense() - theirs.dense()).abs().max() < EQUAL
            if keep:
                values = [one.values(layer, kind=kind, part="decoder") for one in (recording, expected)]
                torch.testing.assert_close(*values, rtol=0, atol=EQUAL)


def test_a_forward_before_a_generation_keeps_all_of_its_tokens():
    model = gpt2()
    with torch.no_grad(), record(model) as recording:
        model(torch.tensor([[1, 5, 6, 7, 8, 9, 10, 11]]))
        model.generate(torch.tensor([[1, 3, 3, 4]]), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [run.map(0).shape[2:] for run in recording.runs] == [(8, 8), (7, 7)]
