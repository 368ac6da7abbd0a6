"""What runs on a GPU gives there what it gives on the CPU: attention, recordings of models, and what is said of them."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.eager_weights import run
from observe.families import FAMILIES
from observe.family import Widened
from observe.handwritten_families import HAND, SINGLE
from observe.recurrent_models import RECURRENT, draw_tokens
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window, attend, attention
from regard.cli import main
from regard.policies import H2O, Oracle, StreamingLLM
from regard.show.all_heads import draw_all_heads
from regard.show.arcs import draw_arcs
from regard.show.profiles import draw_layer_profiles, draw_profiles
from regard.show.rollout_figure import draw_rollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and of torch's compiler, which differ between their versions
]
GPU = "cuda"
T = 300  # queries: more than a block of flex_attention
MASKS = [
    Everything(),
    Causal(),
    Causal() & Window(40),
    Causal() & (Window(16) | Prefix(2)),
    Causal() & Documents(torch.arange(T) // 37),
    Causal() & Padding([T, T - 30]),
    Given(torch.rand(T, T, generator=torch.Generator("cpu").manual_seed(0)) > 0.5),
]
OTHERWISE = {  # families that compute something else on a GPU than on the CPU, by their own code
    *("speecht5", "vit_mae", "oneformer"),  # which draw random numbers, of which each device has its own
    *("deepseek_v32", "vjepa2"),  # which sort numbers, some of them equal
}
OPTIONS = [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.7, -0.3, 0.1, 2.0])}, {"offset": 9}]


def move(x: Any, device: str = GPU) -> Any:
    """Return tensors, and containers of tensors, on another device."""
    if isinstance(x, dict):
        return {name: move(one, device) for name, one in x.items()}
    return x.to(device) if isinstance(x, (Tensor, nn.Module)) else x


def flatten_tensors(x: Any) -> list[Tensor]:
    """List the tensors of an output, in order."""
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if hasattr(x, "values") else x if isinstance(x, (list, tuple)) else ()
    return [tensor for one in values for tensor in flatten_tensors(one)]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute convolutions in whole float32, as matrix products are."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_attention_on_a_gpu_is_the_formula_in_float64_with_its_gradients(mask, options):
    torch.manual_seed(1)
    leaves = [torch.randn(2, heads, T, 32).requires_grad_() for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    moved = [x.detach().cuda().requires_grad_() for x in leaves]
    raised = {n: o.double() if torch.is_tensor(o) else o for n, o in options.items()}
    wanted, found = attend(*exact, mask, **raised).context, attention(*moved, mask, **move(options))
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-5)
    gradient = torch.randn(2, 4, T, 32)
    both = torch.autograd.grad(found, moved, gradient.cuda()), torch.autograd.grad(wanted, exact, gradient.double())
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, *HAND], ids=lambda family: family.name)
def test_a_family_is_recorded_on_a_gpu_as_on_the_cpu(family):
    dtype = torch.float32 if family.name in SINGLE else torch.float64
    model = family.build(dtype)
    copied, inputs = copy.deepcopy(model), family.feed(model, family.sides[-1])
    with Widened() if dtype == torch.float64 else nullcontext():
        run(model, inputs)  # one of them keeps what it has computed of a text
        _, wanted = run(model, inputs, recorded=True)
        model, inputs = copied.cuda(), move(inputs)
        outside, _ = run(model, inputs)
        inside, found = run(model, inputs, recorded=True)
    for one, other in zip(flatten_tensors(outside), flatten_tensors(inside), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert [one.reason for one in found.missed] == [one.reason for one in wanted.missed]
    assert list(found) == list(wanted)
    for ours, theirs in zip(found.calls, wanted.calls, strict=True):
        assert ours.kind == theirs.kind
        assert ours.map.device.type == GPU
        if ours.kind == "implicit" or family.name in OTHERWISE or math.prod(ours.map.shape[-2:]) > 2**16:
            continue
        weights, expected = ours.map.dense().cpu().double(), theirs.map.dense().double()
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-6, equal_nan=True)


@pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
def test_layers_without_a_softmax_are_recorded_on_a_gpu(family):
    model, tokens = family.build().cuda(), draw_tokens().cuda()
    outside, _ = run(model, {"input_ids": tokens})
    inside, recording = run(model, {"input_ids": tokens}, recorded=True)
    assert torch.equal(outside[0], inside[0])
    assert not recording.missed
    assert len(recording.layers("implicit")) == family.implicit
    for layer in range(family.implicit):
        assert recording.map(layer, kind="implicit").certificate().error < 1e-5


def build_gpt2(context: int = 64) -> regard.GPT2:
    """Build a small GPT-2 with random weights."""
    torch.manual_seed(0)
    return regard.GPT2(regard.GPT2Config(layers=2, heads=4, width=32, context=context, vocabulary=60)).eval()


IDS = torch.randint(0, 60, (1, 24), generator=torch.Generator("cpu").manual_seed(3))


def record_gpt2(device: str) -> tuple[regard.GPT2, Tensor, regard.Recording]:
    """Record a small GPT-2 on a device."""
    model, ids = build_gpt2().to(device), IDS.to(device)
    with torch.no_grad(), regard.record(model, keep="values") as recording:
        model(ids)
    return model, ids, recording


def measure_logit(output: Tensor) -> Tensor:
    """Return the difference of two logits of the last token."""
    return output[0, -1, 3] - output[0, -1, 7]


ANSWERS: dict[str, Callable[[regard.GPT2, Tensor, regard.Recording], Any]] = {
    "heads": lambda m, x, r: [list_numbers(regard.heads(r).to_dicts())],
    "rollout": lambda m, x, r: [regard.rollout(r)],
    "probe_heads": lambda m, x, r: [list_numbers(regard.probe_heads(m, seeds=2, length=8).to_dicts())],
    "contributions": lambda m, x, r: [regard.contributions(m, x, 3, 7).heads],
    "effects": lambda m, x, r: [list_numbers(regard.effects(m, x, measure_logit).to_dicts())],
    "legrad": lambda m, x, r: [regard.legrad(m, x, measure_logit).scores],
    "attribute": lambda m, x, r: [attribute(m, x)],
    "audit": lambda m, x, r: list_audited(regard.audit(r, [StreamingLLM(2, 4), H2O(6), Oracle(6)], prompt=12)),
    "compare": lambda m, x, r: list(regard.compare(r, r).divergence),
    "circuits": lambda m, x, r: [regard.find_circuits(m, x).ov(0, 1)[:5]],
}


def list_numbers(rows: list[dict[str, Any]]) -> Tensor:
    """Return the numbers of the rows of a table, in order."""
    return torch.tensor([x for row in rows for x in row.values() if isinstance(x, float)])


def list_audited(found: Any) -> list[Tensor]:
    """Return what an audit measured."""
    return [found.recall, found.kl, found.output_error]


def attribute(model: regard.GPT2, ids: Tensor) -> Tensor:
    """Return how every weight of the first layer moved a logit."""
    with regard.record(model, keep="values") as recording:
        number = measure_logit(model(ids))
    return recording.attribute(number).map(0).dense()


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_said_of_a_model_on_a_gpu_is_what_is_said_on_the_cpu(name):
    found, wanted = (ANSWERS[name](*record_gpt2(device)) for device in (GPU, "cpu"))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=1e-3, atol=1e-4)


def test_a_recording_of_a_gpu_is_saved_shown_and_read_on_the_cpu(tmp_path):
    _, _, recording = record_gpt2(GPU)
    recording.save(tmp_path / "one.regard")
    regard.page(recording, tmp_path / "one.html")
    assert "<html" in (tmp_path / "one.html").read_text()[:2000]
    assert regard.figure(recording, 0, 1)._repr_png_()[0].startswith(b"\x89PNG")
    loaded = regard.load(tmp_path / "one.regard")
    torch.testing.assert_close(loaded.map(0)[0, 0], recording.map(0)[0, 0].cpu(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [24, 200], ids=["words", "bins"])
def test_a_recording_of_a_gpu_is_drawn(length):
    model, ids = build_gpt2(context=length).to(GPU), torch.randint(0, 60, (1, length), device=GPU)
    with torch.no_grad(), regard.record(model) as recording:
        model(ids)
    recording.tokens = [f"w{n}" for n in range(length)]
    pictures = [regard.figure(recording, 0, 1), draw_all_heads(recording), draw_profiles(recording, 0)]
    some = slice(20)
    pictures += [draw_layer_profiles(recording), draw_rollout(recording), draw_arcs(recording, 0, 1, queries=some, keys=some)]
    assert all(picture._repr_png_()[0].startswith(b"\x89PNG") for picture in pictures)


def test_recordings_of_two_devices_are_compared_and_patched(tmp_path):
    model, ids, recording = record_gpt2(GPU)
    recording.save(tmp_path / "one.regard")
    loaded = regard.load(tmp_path / "one.regard")
    for pair in ((recording, loaded), (loaded, recording)):
        assert all(bool((layer < 1e-6).all()) for layer in regard.compare(*pair).divergence)
    for queries in (None, torch.tensor([3, 5])):
        outputs = []
        for device in (GPU, "cpu"):
            place = None if queries is None else queries.to(device)
            with torch.no_grad(), regard.intervene(model.to(device), regard.Patch(loaded, layer=0, head=1, queries=place)):
                outputs.append(model(ids.to(device).flip(1)).cpu())
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


def test_a_map_of_a_gpu_takes_tensors_of_either_device():
    torch.manual_seed(0)
    q, k, places = torch.randn(1, 4, 50, 16), torch.randn(1, 4, 50, 16), torch.tensor([3, 40])
    wanted = regard.AttentionMap(q, k, Causal())
    for device in (GPU, "cpu"):
        found = regard.AttentionMap(q.to(GPU), k.to(GPU), Causal())
        torch.testing.assert_close(found[0, 1, places.to(device)].cpu(), wanted[0, 1, places], rtol=0, atol=1e-6)
        torch.testing.assert_close(found.overview().entropy.cpu(), wanted.overview().entropy, rtol=0, atol=1e-5)


def test_a_head_switched_off_on_a_gpu_changes_what_it_changes_on_the_cpu():
    changed = []
    for device in (GPU, "cpu"):
        model, ids, _ = record_gpt2(device)
        with torch.no_grad(), regard.intervene(model, regard.KnockOut(0, 1)):
            changed.append(model(ids).cpu())
    torch.testing.assert_close(*changed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_on_a_gpu_is_examined(is_causal):
    torch.manual_seed(0)
    layer, expects = regard.MultiHeadAttention(32, 32, 16, 0.0, 4) if is_causal else regard.SelfAttention(32, 32), Causal()
    found, wanted = (regard.examine(one, expects=expects) for one in (copy.deepcopy(layer).cuda(), layer))
    assert [one.kind for one in found.findings] == [one.kind for one in wanted.findings]
    assert bool(found.findings) != is_causal


@pytest.mark.parametrize(
    "command",
    [
        ["look", "Once upon a time there was a girl. Once upon a time", "--device", GPU],
        ["look", "Once upon a time there was a girl. Once upon a time", "--device", GPU, "--why"],
        ["generate", "Once upon a time", "--device", GPU, "--tokens", "12", "--seed", "0"],
        ["generate", "Once upon a time", "--device", GPU, "--tokens", "12", "--seed", "0", "--look"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-1:]),
)
def test_commands_take_a_gpu(command, capsys):
    assert main(command) in (0, None)
    assert len(capsys.readouterr().out) > 20
