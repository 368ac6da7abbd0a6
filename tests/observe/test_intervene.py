import pytest
import torch
from torch import nn
from transformers import EncoderDecoderCache, GPTNeoConfig, GPTNeoForCausalLM, StaticCache

from observe.models import CACHE, WINDOW, WORDS, bart, gpt2, llama, mistral, words
from observe.recording_checks import EQUAL
from regard import Causal, ConfigError, Given
from regard.models.recurrent import RecurrentTranslator
from regard.observe import Recording, record
from regard.observe.attention_changes import CutEdges, KnockOut, Temperature
from regard.observe.intervene import intervene
from regard.observe.patch import Patch

pytestmark = pytest.mark.usefixtures("in_float64", "float64_models")
KEPT = {"rtol": 0, "atol": 1e-9}  # of logits, in float64


def logits(model, tokens, **more):
    with torch.no_grad():
        return model(tokens, **more).logits


@pytest.mark.parametrize(("make", "heads"), [(gpt2, 2), (llama, [1, 5])])  # whose heads share keys
def test_a_head_knocked_out_is_its_slice_of_the_output_projection_set_to_zero(make, heads):
    model, tokens = make(), words(2, 13)
    before = logits(model, tokens)
    with intervene(model, KnockOut(1, heads)):
        knocked = logits(model, tokens)
    output = model.transformer.h[1].attn.c_proj if make is gpt2 else model.model.layers[1].self_attn.o_proj
    weight = output.weight if make is gpt2 else output.weight.T
    with torch.no_grad():
        for head in [heads] if make is gpt2 else heads:
            weight[head * 8 : head * 8 + 8] = 0  # heads of width 8
    torch.testing.assert_close(knocked, logits(model, tokens), **KEPT)
    assert not torch.allclose(knocked, before, **KEPT)


def test_cut_edges_are_an_explicit_mask():
    model, tokens = gpt2(), words(2, 17)
    table = Causal().table(17, 17).clone()
    table[5:9, 2:4] = False
    with intervene(model, CutEdges(slice(5, 9), [2, 3])), record(model) as recording:
        cut = logits(model, tokens)
    torch.testing.assert_close(cut, logits(model, tokens, attention_mask=table.expand(2, 1, 17, 17)), **KEPT)
    for layer in range(3):
        assert not recording.map(layer).dense()[:, :, 5:9, 2:4].any()


def test_edges_cut_in_one_head_leave_the_others_as_they_were():
    model, tokens = gpt2(), words(1, 11)
    with record(model) as before:
        logits(model, tokens)
    with intervene(model, CutEdges(10, 4, layer=0, head=3)), record(model) as after:
        logits(model, tokens)
    torch.testing.assert_close(before.map(0).dense()[:, :3], after.map(0).dense()[:, :3], rtol=0, atol=EQUAL)
    assert after.map(0)[0, 3, 10, 4] == 0
    assert after.map(0)[0, 3, 10].sum() == pytest.approx(1, rel=0, abs=EQUAL)


@pytest.mark.parametrize("hiding", [-1e9, torch.finfo(torch.float64).min])
def test_a_query_without_its_only_key_does_not_look_at_those_that_a_finite_number_hides(hiding):
    """The softmax of what is left would spread its weight over the keys that the model hides."""

    class Own(torch.nn.Module):
        def forward(self, x, mask):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)

    model, x, seen = Own(), torch.randn(2, 3, 5, 4).double(), torch.ones(2, 1, 5, 5).bool().tril()
    seen[1, :, 3] = False  # a query that sees nothing, whose weights the softmax spreads over all keys
    added = torch.zeros(seen.shape).double().masked_fill(~seen, hiding)
    before = model(x, added)
    with intervene(model, CutEdges(slice(0, 3), 0)), record(model) as recording:
        found = model(x, added)
    cut = seen.clone()
    cut[:, :, :3, 0] = False
    expected = model(x, cut)
    assert not expected[:, :, 0].any()
    torch.testing.assert_close(found[:, :, :3], expected[:, :, :3], **KEPT)
    torch.testing.assert_close(found[:, :, 3:], before[:, :, 3:], **KEPT)
    assert not recording.map(0)[:, :, 0].any()


def run_in_steps(model, tokens, prompt):
    """The logits from the last token of the prompt on, of one forward for the prompt and one for each later token."""
    step = model(tokens[:, :prompt], use_cache=True)
    found = [step.logits[:, -1:]]
    for t in range(prompt, tokens.shape[1]):
        step = model(tokens[:, t : t + 1], **{CACHE: step[CACHE]}, use_cache=True)
        found.append(step.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("make", "queries", "keys"), [(llama, None, [0]), (mistral, None, [8]), (mistral, 10, [9]), (mistral, [9, 11], slice(7, 9))]
)
def test_edges_are_cut_by_position_also_where_a_cache_holds_the_last_keys_only(make, queries, keys):
    model, tokens = make(), words(1, 14)
    with torch.no_grad(), intervene(model, CutEdges(queries, keys)):
        torch.testing.assert_close(run_in_steps(model, tokens, 10), logits(model, tokens)[:, 9:], **KEPT)


@pytest.mark.parametrize(("make", "queries"), [(llama, None), (mistral, 3), (mistral, [9, 12]), (mistral, 11)])
def test_a_residual_stream_is_patched_by_position_also_where_a_cache_holds_the_last_keys_only(make, queries):
    model, tokens, others = make(), words(1, 14), words(2, 14)[1:]
    with torch.no_grad(), record(model, keep="residual") as source:
        model(others)
    with torch.no_grad(), intervene(model, Patch(recording=source, layer=1, of="residual", queries=queries)):
        torch.testing.assert_close(run_in_steps(model, tokens, 10), logits(model, tokens)[:, 9:], **KEPT)


@pytest.mark.parametrize("is_nested", [False, True])
def test_weights_that_a_model_returns_are_the_changed_ones(is_nested):
    model, tokens, changes = llama(), words(2, 9), (CutEdges([5, 7], [2, 3], layer=1), Temperature(1, 2, 3.0))
    model.set_attn_implementation("eager")
    with record(model) as recording, intervene(model, *changes):
        logits(model, tokens)
    outer, inner = (changes[:1], changes[1:]) if is_nested else ((), changes)
    with intervene(model, *outer), intervene(model, *inner):
        found = model(tokens, output_attentions=True).attentions
    for layer, weights in enumerate(found):
        assert (weights - recording.map(layer).dense()).abs().max() < 1e-6  # its own softmax is in float32
    assert not found[1][:, :, [5, 5, 7, 7], [2, 3, 2, 3]].any()
    assert found[1].requires_grad


@pytest.mark.parametrize("is_nested", [False, True])
def test_weights_that_are_dropped_in_training_are_returned_as_the_changed_ones_that_the_context_has(is_nested):
    model, tokens = llama().double().train(), words(2, 9)
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    hidden = torch.full((9, 9), torch.finfo(torch.float64).min).triu(1).double()
    hidden[[5, 5, 7, 7], [2, 3, 2, 3]] = torch.finfo(torch.float64).min

    def run(**given):
        torch.manual_seed(3)
        output = model(tokens, output_attentions=True, use_cache=False, **given)
        return *output.attentions, output.logits, torch.rand(3)

    expected, plain = run(attention_mask=hidden.expand(2, 1, -1, -1)), run()
    cuts = CutEdges(5, [2, 3]), CutEdges(7, [2, 3])
    outer, inner = (cuts[:1], cuts[1:]) if is_nested else ((), cuts)
    with intervene(model, *outer), intervene(model, *inner):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-5  # its own softmax is in float32
    assert (found[0] - plain[0]).abs().max() > 0.01
    assert (found[0] == 0).float().mean() > 0.6  # half of the visible ones were dropped


@pytest.mark.parametrize(("head", "queries", "is_training"), [(None, None, True), ([1, 2], [3, 6], False)])
def test_weights_that_were_patched_are_returned_as_the_context_has_them(head, queries, is_training):
    model, tokens, others = llama(), words(2, 9), words(3, 9)[1:]
    model.set_attn_implementation("eager")
    with record(model) as source:
        model(others)
    plain = model(tokens, output_attentions=True).attentions[1]
    contexts = []
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda _, given, __: contexts.append(given[0]))
    values = []
    model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _, __, made: values.append(made))
    model.train(is_training)
    with intervene(model, Patch(source, layer=1, head=head, queries=queries)):
        found = model(tokens, output_attentions=True).attentions[1]
    chosen = torch.zeros(found.shape[1], 9, 1, dtype=torch.bool)
    heads = range(found.shape[1]) if head is None else head
    chosen[torch.tensor(heads)[:, None], slice(None) if queries is None else queries] = True
    assert torch.allclose(found, torch.where(chosen, source.map(1).dense(), plain), atol=1e-6)
    v = values[0].unflatten(-1, (-1, 8)).transpose(1, 2)
    context = found @ v.repeat_interleave(found.shape[1] // v.shape[1], 1)
    assert torch.allclose(context.transpose(1, 2).flatten(2), contexts[0], atol=1e-5)
    assert (found - plain).abs().max() > 0.01


class Memory(nn.Module):
    """Attention to all tokens and to learned memory before or behind them, or of the first token alone."""

    def __init__(self, attend, join, queries):
        super().__init__()
        self.project, self.keys, self.values = nn.Linear(8, 24), *(nn.Parameter(torch.randn(1, 2, 2, 4)) for _ in range(2))
        self.attend, self.join, self.queries = attend, join, queries

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.join is not None:
            pairs = ((k, self.keys), (v, self.values))
            k, v = (torch.cat([one, own.expand(len(x), -1, -1, -1)][:: self.join], 2) for one, own in pairs)
        return self.attend(q[:, :, : self.queries], k, v).transpose(1, 2).flatten(2)


def attend_by_hand(q, k, v):
    return (q @ k.mT / 2).softmax(-1) @ v


@pytest.mark.parametrize("attend", [nn.functional.scaled_dot_product_attention, attend_by_hand])
@pytest.mark.parametrize(("join", "queries", "row"), [(1, 7, 3), (-1, 7, 3), (None, 1, 0)], ids=["behind", "before", "first"])
def test_positions_are_those_of_the_map_where_more_keys_than_queries_are_no_cache(attend, join, queries, row):
    model, x = nn.Sequential(Memory(attend, join, queries)).double(), torch.randn(3, 7, 8)
    with record(model) as plain:
        model(x)
    with intervene(model, CutEdges(row, [1, 5])), record(model) as recording:
        model(x)
    expected = plain.map(0).dense().clone()
    expected[:, :, row, [1, 5]] = 0
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(recording.map(0).dense(), expected, **KEPT)


class Slots(Memory):
    """Causal attention whose keys and values are written into slots that are passed to it."""

    def forward(self, x, keys, values, past):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = past + x.shape[1]
        keys[:, :, past:seen], values[:, :, past:seen] = k, v
        mask = torch.arange(keys.shape[2]) <= torch.arange(past, seen).unsqueeze(-1)
        return self.attend(q, keys, values, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("sizes", [[4, 3], [4, 1, 1, 1], [1] * 7], ids=str)
def test_positions_are_those_of_tokens_where_slots_are_passed_as_tensors(sizes):
    model, x = Slots(nn.functional.scaled_dot_product_attention, None, 7).double(), torch.randn(3, 7, 8)

    def run(parts):
        slots, past, found = torch.zeros(2, 3, 2, 9, 4), 0, []
        for part in parts:
            found.append(model(part, *slots, past))
            past += part.shape[1]
        return torch.cat(found, 1)

    with torch.no_grad(), intervene(model, CutEdges([3, 5, 6], [1, 4])):
        torch.testing.assert_close(run(x.split(sizes, 1)), run([x]), **KEPT)
    with torch.no_grad(), record(model) as recording, intervene(model, CutEdges([3, 5, 6], [1, 4])):
        run([x])
    assert not recording.map(0)[:, :, [3, 5, 6]][..., [1, 4]].any()


def test_a_cut_key_that_has_left_a_sliding_window_changes_nothing():
    model, tokens = mistral(), words(1, 11)
    with torch.no_grad():
        plain = run_in_steps(model, tokens, 10)
        with intervene(model, CutEdges(queries=10, keys=slice(0, 11 - WINDOW))):
            torch.testing.assert_close(run_in_steps(model, tokens, 10), plain, **KEPT)
        with intervene(model, CutEdges(queries=10, keys=[11 - WINDOW])):
            assert not torch.allclose(run_in_steps(model, tokens, 10), plain, **KEPT)


def test_a_temperature_divides_the_scores_of_its_head_alone():
    model, tokens = gpt2(), words(2, 13)
    with record(model) as before:
        logits(model, tokens)
    with intervene(model, Temperature(0, 1, 2.5)), record(model) as after:
        logits(model, tokens)
    cooler = (before.map(0, 1).dense().log() / 2.5).softmax(-1)
    torch.testing.assert_close(after.map(0, 1).dense(), cooler, rtol=0, atol=EQUAL)
    torch.testing.assert_close(after.map(0, 2).dense(), before.map(0, 2).dense(), rtol=0, atol=EQUAL)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_in_another_dtype_than_the_values_are_changed(dtype):
    """GPT-Neo has its queries and keys in float32, whatever its values are in."""
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global"], 2]]}
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(GPTNeoConfig(initializer_range=0.3, **sizes)).to(dtype).eval()
    layer, contexts = model.transformer.h[1].attn.attention, []
    layer.out_proj.register_forward_pre_hook(lambda module, args: contexts.append(args[0]))
    with intervene(model, Temperature("transformer.h.1.attn.attention", 2, t=4.0)):
        logits(model, words(2, 9))
    split = torch.tensor([1.0, 1.0, 0.25, 1.0], dtype=dtype).repeat_interleave(8)
    handle = layer.q_proj.register_forward_hook(lambda module, args, output: output * split)
    logits(model, words(2, 9))
    handle.remove()
    found, expected = contexts
    assert found.dtype == dtype
    error = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # of the weights, which are float32 at most
    assert (found - expected).abs().max() <= error * expected.abs().max()


def test_weights_patched_in_from_a_recording_of_the_same_prompt_change_nothing():
    model, tokens = llama(), words(2, 13)
    with record(model) as recording:
        before = logits(model, tokens)
    with intervene(model, Patch(recording)):
        torch.testing.assert_close(logits(model, tokens), before, **KEPT)


def test_weights_of_another_prompt_meet_this_prompts_values():
    model, tokens = gpt2(), words(2, 13)
    with record(model) as other:
        logits(model, tokens.flip(1))
    with record(model, keep="values") as own:
        logits(model, tokens)
    kept = {}
    block = model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda module, args: kept.update(x=args[0]))
    with intervene(model, Patch(other, layer=0, head=2)):
        logits(model, tokens)
    block.remove()
    expected = other.map(0, 2).dense() @ own.values(0)[:, 2:3]
    torch.testing.assert_close(kept["x"].view(2, 13, 4, 8)[:, :, 2], expected[:, 0], **KEPT)


def test_cross_attention_is_changed_by_its_kind():
    model, source, target = bart(), words(2, 11), words(2, 5)
    with intervene(model, CutEdges(keys=[3], kind="cross")), record(model) as recording:
        model(source, decoder_input_ids=target)
    assert not recording.map(2, kind="cross").dense()[..., 3].any()
    assert recording.map(2, kind="self").dense()[:, :, 4, 3].all()
    assert recording.map(1, part="encoder").dense()[..., 3].all()


@pytest.mark.parametrize(("queries", "static"), [(3, True), ([1, 4], False), (slice(2, 4), True)])
def test_edges_of_cross_attention_are_cut_by_position_while_a_cache_grows(queries, static):
    model, tokens, written = bart(), words(2, 9), words(2, 6)
    caches = [StaticCache(model.config, max_cache_len=n) for n in (8, 9)]
    cache = EncoderDecoderCache(*caches) if static else None
    with intervene(model, CutEdges(queries, [1, 2], kind="cross", head=[0, 3])), torch.no_grad():
        encoded = model.get_encoder()(tokens)
        expected = model(encoder_outputs=encoded, decoder_input_ids=written).logits
        found = []
        for part in (written[:, :2], *written[:, 2:].split(1, 1)):
            step = model(encoder_outputs=encoded, decoder_input_ids=part, use_cache=True, **{CACHE: cache})
            cache = getattr(step, CACHE)
            found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, **KEPT)


def test_positions_of_the_steps_of_a_decoder_are_refused():
    translator = RecurrentTranslator("additive", vocabulary=50, width=8, hidden=8)
    with pytest.raises(ConfigError, match="the position of a step is not known"):
        cut_and_translate(translator, CutEdges(queries=1, keys=0, kind="cross"))
    cut_and_translate(translator, CutEdges(keys=0, kind="cross"))


def cut_and_translate(translator, change):
    with intervene(translator, change):
        return translator(torch.tensor([[9, 14, 21, 3]]), [4], torch.tensor([[3, 30, 41]]))


def test_gradients_flow_through_what_was_changed():
    model, tokens = gpt2(), words(1, 7)
    with intervene(model, Temperature(1, None, 3.0), KnockOut(0, 1)):
        model(tokens).logits.sum().backward()
    gradient = model.transformer.h[0].attn.c_proj.weight.grad
    assert not gradient[8:16].any()
    assert gradient[:8].any()
    assert model.transformer.h[1].attn.c_attn.weight.grad.any()


def test_nothing_is_left_behind_by_an_exception_either():
    model, tokens = gpt2(), words(1, 7)
    before = logits(model, tokens)
    with pytest.raises(AttributeError), intervene(model, KnockOut()):
        model(tokens, **{CACHE: "no cache"})
    assert torch.equal(logits(model, tokens), before)


def test_a_change_that_matches_no_call_gives_a_warning():
    model = gpt2()
    with (
        pytest.warns(UserWarning, match="KnockOut of layer 9 was not applied: no self attention"),
        intervene(model, KnockOut(9)),
    ):
        logits(model, words(1, 5))


class TalkingHeads(nn.Module):
    """Attention of two heads that are mixed after the softmax."""

    def __init__(self):
        super().__init__()
        self.project, self.mixing = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        weights = torch.einsum("bhqk,gh->bgqk", (q @ k.mT).softmax(-1), self.mixing)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_the_warning_says_that_attention_without_a_softmax_stays_unchanged():
    model, x = nn.Sequential(TalkingHeads()), torch.randn(2, 7, 8)
    expected = model(x)
    told = pytest.warns(UserWarning, match=r"0: its weights are no softmax over the keys \(.*\), and stay unchanged")
    with told, intervene(model, KnockOut(layer=0, head=1)):
        assert torch.equal(model(x), expected)


def test_an_error_of_a_later_forward_says_which_one_it_is():
    model = bart()
    given = {"input_ids": words(1, 7), "decoder_input_ids": words(1, 3)}
    with intervene(model, KnockOut(0)), torch.no_grad():
        encoded = model.get_encoder()(given["input_ids"])
        with pytest.raises(ConfigError, match=r"layer 0 is both .*encoder.* This is forward 2 in the block"):
            model(encoder_outputs=encoded, decoder_input_ids=given["decoder_input_ids"])
    with intervene(model, KnockOut(0)), pytest.raises(ConfigError, match=r"pass the path of one[^:]*$"):
        model(**given)


def test_torchs_encoder_layers_are_changed_on_their_fast_path_too():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval().requires_grad_(False)
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 16)
    with intervene(model, CutEdges(keys=2)):
        cut = model(x)
    hidden = torch.zeros(7, 7, dtype=torch.bool)
    hidden[:, 2] = True
    torch.testing.assert_close(cut, model(x, mask=hidden), **KEPT)


def test_a_rule_given_by_the_model_is_combined_with_the_cut():
    model, tokens = gpt2(), words(2, 9)
    seen = torch.ones_like(tokens)
    seen[0, :3] = 0
    with intervene(model, CutEdges(8, 5)), record(model) as recording:
        model(tokens, attention_mask=seen)
    expected = Causal().table(9, 9) & Given(seen.bool()[:, None, None]).table(9, 9)
    expected = expected.clone()
    expected[..., 8, 5] = False
    assert torch.equal(recording.map(0).dense()[:, 0] > 0, expected[:, 0])


def record_values(model, tokens):
    with torch.no_grad(), record(model, keep="values") as recording:
        found = model(tokens).logits
    return recording, found


def keep_projection(model, layer, heads, rows, theirs):
    """A hook that puts rows of another forward's contexts before the output projection of a layer."""

    def change(module, args):
        x = args[0].clone()
        for head in heads:
            x[:, rows, head * 8 : head * 8 + 8] = theirs[:, rows, head * 8 : head * 8 + 8]
        return (x, *args[1:])

    return model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(change)


@pytest.mark.parametrize(("heads", "queries"), [(None, slice(5, 9)), (2, None), ([0, 3], [3])])
def test_a_patched_output_is_the_context_of_the_other_forward(heads, queries):
    model, clean, corrupted = gpt2(), words(2, 13), words(2, 14)[:, 1:]
    stored = {}
    handle = model.transformer.h[1].attn.c_proj.register_forward_pre_hook(lambda _, args: stored.update(x=args[0].detach()))
    recording, _ = record_values(model, clean)
    handle.remove()
    with intervene(model, Patch(recording, layer=1, head=heads, of="output", queries=queries)):
        patched = logits(model, corrupted)
    chosen = list(range(4)) if heads is None else [heads] if isinstance(heads, int) else heads
    rows = slice(None) if queries is None else queries
    handle = keep_projection(model, 1, chosen, rows, stored["x"])
    expected = logits(model, corrupted)
    handle.remove()
    torch.testing.assert_close(patched, expected, **KEPT)
    assert not torch.allclose(patched, logits(model, corrupted), **KEPT)


@pytest.mark.parametrize(
    ("make", "queries", "of"),
    [
        *((mistral, [2, 9, 10], of) for of in ("weights", "output", "residual")),
        *(
            (llama, None, "weights"),
            (llama, slice(4, 6), "output"),
            (mistral, None, "residual"),
            (mistral, slice(4, 6), "weights"),
        ),
    ],
)
def test_a_patch_is_by_position_while_a_cache_grows(make, queries, of):
    model, clean, corrupted = make(), words(2, 15), words(2, 13).flip(1)
    with record(model, keep=f"values,{of}" if of == "residual" else "values") as recording:
        logits(model, clean[:, :13])
    with intervene(model, Patch(recording, layer=1, of=of, queries=queries)):
        expected = logits(model, corrupted)
    length = 7 if queries == slice(4, 6) else 15
    with record(model, keep=f"values,{of}" if of == "residual" else "values") as recording:
        logits(model, clean[:, :length])
    with torch.no_grad(), intervene(model, Patch(recording, layer=1, of=of, queries=queries)):
        found = run_in_steps(model, corrupted, 5)
    torch.testing.assert_close(found, expected[:, 4:], **KEPT)
    assert not torch.allclose(found, logits(model, corrupted)[:, 4:], **KEPT)


def test_weights_on_keys_that_a_call_does_not_have_are_not_patched():
    model, tokens = bart().get_encoder(), words(1, 9)
    with record(model) as recording, torch.no_grad():
        model(tokens)
    told = pytest.raises(ConfigError, match=r"weights on keys that .* does not have now")
    with told, intervene(model, Patch(recording, layer=0)), torch.no_grad():
        model(tokens[:, :6])


@pytest.mark.parametrize("by", ["mean", "resample"])
def test_a_source_of_several_forwards_has_the_rows_of_all_of_them(by):
    model, tokens = gpt2(), words(5, 9)
    with torch.no_grad(), record(model, keep="values") as source:
        for others in (words(2, 12), words(1, 10), words(3, 11)):
            model(others)
    contexts = [(run.map(1) @ run.values(1)).transpose(1, 2).flatten(2) for run in source.runs]  # (b, t, c)
    mean = torch.cat([context.flatten(0, 1) for context in contexts]).mean(0).expand(5, 9, -1)
    rows = torch.cat([context[:, :9] for context in contexts])[:5]
    with intervene(model, KnockOut(1, [0, 2], by=by, source=source)):
        found = logits(model, tokens)
    handle = keep_projection(model, 1, [0, 2], slice(None), mean if by == "mean" else rows)
    torch.testing.assert_close(found, logits(model, tokens), **KEPT)
    handle.remove()


@pytest.mark.parametrize("of", ["weights", "output", "residual"])
def test_a_layer_of_an_encoder_is_patched_from_the_encoder_and_not_from_the_decoder(of):
    model, target = bart(), words(2, 9)
    clean, other = words(2, 9).flip(1), words(2, 9).flip(0)
    name = "model.encoder.layers.1.self_attn"
    with torch.no_grad(), record(model, keep="residual" if of == "residual" else "values") as recording:
        model(input_ids=clean, decoder_input_ids=target)
    with torch.no_grad(), record(model, keep="values") as found, intervene(model, Patch(recording, layer=name, of=of)):
        patched = model(input_ids=other, decoder_input_ids=target).logits
    if of == "weights":
        theirs = recording.last.map(name).dense() @ found.values(name)
    elif of == "output":
        theirs = recording.last.map(name).dense() @ recording.values(name)
    handle = patch_encoder(model, 1, theirs.transpose(1, 2).flatten(2) if of != "residual" else recording.residual(name), of)
    with torch.no_grad():
        torch.testing.assert_close(patched, model(input_ids=other, decoder_input_ids=target).logits, **KEPT)
    handle.remove()


def patch_encoder(model, layer, x, of):
    """Replace what goes into the output projection of a layer of the encoder, or what the layer returns."""
    block = model.model.encoder.layers[layer]
    if of == "residual":
        return block.register_forward_hook(lambda module, args, output: (x, *output[1:]) if isinstance(output, tuple) else x)
    return block.self_attn.out_proj.register_forward_pre_hook(lambda module, args: (x,))


def test_a_source_gives_the_encoder_what_the_encoder_did():
    model, target, name = bart(), words(2, 9), "model.encoder.layers.0.self_attn"
    with torch.no_grad(), record(model, keep="values") as source:
        model(input_ids=words(2, 9).flip(1), decoder_input_ids=target)
    mean = (source.map(name).dense() @ source.values(name)).mean((0, 2)).flatten()
    with torch.no_grad(), intervene(model, KnockOut(name, by="mean", source=source)):
        found = model(input_ids=words(2, 9), decoder_input_ids=target).logits
    handle = patch_encoder(model, 0, mean.expand(2, 9, -1), "output")
    with torch.no_grad():
        torch.testing.assert_close(found, model(input_ids=words(2, 9), decoder_input_ids=target).logits, **KEPT)
    handle.remove()


def test_changes_of_blocks_within_one_another_are_those_of_one_block():
    model, tokens = gpt2(), words(2, 13)
    changes = [CutEdges(slice(5, 9), [2, 3], layer=1), Temperature(1, 2, 3.0), KnockOut(1, [0, 3]), KnockOut(2, 1, by="mean")]
    with intervene(model, *changes):
        together = logits(model, tokens)
    for outer, inner in ((changes[:1], changes[1:]), (changes[2:], changes[:2]), (changes[1::-1], changes[:1:-1])):
        with intervene(model, *outer), intervene(model, *inner):
            torch.testing.assert_close(logits(model, tokens), together, **KEPT)


def test_a_recording_of_a_model_within_another_is_patched_by_its_numbers():
    model, tokens = gpt2(), words(1, 9)
    outer = torch.nn.Sequential(model)
    with torch.no_grad(), record(outer, keep="values") as recording:
        outer(tokens.flip(1))
    with intervene(model, Patch(recording, layer=2, of="output")):
        found = logits(model, tokens)
    with intervene(outer, Patch(recording, layer="0.transformer.h.2.attn", of="output")):
        torch.testing.assert_close(found, logits(outer, tokens), **KEPT)


def test_samples_of_a_source_are_those_of_the_same_positions_while_a_cache_grows():
    model, tokens = gpt2(), words(3, 9)
    source, _ = record_values(model, words(2, 12))
    with torch.no_grad(), intervene(model, KnockOut(1, [0, 2], by="resample", source=source)):
        torch.testing.assert_close(run_in_steps(model, tokens, 5), model(tokens).logits[:, 4:], **KEPT)
    with (
        torch.no_grad(),
        intervene(model, KnockOut(1, 0, by="resample", source=source)),
        pytest.raises(ConfigError, match=r"after 12 tokens.* at least as long"),
    ):
        run_in_steps(model, words(2, 13), 5)


@pytest.mark.parametrize("nothing", [torch.empty(0), slice(0, 0)])
def test_no_positions_are_none(nothing):
    model, tokens = gpt2(), words(1, 11)
    recording, _ = record_values(model, words(1, 11).flip(1))
    for change in (CutEdges(nothing, 3), CutEdges(9, nothing), Patch(recording, queries=nothing, layer=1, of="output")):
        with intervene(model, change):
            torch.testing.assert_close(logits(model, tokens), logits(gpt2(), tokens), **KEPT)


@pytest.mark.parametrize("places", [-2, slice(-2, -1)])
def test_a_negative_position_counts_from_the_end(places):
    model, tokens = gpt2(), words(1, 11)
    recording, _ = record_values(model, words(1, 11).flip(1))
    pairs = (CutEdges(places, 3), CutEdges(9, 3)), (CutEdges(10, places), CutEdges(10, 9))
    for given, same in (*pairs, (Patch(recording, layer=1, queries=places), Patch(recording, layer=1, queries=9))):
        with intervene(model, same):
            expected = logits(model, tokens)
        assert not torch.allclose(expected, logits(model, tokens), **KEPT)
        with intervene(model, given):
            torch.testing.assert_close(logits(model, tokens), expected, **KEPT)


REFUSED = {  # what is changed, by recordings of other texts, without values, and of the last layer alone, and what is said
    "no change": (lambda r: "KnockOut", "KnockOut, CutEdges"),
    "positions along two axes": (lambda r: CutEdges([(3, 1)]), "queries must be positions along one axis"),
    "a head that is not there": (lambda r: KnockOut(0, 4), "has head 4, but the heads are 0 to 3"),
    "weights of another length": (lambda r: Patch(r["shorter"]), r"recorded \(1, 4, 8, 8\), now \(1, 4, 9, 9\)"),
    "an output of another length": (lambda r: Patch(r["shorter"], layer=0, of="output"), "same shape"),
    "an output without values": (lambda r: Patch(r["without values"], layer=0, of="output"), "keep='values'"),
    "samples of a shorter source": (lambda r: KnockOut(0, 0, by="resample", source=r["shorter"]), "at least as long"),
    "samples of some that are shorter": (
        lambda r: KnockOut(0, 0, by="resample", source=r["of two lengths"]),
        "at least as long",
    ),
    "a mean of a layer that was left out": (lambda r: KnockOut(0, 1, by="mean", source=r["a part"]), "record all layers"),
    "samples of a layer that was left out": (lambda r: KnockOut(0, 1, by="resample", source=r["a part"]), "record all layers"),
    **{
        f"{of} of a layer that was left out": (
            lambda r, of=of: Patch(r["a part"], layer=0, of=of),
            r"has no transformer\.h\.0\.attn",
        )
        for of in ("weights", "output", "residual")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_changed_is_refused_with_what_it_needs(name):
    model, (build, says) = gpt2(), REFUSED[name]
    recordings = {}
    for source, keep, layers, lengths in (
        ("shorter", "values", None, [8]),
        ("without values", None, None, [9]),
        ("of two lengths", "values", None, [5, 12]),
        ("a part", "values,residual", [2], [9]),
    ):
        with torch.no_grad(), record(model, layers=layers, keep=keep) as recordings[source]:
            for length in lengths:
                model(words(1, length))
    with pytest.raises(ConfigError, match=says), intervene(model, build(recordings)):
        logits(model, words(1, 9))


@pytest.mark.parametrize(
    ("build", "says"),
    [(lambda: Temperature(0, 0, 0.0), "above 0"), (lambda: KnockOut(0, 0, source=Recording()), "takes nothing from a source")],
)
def test_changes_that_contradict_themselves_are_refused(build, says):
    with pytest.raises(ConfigError, match=says):
        build()
