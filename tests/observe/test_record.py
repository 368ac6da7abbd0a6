import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import StaticCache

import regard
from bounds import assert_within, attention_bounds, bounds_from_scores, gamma, sum_bound
from observe.eager_weights import are_equal, run
from observe.families import FAMILIES
from observe.family import T
from observe.models import CACHE, gpt2
from observe.recording_checks import EQUAL
from regard import ConfigError, compare, load, observe
from regard.generate.kv_cache import Cache
from regard.models import GPT2, GPT2Config
from regard.observe import record
from regard.observe.record import Recorder


def make_model_and_inputs(name, side="none", dtype=torch.float32, **settings):
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(dtype, **settings)
    return model, family.feed(model, side)


# what is kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bart", "vit", "t5"])
@pytest.mark.parametrize("keep", [None, ("values", "residual")])
def test_a_recording_is_freed_with_its_last_name(name, keep):
    model, given = make_model_and_inputs(name)
    gc.collect()
    gc.disable()
    try:
        with record(model, keep=keep) as recording:
            model(**given)
        freed = weakref.ref(recording)
        del recording
        assert freed() is None
    finally:
        gc.enable()


class ByHand(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


EMPTY_INPUTS = [torch.zeros(1, 0, 6), torch.zeros(0, 5, 6)]
ATTENDING = {
    "own": lambda: regard.MultiHeadAttention(6, 6, 13, 0.0, 2),
    "torch": lambda: nn.TransformerEncoderLayer(6, 2, 7, 0.0, batch_first=True).eval(),
    "by hand": ByHand,
}


@pytest.mark.parametrize("empty", EMPTY_INPUTS, ids=["tokens", "rows"])
@pytest.mark.parametrize("name", ATTENDING)
def test_a_call_without_tokens_is_left_out_with_a_note(tmp_path, name, empty):
    model = ATTENDING[name]()
    with record(model, keep="values") as recording, torch.no_grad():
        for x in (torch.randn(1, 5, 6), empty, torch.randn(1, 7, 6)):
            model(x)
    assert [call.map.shape[2:] for call in recording.calls] == [(5, 5), (7, 7)]
    assert not recording.missed
    assert [note.partition(": ")[2] for note in recording.notes] == [
        "a call without queries or keys, which has no weights, is left out"
    ]
    recording.save(tmp_path / "a.reg")
    assert torch.equal(load(tmp_path / "a.reg").map(0).dense(), recording.map(0).dense())
    with record(model) as nothing:
        model(empty)
    with pytest.raises(ConfigError, match=r"nothing was recorded\. .*a call without queries or keys"):
        nothing.map(0)


@pytest.mark.parametrize("copy_recording", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_a_recording_is_equal_and_has_no_graph(copy_recording):
    model = GPT2(GPT2Config(layers=2, heads=3, width=33, context=31, vocabulary=53)).eval()
    with record(model, keep=("values", "residual")) as recording:
        model(torch.arange(7)[None])
    copied = copy_recording(recording)
    assert torch.equal(copied.map(1).dense(), recording.map(1).dense())
    assert torch.equal(copied.values(1), recording.values(1))
    assert all(call.stored.graph is None for call in copied.calls)
    assert recording.map(1, grad=True) is not None
    with torch.no_grad():
        recording.calls[0].stored.graph.q.mul_(2)
    with pytest.raises(ConfigError, match="changed in place"):
        copy_recording(recording)


def test_a_context_is_entered_once_in_any_thread():
    model, failures = ByHand(), []

    def enter():
        try:
            with context:
                pass
        except ConfigError as error:
            failures.append(str(error))

    for name, context in (("record", record(model)), ("intervene", regard.intervene(model))):
        with context:
            enter()
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        enter()
        assert failures == [f"this {name}(...) was entered before: call {name} again for each with."] * 3
        failures.clear()


@torch.no_grad()
def test_a_recording_in_parts_is_that_of_one_context_and_what_runs_between_them_is_not_in_it():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=33, context=31, vocabulary=53)).double().eval()
    prompt, between, rest = torch.arange(5)[None], torch.arange(20, 27)[None], torch.arange(7, 20)[None]
    recorder, kept = Recorder(model, keep="values"), Cache(2, 31)
    with recorder.resume():
        model(prompt, kept)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(between, kept)
    kept.crop(5)
    with recorder.resume():
        model(rest, kept)
    recorder.finish()
    with record(model, keep="values") as expected:
        model(torch.cat([prompt, rest], 1))
    (run,) = recorder.recording.runs
    for layer in range(2):
        assert run.map(layer).shape == expected.map(layer).shape
        assert torch.allclose(run.map(layer).dense(), expected.map(layer).dense(), rtol=0, atol=1e-12)
        assert torch.allclose(run.values(layer), expected.values(layer), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Call", "Recording", "Run"])
def test_a_pickle_of_an_earlier_version_names_classes_that_are_still_there(name):
    assert pickle.loads(f"cregard.observe.recording\n{name}\n.".encode()) is getattr(observe, name)


def test_a_recording_of_a_generation_is_freed_with_its_last_name():
    model = gpt2()
    gc.collect()
    gc.disable()
    try:
        with record(model) as recording:
            model.generate(torch.randint(3, 50, (2, 4)), max_new_tokens=3, num_beams=2, do_sample=False)
        freed = weakref.ref(recording)
        del recording
        assert freed() is None
    finally:
        gc.enable()


def test_layers_are_chosen_by_number_and_by_path():
    model, given = make_model_and_inputs("llama")
    with record(model, layers=[0, "layers.2"]) as recording:
        model(**given)
    assert recording.names == ["layers.0.self_attn", "layers.2.self_attn"]
    with record(model, layers=1) as recording:
        model(**given)
    assert recording.names == ["layers.1.self_attn"]


def test_a_number_chooses_that_layer_of_the_encoder_of_the_decoder_and_of_its_cross_attention():
    model, given = make_model_and_inputs("bart")
    with record(model, layers=[1]) as recording:
        model(**given)
    chosen = ["encoder.layers.1.self_attn", "decoder.layers.1.self_attn", "decoder.layers.1.encoder_attn"]
    assert recording.names == chosen


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
@pytest.mark.parametrize("layers", [[-1], [-2, 0], [-9]])
def test_numbers_below_0_choose_the_layers_that_map_counts_from_the_end(name, layers):
    model, given = make_model_and_inputs(name)
    _, whole = run(model, given, recorded=True)
    with torch.no_grad(), record(model, layers=layers) as recording:
        model(**given)
    names = [whole.layers(kind, part) for kind in ("self", "cross", "implicit") for part in whole.last.parts or [None]]
    expected = {each[n] for each in names for n in layers if -len(each) <= n < len(each)}
    assert set(recording.names) == expected
    assert [call.name for call in recording.calls] == [call.name for call in whole.calls if call.name in expected]


def test_the_last_layer_of_a_generation_is_that_of_the_whole(tmp_path):
    model = gpt2()
    ids, maps = torch.randint(3, 50, (2, 4), generator=torch.Generator().manual_seed(0)), []
    for layers in (None, [-1]):
        with record(model, layers=layers) as recording:
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        maps.append(recording.map(-1).dense())
    assert torch.equal(*maps)
    assert len({call.name for call in recording.calls}) == 1
    recording.save(tmp_path / "last.reg")
    assert torch.equal(load(tmp_path / "last.reg").map(0).dense(), maps[0])


def test_requested_attentions_are_all_there_whatever_is_stored():
    model, given = make_model_and_inputs("llama")
    with torch.no_grad(), record(model, layers=[1]) as recording:
        output = model(**given, output_attentions=True)
    assert len(recording.calls) == 1
    assert len(output.attentions) == 3
    _, whole = run(model, given, recorded=True)
    for layer in range(3):
        assert torch.equal(output.attentions[layer].dense(), whole.map(layer).dense())


@pytest.mark.parametrize(("name", "heads"), [("gpt2", [3]), ("llama", [2, 0]), ("t5", [2, 0]), ("gpt_oss", [3])])
@pytest.mark.usefixtures("float64_models")
def test_chosen_heads_are_those_of_the_whole(name, heads):
    model, given = make_model_and_inputs(name, dtype=torch.float64)
    _, whole = run(model, given, recorded=True)
    with torch.no_grad(), record(model, heads=heads) as recording:
        model(**given)
    for layer in range(len(whole.layers())):
        assert (recording.map(layer).dense() - whole.map(layer).dense()[:, heads]).abs().max() < EQUAL
        for head in heads:
            assert torch.equal(recording.map(layer, head)[0, 0, -1], recording.map(layer)[0, heads.index(head), -1])


@pytest.mark.slow
def test_chosen_heads_keep_their_numbers_in_tables_and_files(tmp_path):
    model, given = make_model_and_inputs("llama")
    with torch.no_grad(), record(model, heads=[3, -3]) as recording:
        model(**given)
    recording.save(tmp_path / "two.reg")
    for one in (recording, load(tmp_path / "two.reg")):
        assert one.heads(0) == (3, 1)
        assert {row.head for row in regard.heads(one)} == {3, 1}
        assert {row.head for row in compare(one, recording).heads} == {3, 1}
        with pytest.raises(ConfigError, match="head must be one of the recorded heads, 3, 1; got 0"):
            one.map(0, 0)


REFUSED = {  # what is recorded of a model, and what is said
    "what is no module": (lambda model: record(lambda x: x), r"torch\.nn\.Module, got function"),
    "an unknown keep": (lambda model: record(model, keep="float8"), "float8"),
    "a path of no module": (
        lambda model: record(model, layers="layers.9.self_attn"),
        r"layers\.9\.self_attn.*layers\.0\.self_attn",
    ),
    "a layer that is no number": (lambda model: record(model, layers=[0.5]), "a layer must be a whole number or the path.*0.5"),
    "a head that is not there": (lambda model: record(model, heads=[1, 4]), "head 4 is out of range: the heads are 0 to 3"),
    "a head twice": (lambda model: record(model, heads=[2, 2]), r"heads names head 2 twice: \[.*\] of 4 heads"),
    "a head twice, from the end": (lambda model: record(model, heads=[3, -1]), r"heads names head 3 twice: \[.*\] of 4 heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_what_there_is(name):
    (model, given), (begin, says) = make_model_and_inputs("llama"), REFUSED[name]
    with pytest.raises(ConfigError, match=says), begin(model):
        model(**given)


def test_a_layer_that_did_not_run_is_no_model_that_was_not_called():
    model, given = make_model_and_inputs("llama")
    with record(model, layers=[5]) as recording:
        model(**given)
    with pytest.raises(ConfigError, match="or no layer of it that record was to keep computed attention"):
        recording.map(0)


def test_half_of_the_bytes_are_stored_in_bfloat16_and_give_nearly_the_same():
    model, given = make_model_and_inputs("llama")
    _, whole = run(model, given, recorded=True)
    with torch.no_grad(), record(model, keep="bfloat16") as recording:
        model(**given)
    assert recording.map(1).planes.request.q.dtype == torch.bfloat16
    assert recording.map(1).nbytes * 2 == whole.map(1).nbytes
    assert_within(recording.map(1).dense(), whole.map(1).dense(), rounding(whole.map(1), torch.bfloat16, operands=2))


def rounding(m, dtype, operands=0, scores=0):
    """How far a map's weights may lie from those of q, k and scores that were rounded to a dtype: so many operands or times."""
    asked, wide = m.planes.request, torch.promote_types(dtype, torch.float32)
    q, k = asked.q.double(), asked.k.double().repeat_interleave(asked.q.shape[1] // asked.k.shape[1], 1)
    added = 0 if asked.bias is None else asked.bias.double().abs()
    off = (gamma(wide, q.shape[-1] + 4) + gamma(dtype, operands)) * (asked.scale * (q.abs() @ k.abs().mT) + added)
    off = off + gamma(dtype, scores) * (asked.scale * (q @ k.mT).abs() + added)
    return bounds_from_scores(wide, off, m.dense(), k).weights


@pytest.mark.usefixtures("float64_models")
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "bart"])
def test_values_that_are_stored_make_the_context(name):
    model, given = make_model_and_inputs(name, dtype=torch.float64)
    contexts = {}
    for path, module in model.named_modules():
        if hasattr(module, "o_proj") or hasattr(module, "out_proj"):
            last = getattr(module, "o_proj", None) or module.out_proj
            last.register_forward_pre_hook(lambda _, args, path=path: contexts.setdefault(path, args[0]))
    with torch.no_grad(), record(model, keep="values") as recording:
        model(**given)
    for kind in ("self", "cross"):
        for layer, path in enumerate(recording.layers(kind)):
            values = recording.values(layer, kind)
            context = (recording.map(layer, kind=kind) @ values).transpose(1, 2).flatten(2)
            assert (context - contexts[path]).abs().max() < EQUAL


def test_values_of_a_generation_stand_beside_its_keys():
    model, given = make_model_and_inputs("llama")
    ids = given["input_ids"]
    with torch.no_grad(), record(model, keep="values") as recording:
        cache = model(ids[:, :5], use_cache=True).past_key_values
        for token in range(5, T):
            model(ids[:, token : token + 1], **{CACHE: cache})
    assert torch.equal(recording.values(1), cache.layers[1].values)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.usefixtures("float64_models")
def test_values_beside_a_cache_with_room_are_those_of_its_keys(begun):
    model, given = make_model_and_inputs("llama", dtype=torch.float64)
    ids, cache = given["input_ids"], StaticCache(config=model.config, max_cache_len=29)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        if begun:
            model(ids[:, :3], **{CACHE: cache})
        with record(model, keep="values") as recording:
            for first, last in ((3 if begun else 0, 5), *((n, n + 1) for n in range(5, T))):
                model(ids[:, first:last], attention_mask=mask[:, :last], **{CACHE: cache})
    assert torch.equal(recording.values(1), cache.layers[1].values[:, :, :T])
    assert recording.map(1).shape[3] == recording.values(1).shape[2]


def test_what_is_stored_is_detached():
    model, given = make_model_and_inputs("llama")
    with record(model, keep="values") as recording:
        model(**given)
    kept = [x for one in recording.last.histories.values() for x in (*one.keys, one.stored_calls[0].q, one.stored_calls[0].v)]
    assert not any(x.requires_grad or x.grad_fn is not None for x in kept)


@pytest.mark.slow
def test_what_ran_is_let_go_when_the_forward_ends():
    model, given = make_model_and_inputs("gpt2")
    made_inside = []
    model.h[1].attn.register_forward_pre_hook(lambda _, args: made_inside.append(weakref.ref(args[0])))
    with torch.no_grad(), record(model):
        model(**given)
        gc.collect()
        assert made_inside[0]() is None


# training


class Head(nn.Module):
    """A loss over a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, given):
        return self.model(**given).last_hidden_state.square().mean()


def step(model, given, recorded):
    """The loss and the gradients of a step of training, from the same random numbers."""
    model.zero_grad()
    torch.manual_seed(11)
    recording = None
    if recorded:
        with record(model) as recording:
            loss = model(given)
            loss.backward()
    else:
        loss = model(given)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], recording


ROUNDINGS = 6  # of a score in eager attention: the product, its scale, a softcap's division, tanh and product, the mask
DROPOUT = {
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "llama": {"attention_dropout": 0.3},
    "bert": {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.1},
    "bart": {"attention_dropout": 0.3, "dropout": 0.1},
    "t5": {"dropout_rate": 0.2},
}


@pytest.mark.parametrize(
    ("name", "implementation", "reentrant"),
    [(name, ("sdpa", "eager")[(n + m) % 2], (None, True, False)[m]) for n, name in enumerate(DROPOUT) for m in range(3)],
)
def test_a_step_of_training_is_the_same_to_the_bit(name, implementation, reentrant):
    inner, given = make_model_and_inputs(name, attn_implementation=implementation, **DROPOUT[name])
    model = Head(inner).train()
    if reentrant is not None:
        inner.activation_checkpointing_enable({"use_reentrant": reentrant})
    outside, _ = step(model, given, recorded=False)
    inside, recording = step(model, given, recorded=True)
    assert are_equal(outside, inside)
    assert len(outside) > 10
    assert len(recording.runs) == 1
    assert not recording.missed
    assert len(recording.calls) == len({call.name for call in recording.calls})


# half precision, and modes of torch


def test_under_autocast_the_map_is_of_what_the_kernel_saw():
    model, given = make_model_and_inputs("llama")  # its positions turn q and k to float32 again
    handed = []
    former = F.scaled_dot_product_attention

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is former:
                handed.append([x.to(torch.bfloat16) for x in args[:2]])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outside = model(**given)
        with Noting():
            model(**given)
        with record(model) as recording:
            inside = model(**given)
    assert are_equal(outside, inside)
    for layer, (q, k) in enumerate(handed):
        assert torch.equal(recording.map(layer).planes.request.q, q)
        assert torch.equal(recording.map(layer).planes.request.k, k)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
        ("llama", torch.float64),
        ("gemma2", torch.float16),
        ("t5", torch.bfloat16),
    ],
)
def test_a_model_of_any_dtype_is_recorded_in_it(name, dtype):
    model, given = make_model_and_inputs(name, dtype=dtype)
    outside, _ = run(model, given)
    inside, recording = run(model, given, recorded=True)
    assert are_equal(outside, inside)
    assert recording.map(0).planes.request.q.dtype == dtype
    assert recording.map(0).dense().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    other, _ = make_model_and_inputs(name, dtype=dtype, attn_implementation="eager")
    told, _ = run(other, given, output_attentions=True)
    weights = (getattr(told, "decoder_attentions", None) or told.attentions)[0]
    takes = torch.float32 if dtype == torch.float64 else dtype  # the softmax of eager attention is in float32 at most
    allowed = rounding(recording.map(0), takes, scores=ROUNDINGS) + sum_bound(takes, 1, weights.double())
    assert_within(weights, recording.map(0).dense(), allowed)


def test_inference_mode_is_no_matter():
    model, given = make_model_and_inputs("mistral", "left")
    with torch.inference_mode():
        outside = model(**given)
        with record(model) as recording:
            inside = model(**given)
    assert are_equal(outside, inside)
    _, expected = run(model, given, recorded=True)
    kept = [x for one in recording.last.histories.values() for x in (*one.keys, one.stored_calls[0].q)]
    assert not any(x.is_inference() for x in kept)
    assert torch.equal(recording.map(1).dense(), expected.map(1).dense())


# modules that run more than once


@pytest.mark.usefixtures("float64_models")
def test_a_shared_layer_is_counted_by_its_visits():
    model, given = make_model_and_inputs("albert", dtype=torch.float64)
    other, _ = make_model_and_inputs("albert", dtype=torch.float64, attn_implementation="eager")
    told, _ = run(other, given, output_attentions=True)
    _, recording = run(model, given, recorded=True)
    assert len(recording.names) == 1
    assert len(recording.layers()) == 3
    for layer in range(3):
        assert (recording.map(layer).dense() - told.attentions[layer]).abs().max() < EQUAL
    with pytest.raises(ConfigError, match="ran 3 times"):
        recording.map(recording.names[0])


@pytest.mark.usefixtures("float64_models")
def test_packed_pictures_are_one_map_of_blocks():
    model, given = make_model_and_inputs("qwen2_vl", dtype=torch.float64)
    sizes = given["image_grid_thw"].prod(1).tolist()
    _, recording = run(model, given, recorded=True)
    assert len(recording.layers(part="visual")) == 2
    for layer, name in enumerate(recording.layers(part="visual")):
        found = recording.map(layer, part="visual").dense()
        assert len(recording[name]) == len(sizes)
        assert torch.equal(recording.map(name).dense(), found)
        blocks = [call.map.dense()[0] for call in recording[name]]
        expected = torch.stack([torch.block_diag(*heads) for heads in zip(*blocks, strict=True)])
        assert (found[0] - expected).abs().max() < EQUAL


# several at once


# what is asked of record itself


def test_a_folder_holds_what_is_stored_and_is_read_from_there(tmp_path):
    model, given = make_model_and_inputs("llama")
    given = {"input_ids": given["input_ids"].repeat(1, 60)}
    _, expected = run(model, given, recorded=True)
    with torch.no_grad(), record(model, to=tmp_path / "kept") as recording:
        model(**given)
    assert len(list((tmp_path / "kept").iterdir())) == 6
    ours, theirs = (one.map(2).planes.request for one in (recording, expected))
    assert torch.equal(ours.q, theirs.q)
    assert torch.equal(ours.k, theirs.k)
    row = expected.map(2)[:1, :1, -1:]  # of a product that may round by where in memory they lie
    bounds = attention_bounds(torch.float32, theirs.q[:1, :1, -1:], theirs.k[:1, :1], theirs.k[:1, :1], row)
    assert_within(recording.map(2)[:1, :1, -1:], row, bounds.weights)


class SummedInALoop(nn.Module):
    """Attention whose weighted values are added up in a loop over keys that leaves out the last one."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        return sum(weights[..., j, None] * v[:, None, j] for j in range(v.shape[1] - 1))


def test_what_was_missed_is_warned_of_once():
    both, x = nn.Sequential(SummedInALoop(), SummedInALoop()), torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match=r"mul and add.*and 1 more") as told, record(both) as recording:
        both(both(x))
    assert len(told) == 1
    assert [one.module for one in recording.missed] == ["0", "1"]


def test_steps_of_rows_with_keys_at_places_of_their_own_are_missed_rather_than_joined_wrongly():
    model = GPT2(GPT2Config(layers=1, heads=2, width=16, context=32, vocabulary=19)).eval()
    with pytest.warns(UserWarning, match="record row by row"), record(model) as recording:
        list(model.generate([[3, 1, 2], [5, 4, 3, 2, 1, 6]], 3, temperature=0))
    assert recording.missed[0].module == "blocks.0.attention"
    assert len(recording.calls) == 1
