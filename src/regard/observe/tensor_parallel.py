"""The heads that the ranks of a tensor-parallel model recorded, joined to the recording of the whole model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.errors import ConfigError
from regard.mechanism.arguments import check_instance
from regard.observe.files.deserialize import deserialize_recording
from regard.observe.files.serialize import serialize_recording
from regard.observe.interception.functions.distributed_tensors import BATCH_PART
from regard.observe.recorded_runs.run import Call, Run
from regard.observe.recording import Recording
from regard.observe.stored_calls.joined_heads import UNLIKE, join_head_histories
from regard.observe.stored_calls.kv_history import KVHistory

OTHER_ROWS = "the ranks recorded different rows of the batch: gather those of each part of the batch by themselves, with group="


def gather_heads(recording: Recording, group: Any = None) -> Recording | None:
    """Return the recording of all heads on the first rank of a process group, None on the others; every rank calls it.

    Each rank of a tensor-parallel model records its own heads. A module that every rank runs whole is kept once.
    Raises ConfigError on the first rank if the ranks recorded different calls, different rows of a batch or layers without a
    softmax, and everywhere if torch.distributed is not initialized.
    """
    import torch.distributed as dist

    check_instance("recording", recording, Recording)
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: call gather_heads in each process of torchrun.")
    if group is not None:
        check_instance("group", group, dist.ProcessGroup, "It is made by torch.distributed.new_group.")
    is_first = dist.get_rank(group) == 0
    gathered_parts: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    dist.gather_object(serialize_recording(recording), gathered_parts, group=group, group_dst=0)
    return None if gathered_parts is None else join_heads([deserialize_recording(*one) for one in gathered_parts])


def join_heads(recordings: Sequence[Recording]) -> Recording:
    """Return one recording with the heads of several, in their order. Raises ConfigError if their calls differ."""
    first = recordings[0]
    if len({len(one.runs) for one in recordings}) > 1:
        raise ConfigError(UNLIKE)
    if len({tuple(note for note in one.notes if BATCH_PART in note) for one in recordings}) > 1:
        raise ConfigError(OTHER_ROWS)
    missed = list(dict.fromkeys(call for one in recordings for call in one.missed))
    runs = [join_runs(runs) for runs in zip(*(one.runs for one in recordings), strict=True)]
    return replace(first, runs=runs, missed=missed)


def join_runs(runs: Sequence[Run]) -> Run:
    """Return one run with the heads of several."""
    if any(run.implicit_histories for run in runs):
        raise ConfigError("layers without a softmax are recorded by each rank, and are not joined.")
    lists = [run.softmax_calls for run in runs]
    if len({tuple((call.name, call.kind, call.step) for call in calls) for calls in lists}) > 1:
        raise ConfigError(UNLIKE)
    new_histories: dict[int, KVHistory] = {}
    calls = []
    for each in zip(*lists, strict=True):
        owner = id(each[0].history)
        if owner not in new_histories:
            new_histories[owner] = join_rank_heads([call.history for call in each])
        calls.append(
            Call(new_histories[owner], new_histories[owner].stored_calls[each[0].history.stored_calls.index(each[0].stored)])
        )
    histories = {key: new_histories[id(one)] for key, one in runs[0].histories.items()}
    return replace(runs[0], histories=histories, calls=[*calls])


def join_rank_heads(histories: Sequence[KVHistory]) -> KVHistory:
    """Return one history with the heads of several; the first where all are the same, as in a module that is not split."""
    first = histories[0]
    if len({(len(one.keys), len(one.stored_calls)) for one in histories}) > 1:
        raise ConfigError(UNLIKE)
    if all(have_equal_calls(first, one) for one in histories[1:]):
        return first
    if len({stored.q.shape[1] / one.keys[0].shape[1] for one in histories for stored in one.stored_calls}) > 1:
        raise ConfigError(f"{first.name}: the ranks share keys among different numbers of heads, so they are no single map.")
    return replace(join_head_histories(first.name, histories), modules=())


def have_equal_calls(one: KVHistory, other: KVHistory) -> bool:
    """Return whether two histories hold the same queries and keys."""
    pairs = [*zip(one.keys, other.keys, strict=True)]
    pairs += [(ours.q, theirs.q) for ours, theirs in zip(one.stored_calls, other.stored_calls, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)
