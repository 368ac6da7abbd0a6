"""Training in several processes started by torchrun, with DistributedDataParallel (ddp) or FSDP2 (fsdp).

    torchrun --nproc-per-node=2 -m regard train --engine fsdp ...

Each process reads its share of the rows of every batch. With ddp each holds the whole model, and gradients are averaged; with
fsdp each holds a part of every weight, gradient and moment, and gathers the weights of a block when it needs them.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from regard.errors import ConfigError, RegardError
from regard.train.config import TrainConfig
from regard.train.single_process import Engine, SingleProcess

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # environment variables set by torchrun
TIMEOUT_SECONDS = 600.0  # of an exchange: if one process hangs, the others end after this
PREPARE_TIMEOUT_SECONDS = 86400.0  # that the other processes wait while the first prepares a text
# torch has no class for these errors of gloo
CONNECTION_ERRORS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
ENGINE_COUNTER = count()  # numbers the engines: each has its own prefix in torchrun's store


@contextmanager
def start_engine(config: TrainConfig, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[Engine]:
    """Yield the engine of this process: the config's engine if torchrun started it, else that of a single process.

    The process group is destroyed when the context ends. An error in one process ends all of them and is reported once, by the
    process that raised it. Raises ConfigError for an environment that is not torchrun's, RegardError if another process ended
    or stopped responding.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        yield SingleProcess(select_device(0))
        return
    rank, world, local = read_ranks()
    device = select_device(local)
    store = join_process_group(rank, world, device, timeout_seconds)
    engine = ENGINE_CLASSES[config.engine](rank, world, device, config.precision)
    try:
        yield engine
    except Exception as error:
        explained = explain_lost_process(error, engine, timeout_seconds)
        if isinstance(explained, RegardError) and is_error_reported(store, f"{rank} {explained}"):
            raise SystemExit(2) from None
        if explained is error:
            raise
        raise explained from None
    finally:
        distributed.destroy_process_group()


def read_ranks() -> tuple[int, int, int]:
    """Return the rank of this process, the number of processes, and the local rank on this machine."""
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}: torchrun sets them all. Unset them?")
    try:
        rank, world, local = (int(os.environ[name]) for name in TORCHRUN_VARIABLES[:3])
    except ValueError:
        came = ", ".join(f"{name}={os.environ[name]!r}" for name in TORCHRUN_VARIABLES[:3])
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK are numbers, which torchrun sets; got {came}.") from None
    return rank, world, local


def select_device(local: int) -> torch.device:
    """Return the accelerator of a process, one for each local rank, or the CPU if the machine has none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local} of this machine has no accelerator: there are {torch.cuda.device_count()}. "
            f"Use --nproc-per-node={torch.cuda.device_count()}."
        )
    return torch.device("cuda", local)


def join_process_group(rank: int, world: int, device: torch.device, timeout_seconds: float) -> Store:
    """Create torch's process group, gloo between CPUs and nccl between accelerators, and return the store of the processes."""
    from torch.distributed.rendezvous import rendezvous

    name, backend, timeout = f"regard/{next(ENGINE_COUNTER)}", "gloo", timedelta(seconds=timeout_seconds)
    try:
        store = PrefixStore(name, next(iter(rendezvous("env://", timeout=timeout)))[0])
        only = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend, only = "cpu:gloo,cuda:nccl", device  # checkpoints are written from the CPU's memory
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=only)
    except (distributed.DistError, RuntimeError, ValueError) as error:
        host = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(f"process {rank} of {world} could not join the others at {host}: {get_first_line(error)}") from None
    return store


def explain_lost_process(error: Exception, engine: Engine, timeout_seconds: float) -> Exception:
    """Convert the error of a failed exchange to a RegardError; return any other error unchanged."""
    if not isinstance(error, RuntimeError) or isinstance(error, RegardError):
        return error
    if not isinstance(error, distributed.DistError) and not any(word in str(error) for word in CONNECTION_ERRORS):
        return error
    return RegardError(
        f"process {engine.rank} of {engine.world} lost the others: one of them ended, or did not respond for "
        f"{timeout_seconds:,.0f} seconds. The same command resumes from the last checkpoint."
    )


def is_error_reported(store: Store, error: str) -> bool:
    """Return whether another process has already reported an error, and record that one has from now on."""
    try:
        return bool(store.compare_set("error", "", error).decode() != error)
    except RuntimeError:  # the process that hosts the store has ended
        return False


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error message, without the locations in torch's sources that follow it."""
    return str(error).partition("\n")[0]


class DistributedEngine(ABC):
    """The common part of both distributed engines."""

    def __init__(self, rank: int, world: int, device: torch.device, precision: str) -> None:
        self.rank, self.world, self.device, self.precision = rank, world, device, precision
        self._patient = distributed.new_group(backend="gloo", timeout=timedelta(seconds=PREPARE_TIMEOUT_SECONDS))

    @contextmanager
    def run_main_process_first(self) -> Iterator[None]:
        """Wait for the first process to leave this context before entering it in any other."""
        if self.rank:
            distributed.barrier(self._patient)
        yield
        if not self.rank:
            distributed.barrier(self._patient)

    @abstractmethod
    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model as training calls it."""

    @abstractmethod
    def make_autocast_context(self, precision: str) -> AbstractContextManager[object]:
        """Return a context in which matrix products are rounded to bfloat16 if that is the precision."""

    @abstractmethod
    def make_gradient_sync_context(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one backward pass."""

    def gather_weights(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which each process has all weights outside the blocks."""
        return nullcontext()

    @abstractmethod
    def compute_gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of all gradients as one vector."""

    def sum_over_processes(self, number: float) -> float:
        """Return the sum of a number over all processes."""
        x = torch.tensor(number, dtype=torch.float64, device=self.device)
        distributed.all_reduce(x)
        return float(x)

    def collect_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the full state dict in the first process's CPU memory; empty in the others."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_model_state_dict(model, options=options)
        return {} if self.rank else cast(dict[str, Tensor], found)


class DDPEngine(DistributedEngine):
    """DDP: each process holds the whole model, and gradients are averaged while the backward pass is still running."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Wrap the model so that its gradients are views of the buffers that are exchanged."""
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def make_autocast_context(self, precision: str) -> AbstractContextManager[object]:
        """Return a context in which matrix products are rounded to bfloat16 if that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def make_gradient_sync_context(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one backward pass; gradients accumulate locally and are exchanged in the last one."""
        return nullcontext() if last else cast(DistributedDataParallel, model).no_sync()

    def compute_gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of all gradients, which are complete and equal in all processes."""
        return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])


class FSDPEngine(DistributedEngine):
    """FSDP2: each process holds a part of every weight, gradient and moment.

    With bfloat16, weights are gathered and multiplied in bfloat16 and gradients are summed in float32: no autocast is needed.
    """

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard the blocks, and then the rest of the model: a GPT-2's embeddings, one of which is also its head."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        half = self.precision == "bfloat16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        for block in cast(Iterable[nn.Module], getattr(model, "blocks", ())):  # a translator has none and is sharded as one
            fully_shard(block, mesh=mesh, mp_policy=policy)
        whole = fully_shard(model, mesh=mesh, mp_policy=policy)
        assert isinstance(whole, FSDPModule)
        return cast(nn.Module, whole)

    def make_autocast_context(self, precision: str) -> AbstractContextManager[object]:
        """Return an empty context: the weights are already gathered in bfloat16 if that is the precision."""
        return nullcontext()

    def make_gradient_sync_context(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one backward pass; gradients accumulate unsharded and are exchanged in the last one."""
        from torch.distributed.fsdp import FSDPModule

        cast(FSDPModule, model).set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def gather_weights(self, model: nn.Module) -> Iterator[None]:
        """Gather all weights outside the blocks in each process: for a translator, all of its weights."""
        from torch.distributed.fsdp import FSDPModule

        whole = cast(FSDPModule, model)
        whole.unshard()
        try:
            yield
        finally:
            whole.reshard()

    def compute_gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of all gradients, of which each process holds its parts."""
        from torch.distributed.tensor import DTensor

        norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


ENGINE_CLASSES: dict[str, type[DistributedEngine]] = {"ddp": DDPEngine, "fsdp": FSDPEngine}
