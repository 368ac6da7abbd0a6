"""Block-sparse attention of transformers is recorded as one call of the whole sequence with the rule of its blocks."""

import math
import warnings
from functools import wraps

import pytest
import torch
from torch import Tensor

from regard.observe import record

transformers = pytest.importorskip("transformers")

T, H, D = 23, 3, 4
C = H * D
SMALL = {"vocab_size": 31, "hidden_size": C, "num_attention_heads": H, "intermediate_size": 17, "num_hidden_layers": 2}


def make_longformer() -> torch.nn.Module:
    config = transformers.LongformerConfig(**SMALL, attention_window=4, max_position_embeddings=64, pad_token_id=1)
    return make_seeded_model(lambda: transformers.LongformerModel(config))


def make_led() -> torch.nn.Module:
    sizes = {"d_model": C, "encoder_attention_heads": H, "decoder_attention_heads": H, "encoder_ffn_dim": 17}
    layers = {"encoder_layers": 2, "decoder_layers": 1, "decoder_ffn_dim": 17, "vocab_size": 31}
    return make_seeded_model(
        lambda: transformers.LEDModel(
            transformers.LEDConfig(**sizes, **layers, attention_window=4, max_encoder_position_embeddings=64)
        )
    )


def make_big_bird(**options: object) -> torch.nn.Module:
    config = transformers.BigBirdConfig(
        **SMALL, max_position_embeddings=64, block_size=3, num_random_blocks=1, hidden_dropout_prob=0.0, **options
    )
    config.attention_probs_dropout_prob = 0.0
    return make_seeded_model(lambda: transformers.BigBirdModel(config))


def make_seeded_model(make: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = make().double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def run(model: torch.nn.Module, **given: Tensor) -> tuple[object, list[Tensor], object]:
    """Return the recording, the hidden states that each layer got, and the output, which recording leaves as it is."""
    torch.manual_seed(1)
    plain = model(**given, output_hidden_states=True)
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"), record(model, keep="values") as recording:
        output = model(**given, output_hidden_states=True)
    assert torch.equal(plain[0], output[0])
    states = getattr(output, "hidden_states", None) or output.encoder_hidden_states
    return recording, list(states), output


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def compute_longformer_weights(module: torch.nn.Module, x: Tensor, real: Tensor, shared: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    seen = (places[:, None] - places).abs() <= 2
    seen = (seen | shared[:, None] | shared[:, :, None]) & real[:, None]
    scores = split(module.query(x)) @ split(module.key(x)).mT / math.sqrt(D)
    of_global = split(module.query_global(x)) @ split(module.key_global(x)).mT / math.sqrt(D)
    scores = torch.where(shared[:, None, :, None], of_global, scores).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1).masked_fill(~real[:, None, :, None], 0)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("is_global", [False, True], ids=["windows", "with global tokens"])
@pytest.mark.parametrize("kind", ["longformer", "led"])
def test_the_map_of_longformer_is_its_window_with_its_global_tokens(kind, is_global, is_padded):
    model = make_longformer() if kind == "longformer" else make_led()
    ids, t = torch.randint(3, 31, (2, T)), 24
    mask, shared = torch.ones(2, t, dtype=torch.bool), torch.zeros(2, t, dtype=torch.bool)
    mask[:, T:] = False  # the model pads to a multiple of the window
    if is_padded:
        mask[1, T - 7 :] = False
    if is_global:
        shared[0, 0] = shared[1, 0] = shared[1, 11] = True
    given = {"input_ids": ids, "attention_mask": mask[:, :T].long(), "global_attention_mask": shared[:, :T].long()}
    recording, states, _ = run(model, **given)
    layers = model.encoder.layer if kind == "longformer" else model.encoder.layers
    part = "attention.self" if kind == "longformer" else "self_attn.longformer_self_attn"
    for n, layer in enumerate(layers):
        name = f"encoder.layer{'' if kind == 'longformer' else 's'}.{n}.{part}"
        module, x = layer.get_submodule(part), states[n]
        x = torch.cat([x, x.new_zeros(2, t - x.shape[1], C)], 1) if x.shape[1] < t else x
        expected = compute_longformer_weights(module, x, mask, shared)[:, :, :T, :T]
        found = recording[name][0].map.dense()[:, :, :T, :T]
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)
        assert (recording[name][0].stored.v is None) == is_global


def compute_big_bird_weights(module: torch.nn.Module, x: Tensor, real: Tensor, drawn: Tensor) -> Tensor:
    """The weights (b, h, t, t), where a block that is drawn (h, blocks - 2) counts as often as it stands there."""
    blocks = torch.arange(x.shape[1]) // 3
    last = int(blocks[-1])
    count = ((blocks[:, None] - blocks).abs() <= 1) | (blocks == 0) | (blocks == last)
    count = count.double().expand(H, -1, -1).clone()
    for head in range(H):
        for row, block in enumerate(drawn[head].tolist(), 1):
            count[head] += (blocks[:, None] == row) & (blocks == block)
    count[:, (blocks == 0) | (blocks == last)] = 1
    scores = split(module.query(x)) @ split(module.key(x)).mT / math.sqrt(D)
    weights = scores.exp() * count * real[:, None, None]
    return weights / weights.sum(-1, keepdim=True) * real[:, None, :, None]


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("is_training", [False, True], ids=["outside training", "in training"])
def test_the_map_of_big_bird_is_its_blocks_as_they_were_drawn(monkeypatch, is_training, is_padded):
    model = make_big_bird().train(is_training)
    owner = type(model.encoder.layer[0].attention.self)
    drawn, draw = [], vars(owner)["_create_rand_mask_from_inputs"].__func__
    monkeypatch.setattr(
        owner,
        "_create_rand_mask_from_inputs",
        staticmethod(wraps(draw)(lambda *args: drawn.append(args[2][0, :, :, 0]) or draw(*args))),
    )
    ids, mask = torch.randint(3, 31, (2, 33)), torch.ones(2, 33, dtype=torch.bool)
    if is_padded:
        mask[1, 25:] = False
    recording, states, _ = run(model, input_ids=ids, attention_mask=mask.long())
    assert not recording.missed
    for n, layer in enumerate(model.encoder.layer):
        expected = compute_big_bird_weights(layer.attention.self, states[n], mask, drawn[n - len(model.encoder.layer)])
        call = recording[f"encoder.layer.{n}.attention.self"][0]
        assert torch.allclose(call.map.dense(), expected, rtol=0, atol=1e-10)
        context = call.map.dense() @ call.stored.v
        assert torch.allclose(context.sum(-1), (expected @ split(layer.attention.self.value(states[n]))).sum(-1), atol=1e-10)


def test_a_module_that_computes_something_else_is_missed_with_the_difference(monkeypatch):
    model = make_longformer()
    owner = type(model.encoder.layer[0].attention.self)
    weigh = owner._sliding_chunks_matmul_attn_probs_value
    monkeypatch.setattr(owner, weigh.__name__, wraps(weigh)(lambda self, *args: 1.1 * weigh(self, *args)))
    recording, _, _ = run(model, input_ids=torch.randint(3, 31, (2, T)))
    assert not recording.calls
    assert "its context differs from that of its rule by" in recording.missed[0].reason
