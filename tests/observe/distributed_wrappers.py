"""One of two processes whose models are wrapped for a process group; run by test_wrappers.py.

Each wrapper computes the same to the bit while it is recorded, and its maps are those of the model that is not wrapped.
Prints the number of the maps of each wrapper, and the largest difference of one of them.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).parents[1]))

import regard
from observe.recording_checks import distance

X = torch.randn(4, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Attention(nn.Module):
    """Causal attention of 6 heads of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def build_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Attention(), Attention()).double()


def record_unchanged(model: nn.Module, run) -> regard.Recording:
    """The recording of a run, whose result is to the bit that of a run that is not recorded."""
    expected = run()
    with regard.record(model) as recording:
        output = run()
    assert expected is None or torch.equal(output, expected)
    assert not recording.missed, recording.missed
    return recording


def compare_layers(recording: regard.Recording, whole: regard.Recording, prefix: str = "") -> list[float]:
    """Return the difference of the map of each layer from that of the whole model."""
    assert recording.names == [prefix + name for name in whole.names]
    return [distance(recording.map(prefix + name), whole.map(name).dense()) for name in whole.names]


def compare_ddp(whole: regard.Recording) -> list[float]:
    model = nn.parallel.DistributedDataParallel(build_model())
    found = compare_layers(record_unchanged(model, lambda: model(X)), whole, "module.")
    model(X).sum().backward()
    return found


def compare_fsdp(whole: regard.Recording) -> list[float]:
    model = build_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return compare_layers(record_unchanged(model, lambda: model(X)), whole)


def compare_tensor_parallel(whole: regard.Recording, rank: int) -> list[float]:
    model, mesh = build_model(), init_device_mesh("cpu", (2,))
    for layer in model:
        parallelize_module(layer, mesh, {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()})
    recording = record_unchanged(model, lambda: model(X))
    own = slice(3 * rank, 3 * rank + 3)
    found = [distance(recording.map(name), whole.map(name).dense()[:, own]) for name in whole.names]
    joined = regard.gather_heads(recording)
    assert (joined is None) == (rank > 0)
    return found if joined is None else found + compare_layers(joined, whole)


class OfKernel(Attention):
    """The same without a mask, by the kernel that takes DTensors on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        with sdpa_kernel(SDPBackend.MATH):
            return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def compare_distributed_heads(rank: int) -> list[float]:
    """Return the differences of maps of DTensors that are split along heads, joined, from those of the whole model."""
    torch.manual_seed(3)
    model, mesh = nn.Sequential(OfKernel()).double(), init_device_mesh("cpu", (2,))
    with torch.no_grad(), regard.record(model, keep="values") as whole:
        model(X)
    split = {name: ColwiseParallel(use_local_output=False) for name in "qkv"} | {"o": RowwiseParallel()}
    parallelize_module(model[0], mesh, split)
    with torch.no_grad():
        recording = record_unchanged(model, lambda: model(X))
    assert recording.map(0).shape[1] == 3
    joined = regard.gather_heads(recording)
    assert (joined is None) == (rank > 0)
    return [] if joined is None else compare_layers(joined, whole)


class Kernel(nn.Module):
    """The kernel alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)


def check_unread_splits() -> None:
    """Fail unless DTensors of which no rank has whole rows, or the keys of its queries, are said to be missed."""
    model, mesh = Kernel(), init_device_mesh("cpu", (2,))
    x = torch.randn(2, 6, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for placements, reason in (((Shard(2), Replicate()), "(Shard(dim=2),)"), ((Shard(1), Replicate()), "queries and its keys")):
        q, k = (distribute_tensor(x, mesh, [one]) for one in placements)
        with torch.no_grad(), regard.record(model) as recording:
            model(q, k, k)
        assert [reason in one.reason for one in recording.missed] == [True], recording.missed


def compare_pipeline(whole: regard.Recording, rank: int) -> list[float]:
    part = nn.Sequential(build_model()[rank])
    schedules = iter([ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=2) for _ in range(2)])

    def run():
        with torch.no_grad():
            return next(schedules).step(*([X] if rank == 0 else []))

    recording = record_unchanged(part, run)
    maps = [run.map(0).dense() for run in recording.runs[-2:]]  # after the run that finds the shapes
    return [float((torch.cat(maps) - whole.map(rank).dense()).abs().max())]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = build_model()
    with regard.record(alone) as whole:
        alone(X)
    check_unread_splits()
    found = {
        "DistributedDataParallel": compare_ddp(whole),
        "fully_shard": compare_fsdp(whole),
        "tensor parallel": compare_tensor_parallel(whole, rank),
        "DTensors split along heads": compare_distributed_heads(rank),
        "pipeline": compare_pipeline(whole, rank),
    }
    dist.destroy_process_group()
    for name, differences in found.items():
        print(f"recorded: {name} {len(differences)} {max(differences, default=0.0)}")
