import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2LMHeadModel

import regard
from bounds import EXPONENTIAL, assert_within, estimate_rounding
from models import sorter
from regard import MultiHeadAttention, ShapeError
from regard.errors import OutOfRangeError, WeightsError
from regard.mechanism import heads
from regard.models import GPT2, GPT2Config
from regard.text import Letters
from run_limits import limit_examples
from weights import checkpoint_formats

SMALL = GPT2Config(layers=2, heads=3, width=15, context=17, vocabulary=53)
OFTEN = settings(max_examples=limit_examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
SLOWLY = settings(max_examples=limit_examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def configs(draw) -> dict:
    """Settings of transformers, odd sizes among them."""
    count = draw(st.sampled_from([1, 2, 3, 5]))
    width = count * draw(st.sampled_from([1, 3, 7, 8]))
    return {
        "n_layer": draw(st.integers(1, 4)),
        "n_head": count,
        "n_embd": width,
        "n_inner": draw(st.sampled_from([None, 1, 29])),
        "vocab_size": draw(st.sampled_from([5, 53, 211])),
        "n_positions": draw(st.sampled_from([13, 31])),
        "activation_function": draw(st.sampled_from(["gelu_new", "gelu", "relu", "silu", "gelu_fast", "gelu_pytorch_tanh"])),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "reorder_and_upcast_attn": draw(st.booleans()),
    }


def tokens(*shape: int, below: int = checkpoint_formats.WORDS) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def load_from_transformers(model: GPT2LMHeadModel, path, dtype: torch.dtype | None = None) -> GPT2:
    return GPT2.load(checkpoint_formats.folder(model, path), dtype)


@OFTEN
@given(config=configs(), t=st.integers(1, 13), seed=st.integers(0, 99))
def test_logits_are_those_of_transformers(tmp_path, config, t, seed):
    """In float64 at any width; in float32 from 5 on. A norm of two or three numbers divides by their spread, which may
    be next to nothing: transformers' own float32 is then as far from its float64 as ours is, in either direction."""
    theirs = checkpoint_formats.make_small_gpt2(seed, **config)
    x = tokens(3, t, below=config["vocab_size"])
    with torch.no_grad():
        ours, exact = (load_from_transformers(theirs, tmp_path, dtype) for dtype in (torch.float32, torch.float64))
        if config["n_embd"] >= 5:
            terms = max(4 * config["n_embd"], config["n_inner"] or 0) + EXPONENTIAL
            assert_within(ours(x), theirs(x).logits, estimate_rounding(exact, lambda model: model(x), terms))
        torch.testing.assert_close(exact(x), theirs.double()(x).logits, atol=1e-10, rtol=1e-10)


@OFTEN
@given(lengths=st.lists(st.integers(1, 11), min_size=2, max_size=4), left=st.booleans())
def test_each_text_alone_is_what_transformers_computes_of_it_padded_on_either_side(tmp_path, lengths, left):
    theirs = checkpoint_formats.make_small_gpt2().double()
    model, most = load_from_transformers(theirs, tmp_path), max(lengths)
    texts = [tokens(n + 1)[:n] for n in lengths]
    padded, seen = torch.zeros(len(texts), most, dtype=torch.long), torch.zeros(len(texts), most, dtype=torch.long)
    places = [slice(most - n, most) if left else slice(0, n) for n in lengths]
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        padded[row, place], seen[row, place] = text, 1
    with torch.no_grad():
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        expected = theirs(padded, attention_mask=seen, position_ids=positions).logits
        for row, (text, place) in enumerate(zip(texts, places, strict=True)):
            torch.testing.assert_close(model(text), expected[row, place], atol=1e-10, rtol=0)


@SLOWLY
@given(config=configs())
def test_a_model_goes_to_transformers_and_back_to_the_bit(tmp_path, config):
    model = load_from_transformers(checkpoint_formats.make_small_gpt2(**config), tmp_path / "theirs")
    model.save(tmp_path / "ours")
    theirs, missed = GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(missed.values())
    theirs.save_pretrained(tmp_path / "again")
    again = GPT2.load(tmp_path / "again")
    assert again.config == model.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_the_released_sizes_have_their_parameters(size, parameters):
    config = getattr(GPT2Config, size)()
    with torch.device("meta"):
        model = GPT2(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters == parameters


def test_a_token_hears_nothing_of_those_after_it():
    model, x = GPT2(SMALL).double().eval(), tokens(2, 11)
    other = x.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 53
    assert torch.equal(model(x)[:, :7], model(other)[:, :7])
    assert not torch.equal(model(x)[:, 7], model(other)[:, 7])


def test_dropout_is_in_its_three_places_and_only_in_training():
    torch.manual_seed(0)
    model, x = GPT2(GPT2Config(2, 3, 15, 17, 53, dropout=0.4)), tokens(2, 7)
    assert {type(one).__name__ for one in model.modules() if isinstance(one, torch.nn.Dropout)} == {"Dropout"}
    places = {"dropout", *(f"blocks.{n}.{name}" for n in range(2) for name in ("dropout", "attention.dropout"))}
    assert {name for name, one in model.named_modules() if isinstance(one, torch.nn.Dropout) and one.p == 0.4} == places
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(2, 18, dtype=torch.long), "there are 18 tokens, but the model's context is 17"),
        (torch.zeros(2, 3), "whole numbers"),
        (torch.zeros(2, 3, dtype=torch.bool), "whole numbers"),
        (torch.zeros(2, 3, 4, dtype=torch.long), "whole numbers"),
    ],
)
def test_tokens_that_cannot_be_are_refused(x, sentence):
    with pytest.raises(ShapeError, match=sentence):
        GPT2(SMALL)(x)


def test_recording_sees_every_layer_and_its_maps_are_its_weights(tmp_path):
    model, x = load_from_transformers(checkpoint_formats.make_small_gpt2().double(), tmp_path), tokens(2, 11)
    with regard.record(model) as recording:
        model(x)
    stream = model.tokens(x) + model.positions.weight[:11]
    for number, block in enumerate(model.blocks):
        steps = block.attention.steps(block.norm_attention(stream))
        torch.testing.assert_close(recording.map(number).dense(), steps.weights.detach(), atol=1e-12, rtol=0)
        stream = block(stream)


@pytest.mark.parametrize(
    ("write", "activation"),
    [
        (checkpoint_formats.tensorflow, "gelu_new"),
        (checkpoint_formats.lectures, "gelu_new"),
        (checkpoint_formats.nanogpt, "gelu"),
    ],
)
def test_what_others_write_computes_what_they_compute(tmp_path, write, activation):
    theirs, x = checkpoint_formats.make_small_gpt2(activation_function=activation), tokens(3, 11)
    model = GPT2.load(write(theirs, tmp_path), torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs.double()(x).logits, atol=1e-10, rtol=0)


@pytest.fixture
def letter_sorter(tmp_path) -> tuple[GPT2, dict[str, Tensor]]:
    if not sorter.FOLDER.is_dir():
        pytest.skip(sorter.MISSING)
    model = GPT2.load(sorter.write(tmp_path))
    return model, sorter.tensors("gpt-nano-sort-t0-partials.json")[1]


def every_step(model: GPT2, idx: Tensor) -> dict[str, Tensor]:
    """What minGPT computes on its way from tokens to probabilities, by its names."""
    block, seen = model.blocks[0], {}

    def keep(name: str):
        return lambda module, given, output: seen.setdefault(name, output)

    modules = {
        "tok_emb": model.tokens,
        "x": model.dropout,
        "ln1": block.norm_attention,
        "yProj": block.attention.out_proj,
        "ln2": block.norm_feed,
        "fc": block.up,
        "mlp": block.down,
        **{f"block{n}": one for n, one in enumerate(model.blocks)},
        "ln_f": model.norm,
    }
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    hooks.append(block.down.register_forward_pre_hook(lambda module, given: seen.update(gelu=given[0])))
    with regard.record(model) as recording:
        seen["lm_head"] = model(idx.long())
    for hook in hooks:
        hook.remove()

    assert isinstance(block.attention, MultiHeadAttention)
    q, k, v = block.attention.project(seen["ln1"])
    steps = block.attention.steps(seen["ln1"])
    seen |= {"q": q, "k": k, "v": v, "qkv": torch.cat([heads.join(part) for part in (q, k, v)], -1)}
    seen |= {"pos_emb": model.positions.weight[None].clone(), "idx": idx}
    seen |= {"att": steps.masked, "attSm": recording.map(0).dense(), "y": heads.join(steps.context)}
    return seen | {"attnResid": seen["x"] + seen["yProj"], "mlpResid": seen["block0"], "probs": seen["lm_head"].softmax(-1)}


@pytest.mark.slow
@torch.no_grad()
def test_each_step_of_the_sorters_run_is_reproduced(letter_sorter):
    model, run = letter_sorter
    exact, terms = model.double(), model.config.inner + EXPONENTIAL
    seen = every_step(exact, run["idx"])
    assert sorted(seen) == sorted(run)
    for name, expected in run.items():

        def step(model, name=name):
            return every_step(model, run["idx"])[name].nan_to_num(neginf=0)  # what is hidden is -inf in both

        assert_within(seen[name], expected, estimate_rounding(exact, step, terms), name)


@torch.no_grad()
def test_the_sorter_sorts(letter_sorter):
    model, _ = letter_sorter
    for word in ("CBABBC", "AAAAAA", "CCBBAA", "ABCABC"):
        row = ["ABC".index(letter) for letter in word]
        for _ in word:
            row.append(int(model(torch.tensor(row))[-1].argmax()))
        assert "".join("ABC"[n] for n in row[6:]) == "".join(sorted(word))


def test_a_save_that_fails_at_the_vocabulary_leaves_the_former_model_and_its_vocabulary(tmp_path, monkeypatch):
    sizes, written = GPT2Config(layers=1, heads=2, width=6, context=5, vocabulary=3), []
    model, other = GPT2(sizes), GPT2(sizes)
    model.text, other.text = Letters("ABC"), Letters("XYZ")
    model.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fill_disk(handle):
        written.append(handle)
        if len(written) > 2:  # the weights and the config had room
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("regard.atomic_write.os.fsync", fill_disk)
    with pytest.raises(WeightsError, match="No space left"):
        other.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("wrong", [-1, 53])
def test_a_token_that_the_model_does_not_have_is_named(wrong):
    with pytest.raises(OutOfRangeError, match=f"token {wrong} is out of range: the model has tokens 0 to 52"):
        GPT2(SMALL)(torch.tensor([[0, 52, wrong]]))
