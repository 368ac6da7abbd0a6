"""The residual stream: recorded beside Hugging Face's hidden states, and patched beside plain hooks on the blocks."""

import pytest
import torch

import regard
from observe.families import FAMILIES
from observe.models import gpt2, words
from regard.errors import ConfigError

EQUAL = 1e-9  # float64
BLOCKS = {
    "gpt2": "h.{}",
    "llama": "layers.{}",
    "t5": "decoder.block.{}",
    "bart": "decoder.layers.{}",
    "bert": "encoder.layer.{}",
}


def build(name):
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(torch.float64)
    return model, family.feed(model, "none")


def feed_other(given):
    """Other inputs of the same shape."""
    return {
        key: x.roll(1, -1).flip(0) if isinstance(x, torch.Tensor) and not x.is_floating_point() and "mask" not in key else x
        for key, x in given.items()
    }


def hook_block(module, function):
    """Replace the output of a block by a function of it."""

    def hook(module, args, output):
        return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)

    return module.register_forward_hook(hook)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_residual_stream_is_what_a_block_returns(name):
    model, given = build(name)
    with torch.no_grad(), regard.record(model, keep="residual") as recording:
        output = model(**given, output_hidden_states=True)
    states = output["decoder_hidden_states" if "decoder_hidden_states" in output else "hidden_states"]
    count = len(recording.layers())
    for layer in range(count - 1):  # the last one is behind a norm
        assert torch.equal(recording.residual(layer), states[layer + 1])
    assert recording.residual(count - 1).shape == states[-1].shape


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Pairs(torch.nn.Module):
    """Attention and feed-forward layers in pairs, each added to the stream by the model, as in vit-pytorch."""

    def __init__(self):
        super().__init__()
        parts = ([Attend(), torch.nn.Linear(8, 8)] for _ in range(2))
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList(pair) for pair in parts)

    def forward(self, x):
        for attend, feed in self.layers:
            x = attend(x) + x
            x = feed(x) + x
        return x


def test_what_attention_adds_to_the_stream_is_not_recorded_as_the_stream():
    model = Pairs()
    with torch.no_grad(), regard.record(model, keep="residual") as recording:
        model(torch.randn(2, 5, 8))
    assert len(recording.layers()) == 2
    for layer in range(2):
        with pytest.raises(ConfigError, match="hands on the stream"):
            recording.residual(layer)


def test_a_block_before_something_that_is_added_to_some_tokens_has_the_stream():
    """As what Qwen3-VL adds to the tokens of an image between its first blocks."""
    model = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2))

    class Adding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            self.streams = []
            for layer in self.layers:
                x = layer(x)
                self.streams.append(x)
                x = torch.cat([x[:, :2], x[:, 2:] + 1], 1)
            return x

    adding = Adding()
    with torch.no_grad(), regard.record(adding, keep="residual") as recording:
        adding(torch.randn(2, 5, 8))
    for layer in range(2):
        assert torch.equal(recording.residual(layer), adding.streams[layer])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("queries", [None, [3, 5], slice(6, None)], ids=["all", "two", "later"])
def test_a_patched_residual_stream_is_that_of_a_plain_hook(name, queries):
    model, given = build(name)
    other = feed_other(given)
    block = model.get_submodule(BLOCKS[name].format(1))
    seen = []
    with torch.no_grad():
        handle = hook_block(block, lambda x: seen.append(x) or x)
        model(**other)
        handle.remove()
        rows = torch.zeros(seen[0].shape[1], dtype=torch.bool)
        rows[slice(None) if queries is None else queries] = True
        handle = hook_block(block, lambda x: torch.where(rows[:, None], seen[0], x))
        expected = model(**given).last_hidden_state
        handle.remove()
        plain = model(**given).last_hidden_state
        with regard.record(model, keep="residual") as recording:
            model(**other)
        layer = recording.layers()[1]
        with regard.intervene(model, regard.Patch(recording, layer=layer, of="residual", queries=queries)):
            found = model(**given).last_hidden_state
        after = model(**given).last_hidden_state
    assert float((found - expected).abs().max()) < EQUAL
    assert float((found - plain).abs().max()) > 1e-3
    assert torch.equal(after, plain)


@pytest.mark.parametrize("steps", [False, True], ids=["one forward", "steps of a cache"])
def test_a_number_means_the_same_layer_and_a_file_holds_the_stream(tmp_path, steps):
    model, ids = gpt2().eval().double(), words(2, 7)
    with torch.no_grad():
        with regard.record(model, keep="residual") as recording:
            ids = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[:, :-1] if steps else ids
            model(ids) if not steps else None
        recording.save(tmp_path / "recording")
        loaded = regard.load(tmp_path / "recording")
        assert loaded.residual(1).shape[:2] == ids.shape
        assert torch.equal(loaded.residual(1), recording.residual(1))
        expected = model(ids).logits
        with regard.intervene(model, regard.Patch(loaded, layer=1, of="residual")):
            found = model(ids.roll(1, 1)).logits
    assert float((found - expected).abs().max()) < EQUAL  # all that comes later follows from the stream


def test_what_was_not_kept_or_does_not_fit_is_refused():
    model, given = build("gpt2")
    ids = given["input_ids"]
    with torch.no_grad(), regard.record(model) as without:
        model(ids)
    with pytest.raises(ConfigError, match="keep='residual'"):
        without.residual(0)
    with torch.no_grad(), regard.record(model, keep="residual") as short:
        model(ids[:, :4])
    patches = [regard.Patch(short, layer=layer, of="residual") for layer in (0, 99)]
    with torch.no_grad(), pytest.raises(ConfigError, match="the same shape"), regard.intervene(model, patches[0]):
        model(ids)
    with torch.no_grad(), pytest.warns(UserWarning, match="was not applied"), regard.intervene(model, patches[1]):
        model(ids)
    with pytest.raises(ConfigError, match="leave head and kind out"):
        regard.Patch(short, head=0, of="residual")
    with pytest.raises(ConfigError, match="residual"), regard.record(model, keep="residuals"):
        pass


def test_recorded_layers_alone_keep_their_stream():
    model, given = build("llama")
    with torch.no_grad(), regard.record(model, keep="residual") as whole:
        model(**given)
    with torch.no_grad(), regard.record(model, layers=[1], keep="residual") as one:
        model(**given)
    assert torch.equal(one.residual(0), whole.residual(1))
