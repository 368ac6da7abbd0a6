"""Which run a forward continues: generations that take turns on one model, and the rows that generate returned."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from observe.models import CACHE, WORDS, bart, gpt2, llama, words
from observe.recording_checks import EQUAL
from regard import AdditiveAttention, heads, load
from regard.observe import Recording, record

pytestmark = pytest.mark.usefixtures("float64_models")
STEPS = 6
OPTIONS = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": STEPS, "return_dict_in_generate": True}
ENDS = list(range(10, 40))  # of which one soon comes


class Turn:
    """A generation that goes on a token at a time."""

    def __init__(self, model, prompt, cache, seed=0):
        self.model, self.ids, self.cache = model, prompt, cache
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self):
        """Read what is not in the cache yet, and go on with a token by chance."""
        known = self.cache.get_seq_length()
        self.model(self.ids[:, int(known) :], **{CACHE: self.cache})
        self.ids = torch.cat([self.ids, torch.randint(3, WORDS, (len(self.ids), 1), generator=self.random)], 1)


@torch.no_grad()
def record_full_forward(model, ids, **given) -> Recording:
    """One forward over all of a text."""
    with record(model) as recording:
        model(**{"input_ids": ids, **given}, use_cache=False)
    return recording


def assert_run(run, expected, rows=slice(None)):
    """Fail unless all maps of a run are those of one forward."""
    for kind in ("self", "cross"):
        layers = expected.layers(kind)
        assert run.layers(kind) == layers
        for layer in range(len(layers)):
            ours, theirs = run.map(layer, kind=kind).dense()[rows], expected.map(layer, kind=kind).dense()
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < EQUAL


def dynamic(model):
    return DynamicCache(config=model.config)


def static(model):
    return StaticCache(config=model.config, max_cache_len=29)


ORDERS = {"in turn": "ABABABABABAB", "now and then": "AABABBBAABAB", "one inside": "AABBBBBBAAAA", "three": "ABCCABCABBCCAACB"}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("cache", [dynamic, static])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_generations_that_take_turns_are_a_run_each(build, alike, cache, order):
    model = build().double()
    prompts = {name: words(2, 7 if alike else 7 + n) for n, name in enumerate("ABC")}
    turns = {name: Turn(model, prompt, cache(model), n) for n, (name, prompt) in enumerate(prompts.items())}
    with record(model) as recording:
        for name in order:
            turns[name].step()
    assert len(recording.runs) == len(set(order))
    for run, name in zip(recording.runs, dict.fromkeys(order), strict=True):
        assert_run(run, record_full_forward(model, turns[name].ids[:, :-1]))


class Unnamed(nn.Module):
    """A model whose cache is nothing that a recording can know again."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, memory, **given):
        return self.model(ids, **{CACHE: memory[0]}, **given)


@pytest.mark.parametrize("prompts", ["other", "of one last word", "the same"])
def test_without_a_cache_that_can_be_known_their_keys_tell(prompts):
    model = Unnamed(gpt2().double())
    a, b = words(1, 7), words(1, 7).flip(1)
    b = {"other": b, "of one last word": torch.cat([b[:, :-1], a[:, -1:]], 1), "the same": a.clone()}[prompts]
    caches = dynamic(model.model), dynamic(model.model)
    texts = [torch.cat([prompt, words(1, 5 + n)], 1) for n, prompt in enumerate((a, b))]
    with torch.no_grad(), record(model) as recording:
        for first, last in [(0, 7), *((n, n + 1) for n in range(7, 12))]:
            for ids, cache in zip(texts, caches, strict=True):
                model(ids[:, first:last], [cache])
    assert len(recording.runs) == 2
    for run, ids in zip(recording.runs, texts, strict=True):
        expected = record_full_forward(model.model, ids[:, :12])
        for layer in range(3):
            assert (run.map(layer).dense() - expected.map(layer).dense()).abs().max() < EQUAL


@pytest.mark.parametrize("common", [0, 1], ids=["other first tokens", "the same first token"])
@torch.no_grad()
def test_texts_of_one_last_token_whose_prompts_were_not_recorded_are_a_run_each(common):
    model = gpt2().double()
    a, b = words(1, 8), words(1, 8).flip(1)
    b = torch.cat([a[:, :common], b[:, common:6], a[:, 6:]], 1)
    caches = dynamic(model), dynamic(model)
    for ids, cache in zip((a, b), caches, strict=True):
        model(ids[:, :7], **{CACHE: cache})
    with record(model) as recording:
        for ids, cache in zip((a, b), caches, strict=True):
            model(ids[:, 7:], **{CACHE: cache})
    assert not recording.missed
    assert len(recording.runs) == 2
    for run, ids in zip(recording.runs, (a, b), strict=True):
        expected = record_full_forward(model, ids)
        for layer in range(3):
            assert (run.map(layer).dense() - expected.map(layer).dense()[:, :, 7:]).abs().max() < EQUAL


class Cache:
    """Keys before what each step does to all of them."""

    def __init__(self, keys):
        self.keys = keys


class RecomputedKeys(nn.Module):
    """Attention that computes all keys again in each step, up to rounding, and returns another cache."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x, cache):
        keys = torch.cat([cache.keys, self.project(x)], 1)
        scores = x @ (keys * (1 + 3e-7 * keys.shape[1])).mT  # what float32 rounds, in float64
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + keys.shape[1] - x.shape[1])
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ keys, Cache(keys)


@torch.no_grad()
def test_keys_that_are_computed_again_for_each_step_continue_a_run():
    torch.manual_seed(0)
    model, cache = RecomputedKeys().double(), Cache(torch.zeros(1, 0, 6).double())
    with record(model) as recording:
        for count in (5, *[1] * 9):
            _, cache = model(torch.randn(1, count, 6).double(), cache)
    assert len(recording.runs) == 1
    assert recording.map(0).shape == (1, 1, 14, 14)


def test_pairs_that_take_turns_keep_their_own_encoder():
    model = bart().double()
    sources, caches = [words(1, 7), words(1, 9)], [None, None]
    texts = [words(1, 5), words(1, 6)[:, :5]]
    encoded = []
    with torch.no_grad(), record(model) as recording:
        for step in range(5):
            for n in range(2):
                if not step:
                    encoded.append(model.get_encoder()(sources[n]))
                given = {"decoder_input_ids": texts[n][:, step : step + 1], CACHE: caches[n], "use_cache": True}
                caches[n] = model(encoder_outputs=encoded[n], **given).past_key_values
    assert len(recording.runs) == 2
    for run, source, text in zip(recording.runs, sources, texts, strict=True):
        assert_run(run, record_full_forward(model, source, decoder_input_ids=text))


def test_copies_of_a_cache_go_on_from_one_prompt_and_lose_nothing():
    model, prompt, cache = gpt2().double(), words(1, 7), None
    cache = dynamic(model)
    with record(model) as recording:
        first = Turn(model, prompt, cache)
        first.step()
        second, third = (Turn(model, first.ids, copy.deepcopy(cache), n) for n in (1, 2))
        for turn in (first, second, third) * 3:
            turn.step()
    assert len(recording.runs) == 3
    for run, turn in zip(recording.runs, (first, second, third), strict=True):
        assert_run(run, record_full_forward(model, turn.ids[:, :-1]))


class Writer(nn.Module):
    """A step of a decoder that looks at a source."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = AdditiveAttention(5, 5, 11)

    def forward(self, state: Tensor, source: Tensor) -> Tensor:
        return self.attention(state, source)


def test_decoders_of_additive_attention_that_take_turns_are_a_run_each():
    model, sources, states = Writer().double(), torch.randn(2, 1, 7, 5).double(), torch.randn(6, 2, 1, 1, 5).double()
    with record(model) as recording:
        for step in states:
            for state, source in zip(step, sources, strict=True):
                model(state, source)
    assert len(recording.runs) == 2
    for n, run in enumerate(recording.runs):
        expected = model.attention.steps(states[:, n, 0].transpose(0, 1), sources[n]).weights
        assert (run.map(0, kind="cross").dense() - expected.unsqueeze(1)).abs().max() < EQUAL


class Perceiver(nn.Module):
    """Latents that look at a sequence, then at themselves."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 3, 8))
        self.cross_attn, self.self_attn = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        found, _ = self.cross_attn(self.latents.expand(len(x), -1, -1), x, x, need_weights=False)
        return self.self_attn(found, found, found, need_weights=False)


@torch.no_grad()
def test_a_forward_on_the_same_input_is_a_run_of_its_own_where_cross_attention_comes_first():
    model, x = Perceiver().eval(), torch.randn(2, 5, 8)
    with record(model) as recording:
        model(x), model(x)
    assert [[run.map(0, kind=kind).shape for kind in ("cross", "self")] for run in recording.runs] == [
        [(2, 2, 3, 5), (2, 2, 3, 3)]
    ] * 2


# what generate returned


@pytest.mark.parametrize("order", [("", "transformer"), ("transformer", ""), ("transformer", "", "transformer")], ids=str)
def test_forwards_of_a_model_and_of_its_part_are_a_run_each(order):
    model, texts = gpt2(), [words(1, 5 + 2 * n) for n in range(len(order))]
    with torch.no_grad(), record(model) as recording:
        for part, ids in zip(order, texts, strict=True):
            model.get_submodule(part)(ids, use_cache=False)
    assert len(recording.runs) == len(order)
    for run, ids in zip(recording.runs, texts, strict=True):
        assert_run(run, record_full_forward(model, ids))


def test_a_part_continues_the_run_of_its_model_where_it_is_given_its_cache():
    model, ids = gpt2().double(), words(1, 12)
    with torch.no_grad(), record(model) as recording:
        cache = dynamic(model)
        model(ids[:, :5], **{CACHE: cache})
        model.transformer(ids[:, 5:9], **{CACHE: cache})
        model(ids[:, 9:], **{CACHE: cache})
    (run,) = recording.runs
    assert_run(run, record_full_forward(model, ids))


def test_an_encoder_and_then_the_whole_model_with_its_states_are_one_run():
    model, ids, given = bart(), words(1, 6), words(1, 8)
    with torch.no_grad(), record(model) as recording:
        states = model.get_encoder()(ids)
        model(encoder_outputs=states, decoder_input_ids=given, use_cache=False)
    (run,) = recording.runs
    assert_run(run, record_full_forward(model, ids, decoder_input_ids=given))


@pytest.mark.parametrize("rows", [1, 2])
def test_guidance_is_two_runs_and_the_last_is_that_of_the_prompt(rows):
    model, prompt = gpt2().double(), words(rows, 7)
    with record(model) as recording:
        output = model.generate(prompt, guidance_scale=1.7, suppress_tokens=[0, 1, 2], **OPTIONS)
    assert len(recording.runs) == 2
    written = output.sequences[:, :-1]
    assert recording.last is recording.runs[0]
    assert_run(recording.last, record_full_forward(model, written))
    assert_run(recording.runs[1], record_full_forward(model, written[:, 6:]))
    assert recording.last.rows == list(range(rows))
    assert recording.runs[1].rows == []


BEAMS = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "all beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 4, "do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize(
    ("build", "options"),
    [(gpt2, one) for one in BEAMS.values()] + [(bart, BEAMS["all beams"]), (bart, BEAMS["sampled"])],
)
def test_a_run_says_which_row_each_returned_sequence_is(build, options, tmp_path):
    torch.manual_seed(3)
    model, prompt = build().double(), words(2, 7)
    with record(model) as recording:
        output = model.generate(prompt, suppress_tokens=[0, 1, 2], **{**OPTIONS, **options}, forced_eos_token_id=None)
    rows = recording.last.rows
    assert len(rows) == len(output.sequences)
    given = {"decoder_input_ids": output.sequences[:, :-1]} if build is bart else {}
    per = len(output.sequences) // 2
    read = prompt.repeat_interleave(per, 0) if build is bart else output.sequences[:, :-1]
    expected = record_full_forward(model, read, **given)
    for layer in range(3):
        found = recording.map(layer, part=None if build is gpt2 else "decoder").dense()[rows]
        theirs = expected.map(layer, part=None if build is gpt2 else "decoder").dense()
        assert (found - theirs).abs().max() < EQUAL
    recording.save(tmp_path / "written.reg")
    assert load(tmp_path / "written.reg").last.rows == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["beams", "sampled beams"])
@pytest.mark.parametrize("build", [gpt2, bart])
def test_words_of_returned_sequences_are_those_of_their_beams_and_of_no_other(build, name, tmp_path):
    torch.manual_seed(3)
    model, prompt = build().double(), words(2, 7)
    with record(model) as recording:
        output = model.generate(prompt, suppress_tokens=[0, 1, 2], **{**OPTIONS, **BEAMS[name]}, forced_eos_token_id=None)
    rows, (b, _, _, k) = recording.last.rows, recording.map(0, part=None if build is gpt2 else "decoder").shape
    assert len(rows) < b
    read = [[f"word {one}" for one in row[:k].tolist()] for row in output.sequences]
    source = [f"source {n}" for n in range(7)]
    recording.tokens = read if build is gpt2 else {"rows": read, "columns": source}
    recording.save(tmp_path / "beams.reg")
    for one in (recording, load(tmp_path / "beams.reg")):
        _, keys = one.words(0, part=None if build is gpt2 else "decoder")
        for row in range(b):
            of_row = [read[n] for n in range(len(rows)) if rows[n] == row]
            assert keys[row] == (of_row or [[str(n) for n in range(k)]])[0]
        assert len(heads(one, part=None if build is gpt2 else "decoder"))


@pytest.mark.parametrize("early", [True, False])
def test_a_sequence_of_a_beam_that_ended_before_is_missed_and_the_others_are_rows(early):
    model, prompt = gpt2().double(), words(5, 7)
    options = {**OPTIONS, "max_new_tokens": 20, "num_beams": 3, "early_stopping": early, "eos_token_id": ENDS}
    with pytest.warns(UserWarning, match="ended before the last step"), record(model) as recording:
        output = model.generate(prompt, **options)
    rows, count = recording.last.rows, recording.map(0).shape[2]
    assert [row for row in rows if row is not None]
    assert [one.reason.split()[1] for one in recording.missed] == [str(n) for n, row in enumerate(rows) if row is None]
    found = recording.map(1).dense()
    for sequence, row in zip(output.sequences, rows, strict=True):
        expected = record_full_forward(model, sequence[None, :count]).map(1).dense()[0]
        same = [n for n in range(len(found)) if (found[n, :, : len(expected[0])] - expected).abs().max() < EQUAL]
        assert (row in same) if row is not None else not same


def test_rows_that_end_before_others_are_still_rows():
    model, prompt = gpt2().double(), words(5, 7)
    with record(model) as recording:
        output = model.generate(prompt, **{**OPTIONS, "max_new_tokens": 20, "eos_token_id": ENDS})
    assert (output.sequences[:, -1] == 0).any()  # padded
    assert recording.last.rows == list(range(5))
    assert not recording.missed


def test_the_rows_of_two_generations_are_their_own():
    model = gpt2().double()
    with record(model) as recording:
        for prompt in (words(2, 7), words(3, 7)):
            model.generate(prompt, suppress_tokens=[0, 1, 2], **OPTIONS)
    assert [run.rows for run in recording.runs] == [[0, 1], [0, 1, 2]]


def test_words_that_were_guessed_wrongly_are_no_part_of_a_row():
    model, prompt = gpt2().double(), words(1, 7).repeat(1, 2)
    with record(model) as recording:
        model.generate(prompt, prompt_lookup_num_tokens=3, suppress_tokens=[0, 1, 2], **{**OPTIONS, "max_new_tokens": 14})
    assert recording.last.rows == [0]


def test_a_prompt_of_embeddings_is_no_hindrance():
    model, prompt = gpt2().double(), words(2, 7)
    with record(model) as recording:
        model.generate(inputs_embeds=model.transformer.wte(prompt), suppress_tokens=[0, 1, 2], **OPTIONS)
    assert recording.last.rows == [0, 1]


@pytest.mark.parametrize("cache", [dynamic, static])
def test_rows_of_a_prompt_that_was_read_before_record_are_rows(cache):
    model, prompt = gpt2().double(), words(2, 7)
    held = cache(model)
    with torch.no_grad():
        model(prompt[:, :5], **{CACHE: held})
    with record(model) as recording:
        output = model.generate(prompt, **{CACHE: held}, suppress_tokens=[0, 1, 2], disable_compile=True, **OPTIONS)
    expected = record_full_forward(model, output.sequences[:, :-1]).map(1).dense()
    assert recording.last.rows == [0, 1]
    assert not recording.missed
    assert (recording.map(1).dense() - expected[:, :, 5:]).abs().max() < EQUAL
