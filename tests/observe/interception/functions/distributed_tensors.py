"""One of two processes whose attention runs on DTensors; run by test_distributed_tensors.py with a folder for models.

It prints one line for each check: its name, and nothing or what failed.
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).parents[3]))

import regard
from observe.family import Widened, widen
from observe.recording_checks import EQUAL, distance
from regard.observe.attention_changes import Change
from regard.observe.interception.functions.distributed_tensors import BATCH_PART

B, H, T, D = 4, 6, 7, 5
HEADS, ROWS = (Shard(1),), (Shard(0),)
BOTH = Shard(0), Shard(1)  # on a mesh of two dimensions
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(5))
PADDED = torch.ones_like(IDS).index_put((torch.tensor([1, 1]), torch.tensor([9, 10])), torch.tensor(0))


def draw(heads: int, seed: int) -> Tensor:
    return torch.randn(B, heads, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Function(nn.Module):
    """A function of queries, keys and values as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def attend(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


def attend_causally(q, k, v):
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return torch.softmax((0.7 * q @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v


def attend_grouped(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, -1, T, D) for x in (k, v))
    return torch.softmax(q @ k.mT / 2, -1) @ v


def attend_by_bmm(q, k, v):
    q, k, v = (x.reshape(-1, T, D) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) / 2, -1), v).reshape(B, -1, T, D)


def attend_by_einsum(q, k, v):
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def attend_with_biases(q, k, v):
    slopes = torch.arange(1.0, 1 + q.shape[1], dtype=torch.float64).view(1, -1, 1, 1)
    return torch.softmax(q @ k.mT / 2 + slopes * torch.arange(T) / T, -1) @ v


def attend_with_dropout(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT / 2, -1), 0.3) @ v


def attend_to_top_keys(q, k, v):
    scores = q @ k.mT / 2
    return torch.softmax(scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], -torch.inf), -1) @ v


def attend_by_relu(q, k, v):
    return torch.relu(q @ k.mT / 2) @ v


def attend_by_difference(q, k, v):
    return (torch.softmax(q @ k.mT / 2, -1) - 0.3 * torch.softmax(q.flip(-1) @ k.mT / 2, -1)) @ v


def attend_by_kernel(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


FORMS: dict[Callable[..., Tensor], tuple[int, int]] = {  # with their heads, and those of keys
    attend: (H, H),
    attend_causally: (5, 5),  # which are 3 and 2 on the two ranks
    attend_grouped: (8, 4),
    attend_by_bmm: (H, H),
    attend_by_einsum: (H, H),
    attend_with_biases: (H, H),
    attend_with_dropout: (H, H),
    attend_to_top_keys: (H, H),
    attend_by_relu: (H, H),
    attend_by_difference: (H, H),
    attend_by_kernel: (H, H),
}


@contextmanager
def count_messages() -> Iterator[CommDebugMode]:
    """Count the messages between ranks, with dropout as it is every time."""
    torch.manual_seed(4)
    with implicit_replication(), CommDebugMode() as messages:
        yield messages


def record_unchanged(model: nn.Module, run: Callable[[], Any]) -> regard.Recording:
    """Return the recording of a run. Fails if the run then computes or sends anything else."""
    with count_messages() as before:
        expected = run()
    with count_messages() as inside, regard.record(model, keep="values") as recording:
        output = run()
    assert torch.equal(expected.to_local(), output.to_local()) if hasattr(output, "to_local") else torch.equal(expected, output)
    assert inside.get_comm_counts() == before.get_comm_counts()
    return recording


def record_split(
    function: Callable[..., Tensor], tensors: list[Tensor], mesh: DeviceMesh, *placements: Any
) -> regard.Recording:
    """Return the recording of a function of tensors, each with the placements given for it, or all with the same."""
    each = placements if len(placements) > 1 else placements * len(tensors)
    split = [distribute_tensor(x, mesh, one, src_data_rank=None) for x, one in zip(tensors, each, strict=True)]
    model = Function(function)
    return record_unchanged(model, lambda: model(*split))


def take_part(x: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensor:
    return distribute_tensor(x, mesh, placements, src_data_rank=None).to_local()


def check_formulas(recording: regard.Recording) -> None:
    """Fail unless all is recorded by its formula: weights that are stored as they are would be right whatever it is."""
    assert not recording.missed, recording.missed
    assert not any("stored as they are" in note for note in recording.notes), recording.notes


def check_form(function: Callable[..., Tensor], meshes: dict[Any, DeviceMesh]) -> None:
    """Fail unless each rank has the weights and values of its heads and rows, as those of the tensors that are not split."""
    tensors = [draw(heads, seed) for seed, heads in enumerate((FORMS[function][0], *(FORMS[function][1],) * 2))]
    model = Function(function)
    torch.manual_seed(4)
    with sdpa_kernel(SDPBackend.MATH), regard.record(model, keep="values") as whole:
        model(*tensors)
    kind = "implicit" if not whole.last.softmax_calls else "self"
    for (_, placements), mesh in meshes.items():
        for needs_grad in (False, True):
            with torch.set_grad_enabled(needs_grad):
                recording = record_split(function, [x.requires_grad_(needs_grad) for x in tensors], mesh, placements)
            check_formulas(recording)
            expected = take_part(whole.map(0, kind=kind).dense(), mesh, placements)
            assert distance(recording.map(0, kind=kind), expected) < EQUAL
            if kind == "self":
                values = take_part(whole.values(0), mesh, placements)
                assert float((recording.values(0) - values).abs().max()) < EQUAL
                assert any(BATCH_PART in note for note in recording.notes) == (Shard(0) in placements and mesh.size(0) > 1)


def check_split_tokens(mesh: DeviceMesh) -> None:
    """Fail unless weights of which no rank has whole rows are missed, with their placements."""
    tensors = [draw(H, seed) for seed in range(3)]
    for function in (attend, attend_by_kernel):
        for placements in ([(Shard(2),)] * 3, [(Shard(2),), (Replicate(),), (Replicate(),)]):
            recording = record_split(function, tensors, mesh, *placements)
            assert not recording.calls
            (missed,) = recording.missed
            assert "(Shard(dim=2),)" in missed.reason
            assert "full_tensor()" in missed.reason


def check_unlike_splits(mesh: DeviceMesh) -> None:
    """Fail unless what is recorded of tensors that are split unlike each other is what the model computed on this rank."""
    tensors = [draw(H, seed) for seed in range(3)]
    weights = torch.softmax(tensors[0] @ tensors[1].mT / 2, -1)
    whole, heads, rows = (Replicate(),), HEADS, ROWS
    numbers = []
    for placements in ((rows, whole, whole), (heads, whole, whole), (heads, heads, whole), (whole, (Shard(2),), whole)):
        recording = record_split(attend, tensors, mesh, *placements)
        numbers.append(len(recording.calls))
        assert len(recording.calls) + len(recording.missed) == 1
        expected = take_part(weights, mesh, rows) if placements[0] == rows else weights
        assert not recording.calls or distance(recording.map(0), expected) < EQUAL
        if placements[0] == rows:  # keys and values that every rank has whole are cut
            check_formulas(recording)
            assert torch.equal(recording.values(0), take_part(tensors[2], mesh, rows))
    assert numbers == [1, 1, 0, 1]


def check_mixed_heads(mesh: DeviceMesh) -> None:
    """Fail unless heads that are mixed across ranks are missed, and said to be split unlike each other."""

    def mix(q, k, v):
        mixing = torch.linspace(-1, 1, H * H, dtype=torch.float64).reshape(H, H)
        return torch.einsum("bhqk,hg->bgqk", torch.softmax(q @ k.mT / 2, -1), mixing) @ v

    recording = record_split(mix, [draw(H, seed) for seed in range(3)], mesh, HEADS)
    assert not recording.calls
    assert ["not split among the ranks alike" in one.reason for one in recording.missed] == [True]


def check_joined_rows(mesh: DeviceMesh) -> None:
    """Fail unless parts of a batch are not joined as if they were heads."""
    recording = record_split(attend, [draw(H, seed) for seed in range(3)], mesh, ROWS)
    try:
        regard.gather_heads(recording)
        message = ""
    except regard.ConfigError as error:
        message = str(error)
    assert ("different rows of the batch" in message) == (dist.get_rank() == 0)


def list_changes(heads: int, recording: regard.Recording) -> list[Change]:
    """Return changes of some heads by their numbers in the whole model, each of which leaves others as they are."""
    return [
        regard.KnockOut(0, [1, heads - 1]),
        regard.KnockOut(0, [0, heads - 1], by="resample", source=recording),
        regard.CutEdges(layer=0, head=heads - 2, queries=slice(3, None), keys=2),
        regard.Temperature(0, [0, 2], t=3.0),
        regard.Patch(layer=0, head=[1, heads - 1], recording=recording, of="output", queries=4),
        regard.Patch(layer=0, head=heads - 1, recording=recording),
    ]


def check_changes(meshes: dict[Any, DeviceMesh]) -> None:
    """Fail unless changed attention is that of the tensors that are not split, with as many messages, and with gradients."""
    for function in (attend, attend_causally, attend_grouped, attend_by_bmm, attend_by_einsum, attend_by_kernel):
        heads, own = FORMS[function]
        tensors, others = ([draw(n, seed + more) for seed, n in enumerate((heads, own, own))] for more in (0, 5))
        model = Function(function)
        for (_, placements), mesh in meshes.items():
            split, other_split = ([distribute_tensor(x, mesh, placements) for x in one] for one in (tensors, others))
            with implicit_replication():
                with regard.record(model, keep="values") as whole:
                    model(*others)
                with regard.record(model, keep="values") as part:
                    model(*other_split)
            for change, change_of_part in zip(list_changes(heads, whole), list_changes(heads, part), strict=True):
                with count_messages() as before:
                    model(*split)
                leaf = [x.detach().clone().requires_grad_() for x in split]
                with count_messages() as inside, regard.intervene(model, change_of_part):
                    found = model(*leaf)
                with implicit_replication():
                    found.to_local().square().sum().backward()
                with regard.intervene(model, change):
                    expected = model(*(x.requires_grad_() for x in tensors))
                assert inside.get_comm_counts() == before.get_comm_counts(), (function.__name__, placements, change)
                assert found.placements == tuple(placements)
                whole_context = model(*tensors)
                assert not torch.allclose(whole_context, expected)
                compared = take_part(expected.detach(), mesh, placements)
                assert float((found.to_local() - compared).abs().max()) < EQUAL, (function.__name__, placements, change)
                (gradient,) = torch.autograd.grad(expected.square().sum(), tensors[0])
                compared = take_part(gradient, mesh, placements)
                assert float((leaf[0].grad.to_local() - compared).abs().max()) < 10 * EQUAL, (function.__name__, change)


def check_refused_changes(mesh: DeviceMesh) -> None:
    """Fail unless a change that needs what other ranks have, or that no rank can make, says so."""
    tensors = [draw(H, seed) for seed in range(3)]
    rows = [distribute_tensor(x, mesh, ROWS) for x in tensors]
    tokens = [distribute_tensor(x, mesh, (Shard(2),)) for x in tensors]
    model = Function(attend)
    try:
        with regard.intervene(model, regard.KnockOut(0, 1, by="mean")):
            model(*rows)
        message = ""
    except regard.ConfigError as error:
        message = str(error)
    assert "split along the batch" in message, message
    try:
        with regard.intervene(model, regard.KnockOut(0, H)):
            model(*[distribute_tensor(x, mesh, HEADS) for x in tensors])
        message = ""
    except regard.ConfigError as error:
        message = str(error)
    except IndexError as error:
        message = str(error)
    assert f"the heads are 0 to {H - 1}" in message, message
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with count_messages(), regard.intervene(model, regard.KnockOut(0, 1)):
            model(*tokens)
    assert any("full_tensor()" in str(one.message) for one in said), [str(one.message) for one in said]


GPT_NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}
BERT = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
SMALL = {"hidden_size": 32, "vocab_size": 64, "intermediate_size": 48}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {  # settings, names of projections to heads and back
    "GPTNeo": ({**SMALL, **GPT_NEO}, ("q_proj", "k_proj", "v_proj"), "attention.out_proj"),
    "GPTJ": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64, "attn_implementation": "eager"},
        ("q_proj", "k_proj", "v_proj"),
        "attn.out_proj",
    ),
    "MPNet": ({**SMALL, **BERT}, ("q", "k", "v"), "attn.o"),
}


def build_family(name: str, **settings: Any) -> nn.Module:
    """Return a model of a family, with random weights in float64."""
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings)).eval()
    widen(model, 1.2)
    return model.double()


def compare_joined(recording: regard.Recording, whole: regard.Recording) -> None:
    """Fail unless the heads of both ranks are those of the model that is not split."""
    check_formulas(recording)
    heads = whole.map(0).shape[1]
    assert [recording.map(name).shape[1] for name in whole.names] == [heads / 2] * len(whole.names)
    joined = regard.gather_heads(recording)
    assert (joined is None) == (dist.get_rank() > 0)
    if joined is not None:
        assert joined.names == whole.names
        assert [one.kind for one in joined.calls] == [one.kind for one in whole.calls]
        for name in whole.names:
            assert distance(joined.map(name), whole.map(name).dense()) < EQUAL
            assert float((joined.values(name) - whole.values(name)).abs().max()) < EQUAL


def check_family(name: str, mesh: DeviceMesh) -> None:
    """Fail unless a model whose projections return DTensors is recorded, and changed, as it is when it is not split."""
    settings, heads, back = FAMILIES[name]
    model = build_family(name, **settings)
    inputs = {"input_ids": IDS, "attention_mask": PADDED, **({} if name == "MPNet" else {"use_cache": False})}

    def run() -> Tensor:
        with torch.no_grad(), Widened():
            return model(**inputs).last_hidden_state

    with regard.record(model, keep="values") as whole:
        unchanged = run()
    change = regard.KnockOut(1, [0, 3])
    with regard.intervene(model, change):
        expected = run()
    assert not torch.allclose(unchanged, expected)
    for path, module in model.named_modules():
        if path.endswith(back):
            parallelize_module(module, mesh, RowwiseParallel())
        elif isinstance(module, nn.Linear) and path.rpartition(".")[2] in heads:
            parallelize_module(module, mesh, ColwiseParallel(use_local_output=False))
    compare_joined(record_unchanged(model, run), whole)
    with count_messages(), regard.intervene(model, change):
        found = run()
    assert float((found - expected).abs().max()) < 10 * EQUAL


def check_tensor_parallel_plan(name: str, folder: Path) -> None:
    """Fail unless a model that transformers splits by its own plan is recorded as it is when it is not split."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = build_family(name, **SMALL, **settings, attn_implementation="eager")

    def run(one: nn.Module) -> Tensor:
        with torch.no_grad(), Widened():
            return one(input_ids=IDS, attention_mask=PADDED).last_hidden_state

    path = folder / name
    model.save_pretrained(path)  # on the first rank
    dist.barrier()
    loaded = type(model).from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
    with regard.record(loaded, keep="values") as whole:
        run(loaded)
    split = type(model).from_pretrained(path, tp_plan="auto", attn_implementation="eager", dtype=torch.float64)
    assert "DTensor" in {type(one).__name__ for one in split.parameters()}
    compare_joined(record_unchanged(split, lambda: run(split)), whole)


def build_checks(folder: Path) -> dict[str, Callable[[], None]]:
    """Return all checks by name."""
    mesh = init_device_mesh("cpu", (2,))
    meshes = {
        ("heads", HEADS): mesh,
        ("rows", ROWS): mesh,
        ("rows on two ranks", BOTH): init_device_mesh("cpu", (2, 1)),
        ("heads on two ranks", BOTH): init_device_mesh("cpu", (1, 2)),
    }
    checks: dict[str, Callable[[], None]] = {}
    for function in FORMS:
        checks[function.__name__] = lambda function=function: check_form(function, meshes)
    for name in FAMILIES:
        checks[name] = lambda name=name: check_family(name, mesh)
    for name in ("Llama", "Gemma2"):
        checks[f"{name} by its plan"] = lambda name=name: check_tensor_parallel_plan(name, folder)
    for check in (check_split_tokens, check_unlike_splits, check_mixed_heads, check_joined_rows, check_refused_changes):
        checks[check.__name__] = lambda check=check: check(mesh)
    checks["check_changes"] = lambda: check_changes(meshes)
    return checks


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    for name, check in build_checks(Path(sys.argv[1])).items():
        try:
            check()
            failure = ""
        except Exception:
            failure = traceback.format_exc().replace("\n", " | ")
        print(f"{name}: {failure}")
        dist.barrier()
    dist.destroy_process_group()
