import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor, QuantizedCache, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from observe.families import FAMILIES
from observe.family import WORDS, B, T
from observe.models import CACHE
from observe.recording_checks import EQUAL
from regard import Causal, Documents, Window, load
from regard.models import GPT2, GPT2Config
from regard.observe import record

pytestmark = pytest.mark.usefixtures("float64_models")
STEPS = 14
EVERYDAY = ("gpt2", "mistral", "gemma2")
DECODERS = ("llama", "gemma3", "gpt_oss", "falcon", "llama4", "deepseek_v3")  # outputs of deepseek_v32 change with the length
PAIRS = ("bart", "t5", "whisper")
STATIC = {"cache_implementation": "static", "disable_compile": True}


def make_model_and_inputs(name, side="none"):
    """A model that generates, and what it is to go on from."""
    family = next(family for family in FAMILIES if family.name == name)
    settings = {**family.settings, **({"num_layers": 3} if name == "t5" else {})}  # T5's cache counts the encoder's layers
    ending = {"gpt2": "LMHeadModel"}.get(name, "ForConditionalGeneration" if name in PAIRS else "ForCausalLM")
    stem = family.model.removesuffix("Model").removesuffix("Text")
    model = replace(family, model=stem + ending, settings=settings).build(torch.float64)
    given = family.feed(model, side)
    given.pop("decoder_input_ids", None)
    return model, given


class Watching(LogitsProcessor):
    """Notes the tokens of the rows that are alive."""

    def __call__(self, ids, scores):
        self.ids = ids.clone()
        return scores


def generate(model, given, **options):
    """Tokens that every row has fed to the model, and what came out."""
    torch.manual_seed(1)
    watching = Watching()
    ends = {"pad_token_id": 0, "eos_token_id": 2, "suppress_tokens": [0, 1, 2], "max_new_tokens": STEPS}
    output = model.generate(
        **given, **{**ends, "do_sample": False, **options}, logits_processor=[watching], return_dict_in_generate=True
    )
    return watching.ids, output


@torch.no_grad()
def record_full_forward(model, given, ids):
    """A recording of one forward over all of the text; and which of its tokens are real."""
    rows = len(ids) // B
    given = {name: x.repeat_interleave(rows, 0) for name, x in given.items()}
    if model.config.is_encoder_decoder:
        with record(model) as recording:
            model(**given, decoder_input_ids=ids)
        return recording, torch.ones_like(ids).bool()
    mask = torch.ones_like(ids)
    if "attention_mask" in given:
        mask[:, :T] = given["attention_mask"]
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}
        if "position_ids" not in model.prepare_inputs_for_generation(ids, **given):
            del given["position_ids"]
    with record(model) as recording:
        model(**{**given, "input_ids": ids}, use_cache=False)
    return recording, mask.bool()


def check(model, given, **options):
    """Generates outside and inside: the same to the bit, and all of it as one map a layer, equal to that of one forward."""
    _, outside = generate(model, given, **options)
    with record(model) as recording:
        ids, inside = generate(model, given, **options)
    assert torch.equal(outside.sequences, inside.sequences)
    assert not recording.missed
    assert len(recording.runs) == 1
    expected, real = record_full_forward(model, given, ids)
    for kind in ("self", "cross"):
        layers = len(expected.layers(kind))
        assert len(recording.layers(kind)) == layers
        for layer in range(layers):
            ours, theirs = recording.map(layer, kind=kind), expected.map(layer, kind=kind)
            assert ours.shape == theirs.shape
            apart = (ours.dense() - theirs.dense()).abs().amax(-1)
            assert apart[real[:, None].expand_as(apart)].max() < EQUAL
    return recording


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", [*EVERYDAY, *(pytest.param(name, marks=pytest.mark.slow) for name in DECODERS)])
def test_the_steps_of_a_generation_are_one_map_equal_to_that_of_one_forward(name, options, side):
    check(*make_model_and_inputs(name, side), **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", PAIRS)
def test_so_are_those_of_a_decoder_that_looks_at_an_encoder(name, options):
    recording = check(*make_model_and_inputs(name), **options)
    assert recording.map(0, kind="cross").shape[2] == STEPS
    assert recording.map(0, part="encoder").shape[2] == recording.map(0, kind="cross").shape[3]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, STATIC, {"do_sample": True}], ids=["dynamic", "static", "sampled"])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "bart", "t5"])
def test_beams_keep_the_history_of_the_rows_that_survived(name, options):
    recording = check(*make_model_and_inputs(name), num_beams=3, **options)
    assert recording.map(0).shape[0] == 3 * B
    assert any(not torch.equal(rows, torch.arange(3 * B)) for rows in recording.last.parent_rows.values())


@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
def test_beams_keep_their_own_keys_where_the_first_layer_is_recorded_alone(options):
    model, given = make_model_and_inputs("gpt2")
    maps = []
    for layers in (None, [0]):
        with record(model, layers=layers) as recording:
            generate(model, given, num_beams=3, **options)
        maps.append(recording.map(0).dense())
    assert (maps[0] - maps[1]).abs().max() < EQUAL


def test_a_call_before_the_beams_is_the_forward_over_the_prompt():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=1, heads=2, width=12, context=20, vocabulary=13)).eval().double()
    prompts = torch.randint(0, 13, (2, 5))
    with record(model) as alone:
        model(prompts)
    with record(model) as recording:
        list(model.generate(prompts, 4, beams=3))
    first, *steps = [call.map.dense() for call in recording.calls]
    assert (first - alone.map(0).dense()).abs().max() < EQUAL
    assert [step.shape for step in steps] == [(6, 2, 1, keys) for keys in (6, 7, 8)]


@pytest.mark.slow
def test_ragged_prompts_in_beams_keep_their_own_rows():
    check(*make_model_and_inputs("llama", "left"), num_beams=3)


@pytest.mark.slow
def test_samples_of_one_prompt_are_rows_of_their_own():
    recording = check(*make_model_and_inputs("gemma3"), do_sample=True, num_return_sequences=2)
    assert recording.map(0).shape[0] == 2 * B


@pytest.mark.slow
def test_a_prompt_that_is_read_in_chunks_is_one_run():
    check(*make_model_and_inputs("mistral"), prefill_chunk_size=4)


def test_without_a_cache_every_forward_is_a_run_and_the_last_is_the_whole_text():
    model, given = make_model_and_inputs("llama")
    with record(model) as recording:
        ids, _ = generate(model, given, use_cache=False)
    assert len(recording.runs) == STEPS
    expected, _ = record_full_forward(model, given, ids)
    assert (recording.map(1).dense() - expected.map(1).dense()).abs().max() < EQUAL


@pytest.mark.slow
def test_two_generations_in_one_block_are_two_runs():
    model, given = make_model_and_inputs("mistral")
    with record(model) as recording:
        first, _ = generate(model, given)
        other = {"input_ids": given["input_ids"].flip(0)}
        second, _ = generate(model, other)
    assert len(recording.runs) == 2
    for run, (one, ids) in zip(recording.runs, [(given, first), (other, second)], strict=True):
        expected, _ = record_full_forward(model, one, ids)
        assert (run.map(2).dense() - expected.map(2).dense()).abs().max() < EQUAL


@pytest.mark.slow
def test_two_generations_in_one_static_cache_are_two_runs():
    model, given = make_model_and_inputs("gemma3")
    with record(model) as recording:
        generate(model, given, **STATIC)
        ids, _ = generate(model, {"input_ids": given["input_ids"].flip(0)}, **STATIC)
    assert len(recording.runs) == 2
    expected, _ = record_full_forward(model, given, ids)
    assert (recording.map(2).dense() - expected.map(2).dense()).abs().max() < EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "smollm3"])
def test_a_conversation_with_one_cache_is_one_run(name):
    model, given = make_model_and_inputs(name)
    cache = DynamicCache(config=model.config)
    with record(model) as recording:
        _, told = generate(model, given, **{CACHE: cache})
        asked = torch.randint(3, WORDS, (B, 7), generator=torch.Generator().manual_seed(1))
        ids, _ = generate(model, {"input_ids": torch.cat([told.sequences, asked], 1)}, **{CACHE: cache})
    assert len(recording.runs) == 1
    expected, _ = record_full_forward(model, given, ids)
    for layer in range(len(recording.layers())):
        assert (recording.map(layer).dense() - expected.map(layer).dense()).abs().max() < EQUAL


@pytest.mark.parametrize("name", ["gpt2", "llama", "smollm3"])
def test_words_that_were_guessed_wrongly_leave_the_map_with_the_cache(name):
    model, given = make_model_and_inputs(name)
    given = {"input_ids": given["input_ids"][:1].repeat(1, 2)}
    with record(model) as recording:
        _, output = generate(model, given, prompt_lookup_num_tokens=3)
    assert any(piece.q.shape[2] > 1 for strand in recording.last.histories.values() for piece in strand.stored_calls[1:])
    tokens = recording.map(0).shape[2]
    with torch.no_grad(), record(model) as expected:
        model(output.sequences[:, :tokens], use_cache=False)
    for layer in range(len(recording.layers())):
        assert recording.map(layer).shape == expected.map(layer).shape
        assert (recording.map(layer).dense() - expected.map(layer).dense()).abs().max() < EQUAL


@torch.no_grad()
def test_rows_that_leave_the_batch_leave_the_map():
    model, given = make_model_and_inputs("llama")
    ids = torch.cat([given["input_ids"], given["input_ids"].flip(1)], 1)
    cache = DynamicCache(config=model.config)
    with record(model) as recording:
        model(ids[:, :T], **{CACHE: cache})
        cache.batch_select_indices(torch.tensor([2, 0]))
        for token in range(T, 2 * T):
            model(ids[[2, 0], token : token + 1], **{CACHE: cache})
    with record(model) as expected:
        model(ids[[2, 0]], use_cache=False)
    for layer in range(3):
        assert (recording.map(layer).dense() - expected.map(layer).dense()).abs().max() < EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_recording_that_begins_in_the_middle_sees_the_keys_that_were_there(cache):
    model, given = make_model_and_inputs("gemma3")
    ids = given["input_ids"]
    kept = cache(config=model.config, **({"max_cache_len": 29} if cache is StaticCache else {}))
    model(ids[:, :3], **{CACHE: kept})
    with record(model) as recording:
        for token in range(3, T):
            model(ids[:, token : token + 1], **{CACHE: kept})
    with record(model) as expected:
        model(ids, use_cache=False)
    for layer in range(3):
        found = recording.map(layer)
        assert found.shape == (B, 4, T - 3, T)
        assert (found.dense() - expected.map(layer).dense()[:, :, 3:]).abs().max() < EQUAL


@torch.no_grad()
def test_what_is_stored_is_safe_from_a_cache_that_is_written_over():
    model, given = make_model_and_inputs("gemma3")
    ids = given["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=29)
    with record(model) as recording:
        model(ids, **{CACHE: cache})
        before = recording.map(0).dense()
        for layer in cache.layers:
            layer.keys.zero_()
    assert torch.equal(recording.map(0).dense(), before)


def test_each_key_is_stored_once():
    model, given = make_model_and_inputs("mistral")
    with record(model) as recording:
        generate(model, given)
    for strand in recording.last.histories.values():
        assert strand.total == T + STEPS - 1
        assert sum(keys.untyped_storage().nbytes() for keys in strand.keys) == B * 2 * (T + STEPS - 1) * 12 * 8


def test_a_cache_that_rounds_its_keys_is_reported():
    model, given = make_model_and_inputs("llama")
    cache = QuantizedCache(backend="fp8", config=model.config)
    with warnings.catch_warnings(record=True), record(model) as recording:
        warnings.simplefilter("always")
        ids, _ = generate(model, given, **{CACHE: cache})
    assert "rounded" in recording.missed[0].reason
    assert recording.map(0).shape[2] == ids.shape[1]
    assert len(recording.runs) == 1


class PrunedAttention(nn.Module):
    """Attention of two heads with a cache, of which `prune` returns what is left after a step; `weights` are those of all."""

    steps = (7, 1, 1, 1, 1)

    def __init__(self, prune):
        super().__init__()
        self.prune, self.project = prune, nn.Linear(6, 18, bias=False)
        self.cached, self.weights = torch.zeros(2, 1, 2, 0, 3).double(), []

    def forward(self, x):
        q, *new = self.project(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        k, v = self.cached = torch.cat([self.cached, torch.stack(new)], 3)
        hidden = torch.ones(q.shape[2], k.shape[2]).triu(1 + k.shape[2] - q.shape[2]).bool()
        self.weights.append((q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1))
        self.cached = self.prune(self.cached)
        return x + (self.weights[-1] @ v).transpose(1, 2).flatten(2)

    @classmethod
    @torch.no_grad()
    def run(cls, prune):
        """Return the recording of a model of one such module in several steps, and the module."""
        torch.manual_seed(0)
        model = nn.Sequential(cls(prune)).double()
        with record(model) as recording:
            for count in cls.steps:
                model(torch.randn(1, count, 6).double())
        return recording, model[0]


def keep_sinks(cached):
    """The first two keys and the last three."""
    return torch.cat([cached[..., :2, :], cached[..., 2:, :][..., -3:, :]], 3)


def keep_others_in_each_head(cached):
    """All keys of the first head but its second, of the second head but its third, and the last four."""
    if cached.shape[3] != 7:
        return cached
    kept = torch.tensor([[0, 2, 3, 4, 5, 6], [0, 1, 3, 4, 5, 6]])
    return cached.gather(3, kept[..., None].expand(2, 1, 2, 6, 3))


def keep_window(cached):
    return cached[..., -4:, :]


def round_older_keys(cached):
    return torch.cat([cached[..., :-2, :].bfloat16().double(), cached[..., -2:, :]], 3)


def keep_in_order_of_score(cached):
    """The four keys of each head that are largest in their first number, the largest first."""
    return cached.gather(3, cached[:1, ..., 0].topk(4, -1).indices[..., None].expand(2, 1, 2, 4, 3))


@pytest.mark.parametrize("prune", [keep_sinks, keep_others_in_each_head, keep_in_order_of_score])
def test_a_cache_that_drops_keys_hides_them_from_the_later_rows_of_one_map(prune, tmp_path):
    recording, attention = PrunedAttention.run(prune)
    recording.save(tmp_path / "pruned.rgd")
    for found in (recording, load(tmp_path / "pruned.rgd")):
        assert (len(found.runs), found.missed) == (1, [])
        rows = found.map(0).dense()
        assert rows.shape == (1, 2, 11, 11)
        for step, (row, held) in enumerate(zip(rows[:, :, 7:].unbind(2), attention.weights[1:], strict=True), 8):
            assert (row.sort().values[..., -held.shape[-1] :] - held[:, :, 0].sort().values).abs().max() < EQUAL
            assert (row > 0).sum(-1).eq(held.shape[-1]).all()
            assert (row[..., step - 1] - held[:, :, 0, -1]).abs().max() < EQUAL
        assert (rows[:, :, :7, :7] - attention.weights[0]).abs().max() < EQUAL
        assert "has dropped keys" in found.notes[0]


@torch.no_grad()
def test_a_generation_whose_cache_a_hook_prunes_is_one_run():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=32)
    config.num_key_value_heads = 2
    model, held = LlamaForCausalLM(config).double().eval(), torch.tensor([0, 1, 4, 5, 7, 8])

    def prune(module, args, kwargs, output):
        if kwargs["hidden_states"].shape[1] > 1:
            layer = kwargs[CACHE].layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, held], layer.values[:, :, held]

    for block in model.model.layers:
        block.self_attn.register_forward_hook(prune, with_kwargs=True)
    with record(model) as recording:
        ids = model.generate(torch.randint(1, 32, (1, 9)), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert (len(recording.runs), recording.last.rows, recording.missed) == (1, [0], [])
    assert [call.step for call in recording.calls] == [0, 0, 1, 1, 2, 2, 3, 3]
    block, x = model.model.layers[0], model.model.embed_tokens(ids[:, :-1])
    y = block.input_layernorm(x)
    q, k = (project(y).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (block.self_attn.q_proj, block.self_attn.k_proj))
    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(x, torch.arange(12)[None]))
    visible = torch.ones(12, 12).bool().tril()
    visible[9:, [2, 3, 6]] = False
    scores = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(~visible, -torch.inf)
    assert (recording.map(0).dense() - scores.softmax(-1)).abs().max() < EQUAL


def merge_oldest(cached):
    """The mean of the two oldest keys in place of both, if there are seven."""
    return torch.cat([cached[..., :2, :].mean(-2, keepdim=True), cached[..., 2:, :]], 3) if cached.shape[3] == 7 else cached


def test_a_cache_that_changes_keys_begins_a_later_run_of_the_keys_that_it_holds():
    with pytest.warns(UserWarning, match="has dropped or changed keys"):
        recording, attention = PrunedAttention.run(merge_oldest)
    assert [call.map.shape[2] for call in recording.calls] == [*PrunedAttention.steps]
    for call, weights in zip(recording.calls, attention.weights, strict=True):
        assert (call.map.dense() - weights).abs().max() < EQUAL


class RingAttention(PrunedAttention):
    """Attention whose cache has five slots, the oldest of which a new key overwrites, as litgpt's with a sliding window."""

    steps = (3,) + 11 * (1,)

    def __init__(self, size):
        super().__init__(None)
        self.size, self.seen = size, 0

    def forward(self, x):
        q, *new = self.project(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        room = torch.zeros(2, 1, 2, max(0, min(self.seen + x.shape[1], self.size) - self.cached.shape[3]), 3)
        self.cached = torch.cat([self.cached, room.double()], 3)
        slots = torch.arange(self.seen, self.seen + x.shape[1]) % self.size
        self.cached[..., slots, :], self.seen = torch.stack(new), self.seen + x.shape[1]
        hidden = torch.ones(q.shape[2], self.cached.shape[3]).triu(1 + self.cached.shape[3] - q.shape[2]).bool()
        self.weights.append((q @ self.cached[0].mT).masked_fill(hidden, -torch.inf).softmax(-1))
        return x + (self.weights[-1] @ self.cached[1]).transpose(1, 2).flatten(2)


def test_a_cache_that_overwrites_its_oldest_slot_begins_maps_of_the_keys_that_it_holds():
    with pytest.warns(UserWarning, match="has dropped or changed keys"):
        recording, attention = RingAttention.run(5)
    for call, weights in zip(recording.calls, attention.weights, strict=True):
        assert (call.map.dense() - weights).abs().max() < EQUAL
    assert (recording.map(0).dense()[:, :, -1:] - attention.weights[-1]).abs().max() < EQUAL


class SlotAttention(PrunedAttention):
    """Attention with slots for more keys than the text has and a softcap, as torchtune's Gemma 2.

    Its window is made of the rows of the mask that it is given: those of a step see the first slots alone, never their own key.
    """

    size = 13

    def __init__(self, window):
        super().__init__(None)
        self.window, self.seen = window, 0
        self.cached = torch.zeros(2, 1, 2, self.size, 3).double()

    def forward(self, x):
        q, *new = self.project(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        places = torch.arange(self.seen, self.seen + x.shape[1])
        self.cached[0].index_copy_(2, places, new[0])
        self.cached[1].index_copy_(2, places, new[1])
        self.seen += x.shape[1]
        visible = torch.ones(self.size, self.size).tril()[places]
        if self.window:
            visible = visible * torch.ones_like(visible).triu(1 - self.window) * torch.ones_like(visible).tril(self.window - 1)
        scores = 5 * ((q @ self.cached[0].mT) / 5).tanh() + torch.where(visible == 1, 0, -2e38)
        self.weights.append(scores.softmax(-1))
        return x + (self.weights[-1] @ self.cached[1]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("window", [None, 4, 7, 9])
def test_steps_that_do_not_see_their_own_key_are_rows_of_the_map(window):
    recording, attention = SlotAttention.run(window)
    rows = torch.cat(attention.weights, 2)
    assert not recording.missed
    assert recording.map(0).shape == (1, 2, 11, 11)
    assert (recording.map(0).dense() - rows[..., :11]).abs().max() < EQUAL


def round_older_and_cut(cached):
    """All keys but the last two rounded; without the last one if there are nine."""
    rounded = torch.cat([(cached[..., :-2, :] * 16).round() / 16, cached[..., -2:, :]], 3)
    return rounded[..., :8, :] if cached.shape[3] == 9 else rounded


def test_a_cache_that_rounds_its_older_keys_and_is_cut_continues_its_run():
    with pytest.warns(UserWarning, match="its cache returns keys that differ"):
        recording, _ = PrunedAttention.run(round_older_and_cut)
    assert len(recording.runs) == 1
    assert [call.map.shape[-1] for call in recording.calls] == [7, 8, 9, 9, 9]


def test_a_window_of_the_last_keys_is_one_map():
    recording, _ = PrunedAttention.run(keep_window)
    assert not recording.missed
    assert recording.map(0).shape == (1, 2, 11, 11)


def test_a_cache_that_rounds_its_older_keys_alone_is_reported():
    with pytest.warns(UserWarning, match="rounded"):
        recording, _ = PrunedAttention.run(round_older_keys)
    assert len(recording.runs) == 1


class SignCache(DynamicCache):
    """A cache that keeps the sign of each number alone, but of the tokens of the last forward."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        new = key_states.shape[2]
        return tuple(torch.cat([x[:, :, :-new].sign() / 8, x[:, :, -new:]], 2) for x in (keys, values))


def test_a_cache_whose_keys_are_unlike_those_it_was_given_begins_a_run_that_is_the_last():
    model, given = make_model_and_inputs("llama")
    with pytest.warns(UserWarning, match="dropped or changed keys"), record(model) as recording:
        ids, _ = generate(model, given, **{CACHE: SignCache()})
    assert {"dropped or changed keys" in one.reason for one in recording.missed} == {True}
    assert recording.runs[0].calls[0].map.shape[-2:] == (T, T)
    assert recording.last.calls[-1].map.shape[-2:] == (1, ids.shape[1])


@pytest.mark.slow
@torch.no_grad()
def test_chunks_and_windows_are_plain_rules_after_a_generation():
    rules = {}
    for name in ("gpt2", "mistral", "llama4"):
        model, given = make_model_and_inputs(name)
        with record(model) as recording:
            generate(model, given)
        rules[name] = recording.map(0).planes.request.mask
    assert rules["gpt2"] == Causal()
    assert rules["mistral"] == Causal() & Window(4)
    assert isinstance(rules["llama4"].other, Documents)


class ScaledByLength(nn.Module):
    """Attention with a cache, whose scale grows with the logarithm of the number of keys, by a kernel or by hand."""

    def __init__(self, by_hand):
        super().__init__()
        self.by_hand, self.keys, self.scales = by_hand, None, []

    def forward(self, q):
        self.keys = q.flip(-1) if self.keys is None else torch.cat([self.keys, q.flip(-1)], 2)
        n, keys = q.shape[2], self.keys.shape[2]
        shown, scale = torch.ones(n, keys, dtype=torch.bool).tril(keys - n), math.log(keys + 1) / math.sqrt(5)
        self.scales += [scale] * n
        if not self.by_hand:
            return nn.functional.scaled_dot_product_attention(q, self.keys, self.keys, shown, scale=scale)
        return (q @ self.keys.mT * scale).masked_fill(~shown, -torch.inf).softmax(-1) @ self.keys


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_step_keeps_its_scale_in_the_map_of_all(by_hand, dtype):
    torch.manual_seed(0)
    model, q = nn.Sequential(ScaledByLength(by_hand)), torch.randn(B, 3, 7, 5).to(dtype)
    with record(model) as recording:
        for part in q.split([4, 2, 1], 2):
            model(part)
    assert len(recording.runs) == 1
    scores = q.double() @ q.flip(-1).double().mT * torch.tensor(model[0].scales, dtype=torch.float64).unsqueeze(-1)
    expected = scores.masked_fill(~Causal().table(7, 7), -torch.inf).softmax(-1)
    torch.testing.assert_close(
        recording.map(0).dense().double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6
    )
