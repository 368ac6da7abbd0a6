import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bounds import EXPONENTIAL, assert_within, estimate_rounding
from models.translators import make_translator, pad_sentences, sentences
from regard import ConfigError, ShapeError
from regard.mechanism.positions import sinusoidal
from regard.models.transformer import Transformer

WIDTH, HEADS, LAYERS, INNER, N = 20, 5, 3, 29, 53
KINDS = ["transformer", "transformer, norm first"]
TARGETS = torch.tensor([[5, 2, 7, 3], [5, 9, 9, 1], [5, 1, 2, 8]])


def torchs(model: Transformer) -> nn.Transformer:
    """torch's own model with the same weights, without the norms that it puts after the last block of the paper's form."""
    first = model.sizes["norm"] == "pre"
    asked = {"dim_feedforward": INNER, "dropout": 0.0, "batch_first": True, "norm_first": first}
    ends = [nn.LayerNorm(WIDTH) if first else None for _ in range(2)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, **asked), LAYERS, ends[0], False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **asked), LAYERS, ends[1])
    other = nn.Transformer(WIDTH, HEADS, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    other = other.to(next(model.parameters()).dtype)
    state = {}
    for side, blocks in (("encoder", model.encoder), ("decoder", model.decoder)):
        for n, block in enumerate(blocks):
            state |= rename_to_torch(f"{side}.layers.{n}", block)
        if first:
            norm = getattr(model, f"{side}_norm")
            state |= {f"{side}.norm.{name}": weight for name, weight in norm.state_dict().items()}
    other.load_state_dict(state)
    return other  # in training mode, without dropout: what evaluation skips, it computes


def rename_to_torch(name: str, block: nn.Module) -> dict:
    """The weights of a block by torch's names."""
    parts = ("attention", "cross", "feed") if hasattr(block, "cross") else ("attention", "feed")
    found = {}
    for kind in ("weight", "bias"):
        packed = getattr(block.attention.W_query_key_value, kind)
        found |= {f"{name}.self_attn.in_proj_{kind}": packed}
        found |= {f"{name}.self_attn.out_proj.{kind}": getattr(block.attention.out_proj, kind)}
        if "cross" in parts:
            both = [getattr(one, kind) for one in (block.cross.W_query, block.cross.W_key_value)]
            found |= {f"{name}.multihead_attn.in_proj_{kind}": torch.cat(both)}
            found |= {f"{name}.multihead_attn.out_proj.{kind}": getattr(block.cross.out_proj, kind)}
        found |= {f"{name}.linear1.{kind}": getattr(block.feed.up, kind)}
        found |= {f"{name}.linear2.{kind}": getattr(block.feed.down, kind)}
        norms = [getattr(block, f"around_{part}").norm for part in parts]
        found |= {f"{name}.norm{number}.{kind}": getattr(norm, kind) for number, norm in enumerate(norms, 1)}
    return found


def vectors(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings and positions, which nn.Transformer leaves to others."""
    positions = sinusoidal(tokens.shape[1], WIDTH).to(next(model.parameters()).dtype)
    return model.vocabulary.words.weight[tokens] * WIDTH**0.5 + positions


def theirs(model: Transformer, sources, lengths, targets) -> torch.Tensor:
    """The logits by nn.Transformer; its masks say True where nothing may be seen."""
    hidden = torch.arange(sources.shape[1]) >= lengths.unsqueeze(1)
    future = torch.ones(targets.shape[1], targets.shape[1], dtype=torch.bool).triu(1)
    found = torchs(model)(
        vectors(model, sources),
        vectors(model, targets),
        tgt_mask=future,
        src_key_padding_mask=hidden,
        memory_key_padding_mask=hidden,
    )
    return found @ model.vocabulary.words.weight.T


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [(7, 2, 5), (6, 6, 6)])
def test_the_logits_and_the_gradients_are_those_of_torchs_transformer(norm, dtype, lengths):
    torch.manual_seed(1)
    model = Transformer(vocabulary=N, width=WIDTH, heads=HEADS, layers=LAYERS, inner=INNER, norm=norm).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)  # so that none is what it began as
    source = pad_sentences(sentences(*lengths))
    ours, other = (logits_and_slope(model, compute, *source) for compute in (Transformer.__call__, theirs))
    exact = copy.deepcopy(model).double()
    for n in range(2):
        rounding = estimate_rounding(
            exact, lambda one, n=n: logits_and_slope(one, Transformer.__call__, *source)[n], max(INNER, N) + EXPONENTIAL
        )
        assert_within(ours[n], other[n], rounding if dtype == torch.float32 else 1e-12)


def logits_and_slope(model: Transformer, compute: Callable[..., torch.Tensor], *source: torch.Tensor) -> list[torch.Tensor]:
    """The logits, and the gradient that their mean square gives the embedding."""
    logits = compute(model, *source, TARGETS)
    return [logits.detach(), torch.autograd.grad(logits.square().mean(), model.vocabulary.words.weight)[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_at_a_time_gives_the_logits_of_all_at_once(kind):
    model, source = make_translator(kind), pad_sentences(sentences(7, 2, 5))
    state, logits = model.begin(model.encode(*source)), []
    for column in TARGETS.T:
        found, state = model.read(column, state)
        logits.append(found)
    torch.testing.assert_close(torch.stack(logits, 1), model(*source, TARGETS))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_what_comes_later_change_nothing(kind):
    model, rows = make_translator(kind), sentences(7, 2, 5)
    found = model(*pad_sentences(rows), TARGETS)
    torch.testing.assert_close(found, model(*pad_sentences(rows, filler=11), TARGETS), atol=1e-12, rtol=0)
    torch.testing.assert_close(found[:, :2], model(*pad_sentences(rows), TARGETS[:, :2]))
    for row, source in enumerate(rows):
        torch.testing.assert_close(found[row], model(*pad_sentences([source]), TARGETS[row : row + 1])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_state_go_on_as_those_rows(kind):
    model, source, index = make_translator(kind), pad_sentences(sentences(7, 2, 5)), torch.tensor([2, 2, 0, 1])
    state = model.begin(model.encode(*source))
    torch.testing.assert_close(
        model.read(TARGETS[index, 0], state.select_rows(index))[0], model.read(TARGETS[:, 0], state)[0][index]
    )
    state = model.read(TARGETS[:, 0], state)[1]
    expected = model.read(TARGETS[:, 1], state)[0]
    torch.testing.assert_close(model.read(TARGETS[index, 1], state.select_rows(index))[0], expected[index])
    torch.testing.assert_close(model.read(TARGETS[:, 1], state)[0], expected)  # the state is a value


def test_matrices_begin_with_glorots_bounds_each_of_q_k_and_v_for_itself():
    torch.manual_seed(0)
    model = Transformer(vocabulary=N, width=64, heads=4, layers=1, inner=128)
    for weight, rows in (
        (model.encoder[0].attention.W_query_key_value.weight, 64),
        (model.decoder[0].cross.W_key_value.weight, 64),
        (model.decoder[0].feed.up.weight, 128),
    ):
        bound = (6 / (64 + rows)) ** 0.5
        assert 0.98 * bound < weight.abs().max() <= bound  # of 8,192 numbers or more all are below once in 1e71


def test_more_tokens_than_the_context_are_refused():
    model = Transformer(vocabulary=N, width=WIDTH, heads=HEADS, layers=1, context=5).eval()
    ones = torch.ones(1, 6, dtype=torch.int64)
    with pytest.raises(ShapeError, match="sources have 6 tokens, but the model's context is 5"):
        model.encode(ones, [6])
    with pytest.raises(ShapeError, match="targets have 6 tokens, but the model's context is 5"):
        model(ones[:, :3], [3], ones)
    state = model.begin(model.encode(ones[:, :3], [3]))
    for _ in range(5):
        _, state = model.read(ones[:, 0], state)
    with pytest.raises(ShapeError, match="5 tokens are read and 1 more follow"):
        model.read(ones[:, 0], state)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"norm": "last"}, "norm must be .* got 'last'"),
        ({"heads": 3}, "width must be a multiple of heads, got width=20, heads=3. Nearest valid width: 21"),
        ({"width": 15, "heads": 5}, "width must be even"),
        ({"layers": 0}, "layers must be a whole number of at least 1"),
        ({"dropout": -0.1}, "dropout must be a probability"),
    ],
)
def test_impossible_sizes_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Transformer(**{"vocabulary": N, "width": WIDTH, "heads": HEADS, **wrong})


@pytest.mark.parametrize("kind", KINDS)
def test_its_sizes_make_it_again(kind):
    model = make_translator(kind, dtype=torch.float32, tied=False)
    again = type(model)(**model.sizes)
    again.load_state_dict(model.state_dict())
    source = pad_sentences(sentences(7, 2, 5))
    assert torch.equal(again.eval()(*source, TARGETS), model(*source, TARGETS))
    assert again.sizes == model.sizes
