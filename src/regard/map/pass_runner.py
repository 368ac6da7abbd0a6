"""Run the compiled passes over planes: which thread takes which plane, or which part of one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from regard.compiled.threads import run_parts
from regard.map import pass_inputs
from regard.map.plane import Plane
from regard.mechanism.spans import Span

SMALL = 2**19  # scores up to which one thread is used
Work = TypeVar("Work")
Answer = TypeVar("Answer")


def run_planes(planes: Sequence[Work], work: Callable[[Work, int], Answer], threads: int | None = None) -> list[Answer]:
    """Compute work(plane, threads) for every plane: many planes in parallel, a thread each; few one by one on all threads.

    The threads are those of torch by default.
    """
    threads = threads or torch.get_num_threads()
    if threads == 1 or len(planes) < 4 * threads:
        return [work(plane, threads) for plane in planes]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda plane: work(plane, 1), planes))


def count_parts(planes: Sequence[Plane], threads: int) -> int:
    """Return in how many parts each of some planes is processed: in one if it is small or they are many."""
    return threads if len(planes) < 4 * threads and planes[0].shape[0] * planes[0].shape[1] > SMALL else 1


def run_batch(
    planes: Sequence[Plane], name: str, edges: "pass_inputs.Integers", threads: int, *arguments: Any, rows: Span | None = None
) -> None:
    """Run a compiled pass over planes of one request, in blocks of rows that do not cross an edge, all rows or some.

    `arguments` are passed on to the pass: its arrays have an axis of planes. Planes in one part are packed by the thread that
    takes them, others once for all threads. Planes with a plan of their own are a group each: groups of fewer planes than
    threads are processed in parallel.
    """
    from regard.map.compiled import traversals

    (q, k), parts, function = planes[0].shape, count_parts(planes, threads), getattr(traversals, name)
    groups, most = pass_inputs.group_by_plan(planes), threads if len(planes) * q * k > SMALL else 1

    def run_group(numbers: list[int], threads: int) -> None:
        for some in [numbers] if parts == 1 else [[n] for n in numbers]:
            plane = planes[some[0]]
            inputs = pass_inputs.locate_planes(planes, some)
            scores = pass_inputs.make_unpacked_inputs(plane) if parts == 1 else pass_inputs.make_score_inputs(plane, edges)
            workers = min(threads, parts * len(some))
            for plan in pass_inputs.make_plans(plane, (rows or (0, q), (0, k))):
                own = scores._replace(bias=pass_inputs.get_plan_bias(plane, plan))
                blocks, taken = pass_inputs.make_blocks(plan, edges), np.zeros(1, np.int64)
                given = plan, own, blocks, inputs, taken.ctypes.data, parts

                def work(_: int, given: Any = given) -> None:
                    function(*given, *arguments)

                run_parts(work, workers)

    if parts > 1 or len(groups) == 1 or len(planes) >= most * len(groups):
        run_planes(groups, run_group, most)
    else:
        at_once = min(len(groups), most)
        shares = [most // at_once + (n < most % at_once) for n in range(len(groups))]
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(run_group, groups, shares))


class PerThread(list[Any]):
    """Arrays of which each thread takes its own."""


def run_pass(
    plane: Plane, name: str, edges: "pass_inputs.Integers", threads: int, *arguments: Any, part: pass_inputs.Part | None = None
) -> None:
    """Run a compiled pass over the blocks of a plane, none of which crosses an edge; `arguments` are passed on to the pass."""
    from regard.map.compiled import traversals

    scores, function = pass_inputs.make_score_inputs(plane, edges), getattr(traversals, name)
    threads = threads if plane.shape[0] * plane.shape[1] > SMALL else 1
    for plan in pass_inputs.make_plans(plane, part):
        blocks = pass_inputs.make_blocks(plan, edges)
        given = plan, scores._replace(bias=pass_inputs.get_plan_bias(plane, plan))

        def work(n: int, given: Any = given, blocks: Any = blocks) -> None:
            own = blocks[blocks[:, 0] % threads == n]
            function(*given, own, *(x[n] if isinstance(x, PerThread) else x for x in arguments))

        run_parts(work, threads)
