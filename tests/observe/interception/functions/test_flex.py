"""The door of flex_attention: every block mask and change of scores that a map has a form for, whoever holds the function."""

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from observe.recording_checks import assert_map, compute_weights, record_and_compare
from regard import AttentionMap, Causal, Everything, Given, KnockOut, Window, intervene
from regard.mechanism import Mask
from regard.observe import record
from regard.observe.interception.functions.flex_mods import OTHER_BLOCKS

B, H, G, T, D = 2, 4, 2, 128, 16

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # which inductor brings
]
QKV = torch.randn(B, H, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D)
ROW, COLUMN = torch.arange(T)[:, None], torch.arange(T)
IDS = torch.arange(T) // 37
LENGTHS = torch.tensor([T, 77])
SLOPES = 2.0 ** -torch.arange(1, H + 1)
TABLE = torch.randn(H, 2 * T)


class Flex(nn.Module):
    def __init__(self, function=flex_attention, **settings) -> None:
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v, **self.settings)


class ByName(Flex):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, **self.settings)


def rule(m: AttentionMap) -> Mask:
    return m.planes.request.mask


def blocks(function, b=None, h=None) -> BlockMask:
    return create_block_mask(function, b, h, T, T, device="cpu")


MASKS = {
    "all": (lambda b, h, i, j: i >= 0, torch.ones(T, T).bool(), Everything()),
    "causal": (lambda b, h, i, j: i >= j, ROW >= COLUMN, Causal()),
    "window": (lambda b, h, i, j: (i >= j) & (i - j <= 13), (ROW >= COLUMN) & (ROW - COLUMN <= 13), Causal() & Window(13)),
    "documents": (lambda b, h, i, j: (IDS[i] == IDS[j]) & (i >= j), (IDS[:, None] == IDS) & (ROW >= COLUMN), None),
    "padding": (lambda b, h, i, j: j < LENGTHS[b], (LENGTHS.view(-1, 1, 1, 1) > COLUMN), None),
    "heads": (lambda b, h, i, j: (j + h) % 2 == 0, (COLUMN + torch.arange(H).view(-1, 1, 1)) % 2 == 0, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_is_its_rule(name):
    function, seen, expected = MASKS[name]
    block_mask = blocks(function, B if name == "padding" else None, H if name == "heads" else None)
    recording, _ = record_and_compare(Flex(block_mask=block_mask), lambda m: m(*QKV))
    assert_map(recording.map(0), compute_weights(*QKV[:2], seen), *QKV[:2])
    assert expected is None or rule(recording.map(0)) == expected


def cap(s, b, h, i, j):
    return 3 * torch.tanh(s / 3)


CHANGES = {
    "nothing": (lambda s, b, h, i, j: s, None, None),
    "softcap": (cap, 3.0, None),
    "alibi": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), None, SLOPES.view(-1, 1, 1) * (COLUMN - ROW)),
    "relative": (lambda s, b, h, i, j: s + TABLE[h, i - j + T], None, TABLE[:, (ROW - COLUMN + T)]),
    "of the batch": (lambda s, b, h, i, j: s + b * 0.3 * (j % 3), None, torch.arange(B).view(-1, 1, 1, 1) * 0.3 * (COLUMN % 3)),
    "both": (lambda s, b, h, i, j: cap(s, b, h, i, j) + SLOPES[h] * (j - i), 3.0, SLOPES.view(-1, 1, 1) * (COLUMN - ROW)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_change_of_scores_is_a_softcap_and_a_bias(name, masked):
    change, softcap, bias = CHANGES[name]
    model = Flex(score_mod=change, block_mask=blocks(MASKS["causal"][0]) if masked else None)
    recording, _ = record_and_compare(model, lambda m: m(*QKV))
    q, k, _ = (x.double() for x in QKV)
    scores = q @ k.mT / D**0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    rounded = scores.abs() * (softcap is not None) + (0 if bias is None else bias.abs())  # once more, as a bias is
    scores = scores if bias is None else scores + bias
    expected = scores.masked_fill(~(ROW >= COLUMN), -torch.inf) if masked else scores
    assert_map(recording.map(0), expected.softmax(-1), *QKV[:2], bias=rounded)
    assert rule(recording.map(0)) == (Causal() if masked else Everything())
    if bias is not None:
        assert recording.map(0).planes.request.bias.shape[:2] == bias[(None,) * (4 - bias.dim())].shape[:2]


@pytest.mark.slow
@pytest.mark.parametrize("is_capped", [False, True])
def test_a_bias_of_a_float64_model_keeps_all_its_digits(is_capped):
    table = torch.randn(H, 2 * T, dtype=torch.float64)

    def change(s, b, h, i, j):
        return (cap(s, b, h, i, j) if is_capped else s) + table[h, i - j + T]

    q, k, v = (x.double() for x in QKV)
    recording, _ = record_and_compare(Flex(score_mod=change), lambda m: m(q, k, v))
    request = recording.map(0).planes.request
    assert torch.equal(request.bias, table[:, ROW - COLUMN + T].unsqueeze(0))
    assert request.softcap == (pytest.approx(3, rel=1e-14) if is_capped else None)


class Shifting(nn.Module):
    """Two layers of one change of scores, between which the tensor that it reads is written to."""

    def __init__(self, reading) -> None:
        super().__init__()
        self.first, self.second, self.reading = Flex(), Flex(), reading

    def forward(self, q: Tensor, k: Tensor, v: Tensor):
        slopes = torch.arange(1.0, H + 1)
        self.first.settings = self.second.settings = {"score_mod": self.reading(slopes)}
        first = self.first(q, k, v)
        slopes.mul_(-1)
        return first, self.second(q, k, v)


class Slopes:
    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes

    def change(self, s, b, h, i, j):
        return s + self.slopes[h] * (j - i)


def in_a_closure(slopes):
    return lambda s, b, h, i, j: s + slopes[h] * (j - i)


def in_a_closure_of_a_closure(slopes):
    inner = in_a_closure(slopes)
    return lambda s, b, h, i, j: inner(s, b, h, i, j)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("reading", [in_a_closure, in_a_closure_of_a_closure, lambda slopes: Slopes(slopes).change])
def test_what_a_change_of_scores_reads_may_be_written_to_between_layers(reading, mode):
    q, k, v = (x.double() for x in QKV)
    with mode():
        recording, _ = record_and_compare(Shifting(reading), lambda m: m(q, k, v))
    bias = torch.arange(1.0, H + 1).view(-1, 1, 1) * (COLUMN - ROW)
    for layer, sign in enumerate((1, -1)):
        assert_map(recording.map(layer), compute_weights(q, k, bias=sign * bias), q, k, bias=bias.abs())


@pytest.mark.slow
def test_a_mask_said_as_a_change_of_scores_is_a_rule():
    model = Flex(score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))
    recording, _ = record_and_compare(model, lambda m: m(*QKV))
    assert rule(recording.map(0)) == Causal()
    assert_map(recording.map(0), compute_weights(*QKV[:2], ROW >= COLUMN), *QKV[:2])


@pytest.mark.parametrize(
    "change",
    [
        lambda s, b, h, i, j: s * (1 + j % 2),
        lambda s, b, h, i, j: s.square(),
        lambda s, b, h, i, j: torch.where((i == 70) & (j == 3), 2 * s, s),
        lambda s, b, h, i, j: s.clamp(min=0.5),
    ],
)
def test_another_change_of_scores_is_missed_with_the_reason(change):
    recording, _ = record_and_compare(nn.Sequential(Handed(Flex(score_mod=change))), lambda m: m(QKV), missing=True)
    assert "score_mod does more than" in recording.missed[0].reason
    assert recording.missed[0].module == "0.flex"
    assert not recording.calls


class Handed(nn.Module):
    def __init__(self, flex: nn.Module) -> None:
        super().__init__()
        self.flex = flex

    def forward(self, qkv: tuple[Tensor, ...]) -> Tensor:
        return self.flex(*qkv)


def list_blocks(function, is_full=False):
    """A block mask that lists the two blocks on its diagonal."""
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    lists = (torch.zeros_like(counts), indices, counts, indices) if is_full else (counts, indices)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=T // 2, mask_mod=function)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "is_full"),
    [(None, False), (MASKS["causal"][0], False), (lambda b, h, i, j: (i // 64 == j // 64) & (i != j), True)],
)
def test_a_block_mask_that_lists_other_blocks_than_its_function_allows_is_missed(function, is_full):
    model = Flex(block_mask=list_blocks(function, is_full))
    recording, _ = record_and_compare(model, lambda m: m(*QKV), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [OTHER_BLOCKS]


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True])
def test_a_block_mask_that_lists_the_blocks_that_its_function_allows_is_its_rule(is_full):
    model = Flex(block_mask=list_blocks(lambda b, h, i, j: i // 64 == j // 64, is_full))
    recording, _ = record_and_compare(model, lambda m: m(*QKV))
    assert_map(recording.map(0), compute_weights(*QKV[:2], ROW // 64 == COLUMN // 64), *QKV[:2])


@pytest.mark.slow
def test_a_compiled_kernel_goes_by_the_blocks_that_are_listed():
    compiled = torch.compile(flex_attention)(*QKV, block_mask=list_blocks(None))
    expected = compute_weights(*QKV[:2], ROW // 64 == COLUMN // 64) @ QKV[2].double()
    torch.testing.assert_close(compiled.double(), expected, rtol=0, atol=1e-5)


def test_a_function_that_cannot_be_tried_is_missed_and_the_error_is_the_models_own():
    def change(s, b, h, i, j):
        raise ValueError("no")

    model = Flex(score_mod=change)
    with pytest.raises(Exception, match="no"), record(model) as recording:
        model(*QKV)
    assert not recording.calls


@pytest.mark.slow
def test_a_stated_scale_grouped_heads_and_other_arguments():
    q, k, v = QKV[0], QKV[1][:, :G].clone(), QKV[2][:, :G, :, :7].clone()
    model = Flex(scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True))
    recording, _ = record_and_compare(model, lambda m: m(q, k, v)[0])
    assert_map(recording.map(0), compute_weights(q, k, scale=0.3), q, k, scale=0.3)
    assert recording.map(0).shape == (B, H, T, T)


@pytest.mark.slow
def test_lengths_that_are_no_multiple_of_a_block():
    q, k, v = QKV[0][:, :, :29], QKV[1][:, :, :71], QKV[2][:, :, :71]
    block_mask = create_block_mask(lambda b, h, i, j: j <= i + 42, None, None, 29, 71, device="cpu")
    recording, _ = record_and_compare(Flex(block_mask=block_mask), lambda m: m(q, k, v))
    assert_map(recording.map(0), compute_weights(q, k, torch.ones(29, 71).tril(42).bool()), q, k)


HOLDERS = {
    "an attribute": lambda f: Flex(f),
    "a name": lambda f: ByName(),
    "a partial": lambda f: Flex(functools.partial(f)),
    "a table": lambda f: Flex({"flex": f}["flex"]),
    "a closure": lambda f: Flex(lambda *args, **kwargs: f(*args, **kwargs)),
    "its module": lambda f: Flex(lambda *args, **kwargs: module.flex_attention(*args, **kwargs)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_the_function(holder):
    recording, _ = record_and_compare(HOLDERS[holder](flex_attention), lambda m: m(*QKV))
    assert_map(recording.map(0), compute_weights(*QKV[:2]), *QKV[:2])


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["an attribute", "a partial", "a closure"])
def test_compiled_it_is_the_same_to_the_bit_and_its_cache_holds_nothing_of_ours(holder):
    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters
    compiled = torch.compile(flex_attention)
    model = HOLDERS[holder](compiled)
    model.settings = {"block_mask": blocks(MASKS["window"][0]), "score_mod": cap}
    model(*QKV)
    counter.clear()
    recording, _ = record_and_compare(model, lambda m: m(*QKV))
    assert counter["frames"]["total"] == 0  # nothing was compiled anew
    scores = 3 * torch.tanh(QKV[0].double() @ QKV[1].double().mT / D**0.5 / 3)
    weights = scores.masked_fill(~MASKS["window"][1], -torch.inf).softmax(-1)
    assert_map(recording.map(0), weights, *QKV[:2], bias=scores)


@pytest.mark.slow
def test_compiled_for_the_first_time_inside_the_block_and_used_after_it():
    torch._dynamo.reset()
    model = Flex()
    with record(model) as recording:
        model.function = torch.compile(flex_attention)
        inside = model(*QKV)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model(*QKV), inside)
    assert torch._dynamo.utils.counters["frames"]["total"] == 0
    assert_map(recording.map(0), compute_weights(*QKV[:2]), *QKV[:2])


def test_a_copy_and_a_pickle_made_inside_the_block_hold_nothing_of_ours():
    model = Flex()
    with record(model), intervene(model, KnockOut(0, 1)):
        model(*QKV)
        other, bytes_ = copy.deepcopy(model), pickle.dumps(model)
    assert other.function is flex_attention
    assert pickle.loads(bytes_).function is flex_attention
    assert model.function is flex_attention


def test_what_changes_attention_reaches_every_name():
    for model in (Flex(), ByName()):
        plain = model(*QKV)
        with record(model) as recording, intervene(model, KnockOut(0, 1)):
            out = model(*QKV)
        assert out[:, 1].eq(0).all()
        assert torch.equal(out[:, [0, 2, 3]], plain[:, [0, 2, 3]])
        assert len(recording.calls) == 1


@pytest.mark.slow
def test_given_tables_are_stored_once_for_what_they_are_alike_for():
    recording, _ = record_and_compare(Flex(block_mask=blocks(MASKS["padding"][0], B, H)), lambda m: m(*QKV))
    assert isinstance(rule(recording.map(0)), Given)
    assert rule(recording.map(0)).given.shape == (B, 1, 1, T)
