"""A model run twice, without and with a recording, and what both must agree on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bounds import assert_within, attention_bounds
from regard import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.observe import Recording, load, record

Run = Callable[[nn.Module], Any]
EQUAL = 1e-10  # relative, or of weights between 0 and 1, in float64: far above rounding, far below any mistake


def record_and_compare(model: nn.Module, run: Run, missing: bool = False, **options: Any) -> tuple[Recording, Any]:
    """The recording and the result of a run; its result and the random state are to the bit those of a run that nobody saw."""
    torch.manual_seed(7)
    plain = run(model)
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    if missing:
        import warnings

        with warnings.catch_warnings(record=True) as said, record(model, **options) as recording:
            warnings.simplefilter("always")
            seen = run(model)
        told = [str(one.message) for one in said if "not recorded" in str(one.message)]
        assert len(told) == 1, told
        assert recording.missed
    else:
        with record(model, **options) as recording:
            seen = run(model)
        assert not recording.missed, recording.missed
    assert torch.equal(torch.random.get_rng_state(), state)
    assert are_equal(seen, plain)
    return recording, seen


def are_equal(one: Any, other: Any) -> bool:
    """Whether two results are equal to the bit, a NaN to a NaN."""
    ours, theirs = list(flat(one)), list(flat(other))
    return len(ours) == len(theirs) and all(map(are_identical, ours, theirs))


def are_identical(one: Tensor, other: Tensor) -> bool:
    if one.is_nested:
        return all(map(are_identical, one.unbind(), other.unbind()))
    return (
        one.dtype == other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Assert that two tensors are equal but for rounding in float64."""
    assert (found - expected).abs().max() < EQUAL * expected.abs().max()


def record_stored_bias(model: nn.Module, x: Tensor, kind: type[Tensor], folder: Path) -> Recording:
    """The recording of a layer that keeps its weights, all of whose bias is stored in a form; its file has the same weights."""
    with torch.no_grad(), record(model) as recording:
        out = model(x)
    weights = model[0].weights
    with torch.no_grad():
        assert torch.equal(out, model(x))
    recording.save(folder / "recording")
    for one in (recording, load(folder / "recording")):
        assert isinstance(one.map(0).planes.request.bias, kind)
        torch.testing.assert_close(one.map(0).dense(), weights, rtol=0, atol=EQUAL)
    assert not recording.notes
    assert not recording.missed
    return recording


def assert_same_mechanism(loaded: ImplicitMap, found: ImplicitMap) -> None:
    """Assert that two maps have the same numbers; entries computed from them can differ, as products do by the alignment."""
    ours, theirs = loaded.mechanism.tensors, found.mechanism.tensors
    assert type(loaded.mechanism) is type(found.mechanism)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


def flat(x: Any) -> Any:
    if isinstance(x, Tensor):
        yield x.detach()
    elif isinstance(x, dict):
        for value in x.values():
            yield from flat(value)
    elif isinstance(x, list | tuple):
        for value in x:
            yield from flat(value)


def distance(found: AttentionMap, weights: Tensor) -> float:
    """How far a map is from the weights (b, h, q, k), or from what broadcasts to them."""
    return float((found.dense().double() - weights.detach().double()).abs().max())


def assert_map(found: AttentionMap, weights: Tensor, q: Tensor, k: Tensor, **settings: Any) -> None:
    """Fail unless each weight of a map lies within its bound of the exact one, for the numbers q and k that the map is of.

    settings: the scale and the bias of the scores, as attention_bounds takes them. Half precision is computed in float32.
    """
    q, k = (x.detach().reshape(-1, *(1, *x.shape)[-3:]) for x in (q, k[..., : weights.shape[-1], :]))
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights = weights.detach().expand(found.shape)
    assert_within(found.dense(), weights, attention_bounds(dtype, q, k, k, weights, **settings).weights)


def compute_weights(
    q: Tensor, k: Tensor, visible: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ scale + bias) over the visible keys, in float64; a query that sees nothing has weights 0."""
    q, k = q.detach().double(), k.detach().double()
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.dim() > 2 else k
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num()
