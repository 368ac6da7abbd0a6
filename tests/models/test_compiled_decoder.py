"""In one call a model says what it says by itself, and gives way wherever somebody would notice that its parts did not run."""

import threading
from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from bounds import assert_within
from generate.small_models import (
    gpt2,
    half_step_of_16_bits,
    half_step_of_bfloat16,
    has_bfloat16_cache,
    rounding_bound,
    rows,
    stack_tokens,
    tokens_are_decided,
)
from regard.compiled import threads
from regard.compiled.kernel_choice import (
    count_least_restored_vectors,
    count_least_vectors_for_tiles,
    count_least_vectors_in_pairs,
)
from regard.generate import Lookup, PrefixCache, quantise
from regard.generate.kv_cache import Cache
from regard.matmul import QuantizedLinear
from regard.matmul.quantized_linear import WEIGHTS
from regard.models import GPT2
from regard.models.compiled_decoder import MOST, CompiledDecoder
from regard.models.gpt2_description import describe_gpt2

pytestmark = pytest.mark.skipif(
    not (threads.can_run_loops() and threads.find_barrier_address()),
    reason="this torch has no OpenMP to call, or numba is not installed",
)
SIZES = {"layers": 2, "heads": 3, "width": 258, "inner": 515, "context": 40, "vocabulary": 307}
MODEL = gpt2(dtype=torch.float32, loud=4.0, **SIZES)
MODELS = {"float32": MODEL, **{to: quantise(MODEL, to) for to in WEIGHTS}}
INTEGERS = (MODELS["int8"], MODELS["int4"])  # whose vectors are rounded to 16 bits, or to bfloat16
NEW = torch.tensor([[5]])


def fill_cache(model, *lengths, room=20) -> Cache:
    """What a model keeps of sequences of these lengths."""
    prompts, cache = rows(*lengths, vocabulary=307), Cache(model.config.layers, room)
    padded = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in prompts])
    with torch.no_grad():
        model(padded, cache)
    cache.crop(torch.tensor(lengths))
    return cache


MANY = (9, 5, 1, 7)  # lengths of prompts, whose logits, keys and values bound those of other prompts


def find_step(model, count):
    """By how much a model rounds so many vectors; None if they are not rounded."""
    if model is MODELS["bfloat16"] and 0 < count_least_vectors_in_pairs() <= count:
        return half_step_of_bfloat16
    if model not in INTEGERS:
        return None
    is_restored = model is MODELS["int4"] and 0 < count_least_restored_vectors() <= count  # vectors by no more than to bfloat16
    return half_step_of_bfloat16 if is_restored else half_step_of_16_bits


@cache
def logit_bound(model, step=None) -> float:
    """How far two computations of its logits may lie apart; step: by how much vectors are rounded."""
    return rounding_bound(model, lambda one: one(NEW.expand(len(MANY), 9), fill_cache(one, *MANY)), step)


@cache
def cache_bound(model, step=None) -> float:
    """The same of the keys and values that it keeps."""

    def read(one):
        return torch.stack([x[:, :, : max(MANY)] for layer in fill_cache(one, *MANY).keys_and_values for x in layer])

    return rounding_bound(model, read, step)


@pytest.mark.slow
@given(
    st.sampled_from(list(MODELS.values())),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([None, 1, "each"]),
    st.sampled_from([1, 2, 3]),
)
def test_it_says_what_the_model_says_and_keeps_the_same(model, lengths, new, wanted, turns):
    new = min(new, MOST[torch.float32 if model is MODEL else torch.int8] // len(lengths))
    step = find_step(model, len(lengths) * new)
    ours, theirs, one = (
        fill_cache(model, *lengths, room=40),
        fill_cache(model, *lengths, room=40),
        CompiledDecoder(model, describe_gpt2),
    )
    for turn in range(turns):
        tokens = torch.tensor(rows(*[new] * len(lengths), vocabulary=307, seed=turn))
        ours.wanted = theirs.wanted = torch.arange(len(lengths)) % new if wanted == "each" else wanted
        with torch.no_grad():
            assert one.can_run(tokens, ours)
            assert_within(one(tokens, ours), model(tokens, theirs), logit_bound(model, step))
    assert torch.equal(torch.as_tensor(ours.lengths), torch.as_tensor(theirs.lengths))
    for mine, other in zip(ours.keys_and_values, theirs.keys_and_values, strict=True):
        for a, b in zip(mine, other, strict=True):
            for row, length in enumerate(lengths):
                stop = length + turns * new
                assert_within(a[row, :, :stop], b[row, :, :stop], cache_bound(model, step))


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 11, 17, 32])
@pytest.mark.parametrize("to", ["bfloat16", "int8", "int4"])
def test_it_is_the_model_where_blocks_of_columns_are_whole(to, count):
    """They fill tiles of bfloat16 (AMX), for which both round their vectors."""
    model = gpt2(dtype=torch.float32, loud=4.0, **SIZES | {"heads": 2, "width": 256, "inner": 320})
    model, tokens = quantise(model, to), torch.tensor(rows(count, vocabulary=307))
    ours, theirs = fill_cache(model, 3, room=40), fill_cache(model, 3, room=40)
    assert model.blocks[0].down.uses_tiles(torch.ones(count, 320)) == (0 < count_least_vectors_for_tiles(WEIGHTS[to]) <= count)
    ours.wanted = theirs.wanted = count  # all
    with torch.no_grad():
        one = CompiledDecoder(model, describe_gpt2)
        assert one.can_run(tokens, ours)
        bound = rounding_bound(model, lambda same: same(tokens, fill_cache(same, 3, room=40)), half_step_of_bfloat16)
        assert_within(one(tokens, ours), model(tokens, theirs), bound)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("count", [1, 2, 7])
def test_it_is_the_same_with_any_number_of_threads(count):
    """The same bits where it is run again with as many; to rounding where torch's own products have other threads too."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        with torch.no_grad():
            found, again = (CompiledDecoder(MODEL, describe_gpt2)(NEW, fill_cache(MODEL, 6)) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, again)
    with torch.no_grad():
        assert_within(found, CompiledDecoder(MODEL, describe_gpt2)(NEW, fill_cache(MODEL, 6)), logit_bound(MODEL))


@pytest.mark.slow
@pytest.mark.emulated
def test_two_threads_of_a_program_read_side_by_side():
    with torch.no_grad():
        expected = CompiledDecoder(MODEL, describe_gpt2)(NEW, fill_cache(MODEL, 6))
    found: list[torch.Tensor] = []

    def reads():
        with torch.no_grad():
            found.extend(CompiledDecoder(MODEL, describe_gpt2)(NEW, fill_cache(MODEL, 6)) for _ in range(20))

    several = [threading.Thread(target=reads) for _ in range(3)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert len(found) == 60
    assert all(torch.equal(one, expected) for one in found)


LENGTHS = {"one": [5], "ragged": [3, 9]}
SHORTER = {"int4": (5, 5), "bfloat16": (2, 3)}  # fewer vectors than are rounded to bfloat16, which leaves few tokens decided
SEEDS = {"float32": (0, 1), "float16": (0, 1), "bfloat16": (15, 14), "int8": (12, 5), "int4": (18, 15)}
PROMPTS = {  # for which no two tokens are nearly as likely with the weights, and a cache of bfloat16, rounded
    (to, kind): rows(*LENGTHS[kind], vocabulary=307, seed=seed)
    for to, seeds in SEEDS.items()
    for kind, seed in zip(LENGTHS, seeds, strict=True)
}


@pytest.mark.slow
@pytest.mark.parametrize(("to", "kind"), PROMPTS)
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0}, {"seed": 3}, {"beams": 2}, {"temperature": 0, "past": "slide"}, {"draft": Lookup(), "temperature": 0}],
    ids=str,
)
def test_a_generation_is_the_same_token_for_token(to, kind, asked, monkeypatch):
    model, prompts = MODELS[to], PROMPTS[to, kind]
    if "draft" in asked and len(prompts) > 1:
        prompts = prompts[:1]
    asked = {**asked, "seed": list(range(1, 1 + len(prompts)))} if "seed" in asked else asked
    if kind == "ragged" and to in SHORTER:
        prompts = [row[:most] for row, most in zip(prompts, SHORTER[to], strict=False)]
    count, rounds_cache = 12, has_bfloat16_cache([block.attention.W_key for block in model.blocks])  # fewer tokens are decided
    if "past" in asked:
        count = 40 if rounds_cache else 60
    elif "seed" in asked and rounds_cache:
        count = 5
    ran = []
    run = CompiledDecoder.run
    monkeypatch.setattr(CompiledDecoder, "run", lambda *given: ran.append(1) or run(*given))
    found = stack_tokens(model.generate(prompts, count, **asked))
    assert ran
    step = find_step(model, len(prompts) * max(map(len, prompts)))
    assert tokens_are_decided(model, lambda one: stack_tokens(one.generate(prompts, count, **asked)), step)
    monkeypatch.setattr(GPT2, "reading", lambda self: self)
    assert torch.equal(found, stack_tokens(model.generate(prompts, count, **asked)))


@pytest.mark.slow
@pytest.mark.emulated
def test_what_follows_an_opening_is_the_same():
    (prefix,), after = rows(7, vocabulary=307), [[], *rows(3, 1, vocabulary=307, seed=1)]
    whole = [prefix + row for row in after]
    found = stack_tokens(MODEL.generate(after, 5, temperature=0, after=PrefixCache.read(MODEL, prefix)))
    assert tokens_are_decided(MODEL, lambda one: stack_tokens(one.generate(whole, 5, temperature=0)))
    assert torch.equal(found, stack_tokens(MODEL.generate(whole, 5, temperature=0)))


class Turned(nn.Module):
    """Another weight in the place of one."""

    def forward(self, weight):
        return -weight


class OtherNorm(nn.LayerNorm):
    """A norm that might be another."""


def copy_with(change):
    model = deepcopy(MODEL)
    change(model)
    return model


def make_matrix(dtype, groups):
    """A matrix of int8 whose scales of groups were replaced by others."""
    matrix = QuantizedLinear(torch.ones(515, 258, dtype=torch.int8), torch.ones(515)).eval()
    matrix.group_scales = torch.ones(515, groups, dtype=dtype)
    return matrix


CHANGES = {
    "a hook": lambda model: model.blocks[1].up.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.norm.register_forward_pre_hook(lambda *_: None),
    "a forward of its own": lambda model: setattr(model.blocks[0].down, "forward", lambda x: x[..., :258]),
    "a parametrisation": lambda model: parametrize.register_parametrization(model.blocks[0].up, "weight", Turned()),
    "another activation": lambda model: setattr(model.blocks[0], "activation", F.relu),
    "another epsilon": lambda model: setattr(model.blocks[0].norm_feed, "eps", 0.1),
    "another last epsilon": lambda model: setattr(model.norm, "eps", 0.1),
    "another norm": lambda model: setattr(model, "norm", OtherNorm(258).eval()),
    "another part": lambda model: setattr(model.blocks[1], "up", nn.Sequential(model.blocks[1].up).eval()),
    "one block more": lambda model: model.blocks.append(model.blocks[0]),
    "dropout": lambda model: model.train(),
    "dropout somewhere": lambda model: model.blocks[0].dropout.train(),
    "float64": lambda model: model.double(),
    "one matrix in bfloat16": lambda model: model.blocks[0].up.bfloat16(),
    "one matrix in float64": lambda model: setattr(model.blocks[0], "up", deepcopy(MODELS["bfloat16"].blocks[0].up).double()),
    "scales in float64": lambda model: setattr(model.blocks[0], "up", deepcopy(MODELS["int8"].blocks[0].up).double()),
    "scales in float32": lambda model: setattr(model.blocks[0], "up", deepcopy(MODELS["int4"].blocks[0].up).float()),
    "too few scales of groups": lambda model: setattr(model.blocks[0], "up", make_matrix(torch.uint8, 8)),
    "scales of groups in float32": lambda model: setattr(model.blocks[0], "up", make_matrix(torch.float32, 16)),
    "a matrix of other sizes": lambda model: setattr(model.blocks[0], "up", MODELS["int4"].blocks[0].down),
    "a table of bounded size": lambda model: setattr(model.positions, "max_norm", 1.0),
    "a weight that is not contiguous": lambda model: setattr(
        model.blocks[0].up, "weight", nn.Parameter(torch.randn(258, 515).T, requires_grad=False)
    ),
    "a norm without a bias": lambda model: setattr(model.norm, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_with_a_part_of_its_own_computes_by_itself(change):
    cache = fill_cache(MODEL, 6)
    with torch.no_grad():
        assert CompiledDecoder(deepcopy(MODEL), describe_gpt2).can_run(NEW, cache)
        assert not CompiledDecoder(copy_with(change), describe_gpt2).can_run(NEW, cache)


@pytest.mark.slow
def test_a_matrix_of_each_kind_may_stand_in_one_model():
    model = deepcopy(MODEL)
    for part, to in zip(("W_query", "W_key", "W_value", "out_proj"), WEIGHTS, strict=True):
        setattr(model.blocks[1].attention, part, getattr(MODELS[to].blocks[1].attention, part))
    cache, same = fill_cache(model, 6), fill_cache(model, 6)
    with torch.no_grad():
        assert CompiledDecoder(model, describe_gpt2).can_run(NEW, cache)
        assert_within(
            CompiledDecoder(model, describe_gpt2)(NEW, cache), model(NEW, same), logit_bound(model, half_step_of_16_bits)
        )


class Seeing(TorchFunctionMode):
    """Looks on."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watching",
    [
        lambda: regard.record(MODEL),
        lambda: regard.intervene(MODEL, regard.KnockOut(0, 0)),
        Seeing,
        lambda: FlopCounterMode(display=False),
        lambda: torch.autocast("cpu"),
        torch.enable_grad,
    ],
    ids=["record", "intervene", "functions", "dispatch", "autocast", "gradients"],
)
def test_it_gives_way_while_somebody_looks_on(watching):
    cache, one = fill_cache(MODEL, 6), CompiledDecoder(MODEL, describe_gpt2)
    with torch.no_grad():
        assert one.can_run(NEW, cache)
        with watching():
            assert not one.can_run(NEW, cache)
            MODEL(NEW, fill_cache(MODEL, 6))  # a change that meets nothing is warned of
        assert one.can_run(NEW, cache)


def test_a_hook_that_comes_while_it_reads_is_called_and_one_that_goes_is_gone():
    model, seen = deepcopy(MODEL), []
    one, cache = CompiledDecoder(model, describe_gpt2), fill_cache(model, 3)
    with torch.no_grad():
        one(NEW, cache)
        hook = model.blocks[0].register_forward_hook(lambda *_: seen.append("a block"))
        one(NEW, cache)
        hook.remove()
        every = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append("any"))
        one(NEW, cache)
        every.remove()
        assert seen.count("a block") == 1
        assert seen.count("any") > 10
        assert one.can_run(NEW, fill_cache(model, 3))  # the model is no longer observed
        assert CompiledDecoder(model, describe_gpt2).can_run(NEW, cache)


def test_weights_that_are_written_to_between_two_tokens_count():
    model = deepcopy(MODEL)
    one, cache, same = CompiledDecoder(model, describe_gpt2), fill_cache(model, 3), fill_cache(model, 3)
    with torch.no_grad():
        before = model(NEW, same)
        assert_within(one(NEW, cache), before, logit_bound(MODEL))
        model.blocks[1].down.weight.mul_(-1)
        assert_within(one(NEW, cache), after := model(NEW, same), logit_bound(model))
        assert (after - before).abs().max() > logit_bound(model)


@pytest.mark.parametrize("token", [-1, 307])
def test_a_token_that_there_is_none_of_is_an_error_and_nothing_is_read(token):
    with torch.no_grad(), pytest.raises(IndexError):
        CompiledDecoder(MODEL, describe_gpt2)(torch.tensor([[token]]), fill_cache(MODEL, 3))


def test_nan_comes_out_where_it_went_in():
    model = deepcopy(MODEL)
    with torch.no_grad():
        cache = fill_cache(model, 6)
        cache.keys_and_values[0][0][0, 1, 2] = torch.nan
        assert CompiledDecoder(model, describe_gpt2).can_run(NEW, cache)
        assert CompiledDecoder(model, describe_gpt2)(NEW, cache).isnan().all()
