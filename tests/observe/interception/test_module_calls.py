"""Which module runs inside which: errors and interruptions, threads, methods called by themselves, modules of every kind."""

import asyncio
import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from observe.recording_checks import are_identical, record_and_compare
from regard import ConfigError
from regard.observe import record
from regard.observe.interception.thread_state import STATE

B, H, T, C = 2, 3, 5, 12
X = torch.randn(B, T, C)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers, between which something may happen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Attention(), Attention()
        self.between = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.between is not None:
            self.between()
        return self.second(x)


def raising(error: type[BaseException]):
    def between() -> None:
        raise error

    return between


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_forward_that_fails_leaves_nothing_running(error):
    model = Model()
    with record(model) as recording:
        model.between = raising(error)
        with pytest.raises(error):
            model(X)
        assert not STATE.frames
        model.between = None
        model(X)
    assert [call.name for call in recording.calls] == ["first", "first", "second"]
    assert [[call.name for call in run.calls] for run in recording.runs] == [["first"], ["first", "second"]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_that_ends_the_block(error):
    model = Model()
    model.between = raising(error)
    with pytest.raises(error), record(model) as recording:
        model(X)
    assert [call.name for call in recording.calls] == ["first"]


def iterate_recordings(model):
    with record(model) as recording:
        yield recording, model(X)
        yield recording, model(X)


def in_thread(function, *args):
    """What a function returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_a_generator_closed_in_another_thread_than_it_began_in_leaves_nothing():
    made = in_thread(lambda: [generator := iterate_recordings(Model()), next(generator)])
    made[0].close()
    model = Model()
    begun = iterate_recordings(model)
    recording, _ = next(begun)
    in_thread(begun.close)
    assert not torch.overrides._get_current_function_mode_stack()
    assert not STATE.watchers
    assert not STATE.skippable_modules
    model(X)
    assert len(recording.calls) == 2
    assert len(record_and_compare(model, lambda m: m(X))[0].calls) == 2


def test_a_generator_closed_in_another_thread_leaves_the_recordings_of_its_own():
    model = Model()
    with record(model) as outer:
        begun = iterate_recordings(model)
        inner, _ = next(begun)
        in_thread(begun.close)
        model(X)
    assert (len(outer.calls), len(inner.calls)) == (4, 2)


def test_a_generator_that_goes_on_in_another_thread_says_what_it_did_not_record():
    begun = iterate_recordings(Model())
    recording, _ = next(begun)
    in_thread(next, begun)
    assert [(one.kernel, one.module) for one in recording.missed] == [("threads", "")]
    assert len(recording.calls) == 2
    begun.close()


async def steps_of(model, order):
    """A recording of some forwards, between which other tasks run."""
    with record(model) as recording:
        for _ in range(3):
            await asyncio.sleep(0)
            model(X)
            order.append(model)
    return recording


def test_tasks_that_take_turns_are_distinguished():
    model, other, order = Model(), Model(), []

    async def both():
        return await asyncio.gather(*(steps_of(one, order) for one in (model, other, model)))

    recordings = asyncio.run(both())
    assert order == [model, other, model] * 3
    for recording in recordings:
        assert len(recording.runs) == 3
        assert len(recording.calls) == 6
        assert not recording.missed


def test_a_forward_in_a_task_that_does_not_record_is_missed():
    model = Model()

    async def run_model():
        for _ in range(3):
            await asyncio.sleep(0)
            model(X)

    async def both():
        return (await asyncio.gather(steps_of(model, []), run_model()))[0]

    with pytest.warns(UserWarning, match="another task than record"):
        recording = asyncio.run(both())
    assert len(recording.runs) == 3
    assert [(one.kernel, one.module) for one in recording.missed] == [("tasks", "")]


def test_tasks_that_begin_inside_the_block_are_recorded():
    model = Model()

    async def run_model():
        for _ in range(3):
            await asyncio.sleep(0)
            model(X)

    async def both():
        with record(model) as recording:
            await asyncio.gather(run_model(), run_model())
        return recording

    recording = asyncio.run(both())
    assert len(recording.runs) == 6
    assert not recording.missed
    with record(model) as recording:
        asyncio.run(run_model())
    assert len(recording.runs) == 3


def test_a_model_that_a_task_runs_in_a_thread_is_missed():
    model = Model()

    async def aside():
        with record(model) as recording:
            await asyncio.to_thread(model, X)
        return recording

    with pytest.warns(UserWarning, match="another thread than record"):
        recording = asyncio.run(aside())
    assert [(one.kernel, one.module) for one in recording.missed] == [("threads", "")]
    with pytest.raises(ConfigError, match=r"nothing was recorded.*another thread"):
        recording.map(0)


def test_a_model_that_is_never_called():
    with record(Model()) as recording:
        pass
    assert not recording.calls
    assert not recording.missed


def test_a_method_called_by_itself_is_reported_and_its_parts_are_recorded():
    model = Model()
    with record(model) as recording:
        model.forward(X)
    assert [call.name for call in recording.calls] == ["first", "second"]
    layer = Attention()
    recording, _ = record_and_compare(layer, lambda m: m.forward(X), missing=True)
    assert "forward was called" in recording.missed[0].reason


def test_attention_outside_of_any_module_is_nobodys():
    recording, _ = record_and_compare(Model(), lambda m: scaled_dot_product_attention(X, X, X))
    assert not recording.calls


def test_two_threads_record_two_models_and_do_not_mix():
    models, found, ready = [Model(), Model()], {}, threading.Barrier(2)

    def run(n):
        with record(models[n]) as recording:
            for _ in range(20):
                ready.wait()
                models[n](X)
        found[n] = recording

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    for n in range(2):
        assert len(found[n].calls) == 40
        assert len(found[n].runs) == 20
        assert not found[n].missed


def test_two_threads_record_one_model_each_its_own_forwards():
    model, ready = Model(), threading.Barrier(2)

    def run(times):
        with record(model) as recording:
            ready.wait()
            for _ in range(times):
                model(X)
            ready.wait()
        return recording

    with ThreadPoolExecutor(2) as pool:
        recordings = list(pool.map(run, (5, 7)))
    assert [len(recording.runs) for recording in recordings] == [5, 7]
    assert not any(recording.missed for recording in recordings)


@pytest.mark.parametrize("inside", [lambda model: model, lambda model: nn.Sequential(nn.Identity(), model)])
@pytest.mark.parametrize("recording_too", [False, True])
def test_a_forward_in_another_thread_than_records_is_missed(inside, recording_too):
    model, other = Model(), Model()

    def run_model():
        if recording_too:  # of another model
            with record(other):
                model(X)
        else:
            inside(model)(X)

    with pytest.warns(UserWarning, match="another thread than record"), record(model) as recording:
        [run() for run in (lambda: model(X), lambda: in_thread(run_model), lambda: model(X))]
    assert [(one.kernel, one.module) for one in recording.missed] == [("threads", "")]
    assert len(recording.runs) == 2


def test_a_forward_in_another_thread_of_a_part_is_missed_by_its_name():
    model = Model()
    with pytest.warns(UserWarning, match="another thread than record"), record(model) as recording:
        in_thread(model.second, X)
    assert [(one.kernel, one.module) for one in recording.missed] == [("threads", "second")]


def test_a_backward_pass_in_another_thread_runs_nothing_that_was_not_seen():
    model = Model()
    with record(model) as recording:
        out = torch.utils.checkpoint.checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
        in_thread(out.sum().backward)
    assert len(recording.calls) == 2
    assert not recording.missed


def test_copies_and_pickles_made_inside_the_block_hold_nothing_of_ours():
    model = Model()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with record(model):
        expected = model(X)
        assert {name: dict(vars(part)) for name, part in model.named_modules()} == before
        other, bytes_, file = copy.deepcopy(model), pickle.dumps(model), io.BytesIO()
        torch.save(model, file)
    assert b"regard" not in bytes_
    assert b"regard" not in file.getvalue()
    assert are_identical(other(X), expected)
    assert are_identical(pickle.loads(bytes_)(X), expected)


def test_hooks_of_the_program_see_what_they_saw():
    model, seen = Model(), []
    model.first.register_forward_pre_hook(lambda m, args: seen.append("before"))
    model.first.register_forward_hook(lambda m, args, out: seen.append("after") or out * 2)
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        recording, _ = record_and_compare(model, lambda m: m(X))
    finally:
        everywhere.remove()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert len(recording.calls) == 2


def test_a_hook_that_attends_is_part_of_its_module():
    model = Model()
    record_and_compare(model, lambda m: m(X))  # from now on its parts are known not to attend
    model.second.project.register_forward_hook(lambda m, args, out: out + scaled_dot_product_attention(X, X, X).mean())
    for _ in range(2):
        recording, _ = record_and_compare(model, lambda m: m(X))
        assert [call.name for call in recording.calls] == ["first", "second.project", "second"]


class Shared(nn.Module):
    """Uses one dropout before attention, in it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.drop(x) @ x.mT
        return self.drop(self.drop(scores.softmax(-1)) @ x)


def test_a_part_that_is_used_inside_and_outside_attention_is_followed():
    model = Shared().train()
    for _ in range(3):
        recording, _ = record_and_compare(model, lambda m: m(X))
        assert recording.names == [""]


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        return self.attn(x) if depth == 2 else self(x, depth + 1) + self.attn(x)


def test_a_module_that_calls_itself():
    recording, _ = record_and_compare(Recursive(), lambda m: m(X))
    assert [call.name for call in recording.calls] == ["attn"] * 3
    assert len(recording.runs) == 1


def test_the_block_begins_inside_a_forward():
    model, found = Model(), []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with record(self.model) as recording:
                found.append(recording)
                return self.model(x)

    Looks()(X)
    assert [call.name for call in found[0].calls] == ["first", "second"]


def test_the_block_ends_inside_a_forward():
    model = Model()
    block = record(model)
    model.between = lambda: block.__exit__(None, None, None)
    recording = block.__enter__()
    model(X)
    assert [call.name for call in recording.calls] == ["first"]


def test_nothing_breaks_where_attention_cannot_be_recorded(monkeypatch):
    from regard.observe.stored_calls.kv_history import KVHistory

    def fails(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(KVHistory, "__init__", fails)
    recording, _ = record_and_compare(Model(), lambda m: m(X), missing=True)
    assert "broken" in recording.missed[0].reason
