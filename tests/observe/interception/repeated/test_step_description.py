"""What ran in a module is described alike all at once and step by step, and otherwise wherever anything in it differs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.observe.interception.repeated.step_description import StepDescriber, UnknownArgumentError


class Holder(nn.Module):
    """A module with a buffer and a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Dropout(0.25).eval()
        self.register_buffer("table", torch.ones(5, 5).triu(1).bool())


def run_steps(holder: Holder, x: Tensor, **changes) -> list[tuple]:
    """The steps of a function of several kinds of arguments, of which `changes` are made."""
    steps, given = [], {"scale": 2.0, "dim": -1, "rows": slice(0, 5), "memory": holder.table, "joined": 1, "p": 0.25} | changes

    def run(function, *args, **kwargs):
        result = function(*args, **kwargs)
        steps.append((function, args, kwargs, result))
        return result

    x = run(Tensor.contiguous, x)
    one, other = run(Tensor.chunk, x, 2, -1)
    joined = run(torch.cat, [one, (one, other)[given["joined"]]], dim=0)
    scores = run(torch.mul, run(torch.matmul, joined, joined.mT), given["scale"])
    table = run(Tensor.__getitem__, given["memory"], (given["rows"], slice(None)))
    weights = run(torch.softmax, run(Tensor.masked_fill, scores, table, -float("inf")), dim=given["dim"])
    holder.part.p = given["p"]
    run(torch.matmul, run(holder.part, weights), joined)
    return steps


def describe(holder: Holder, x: Tensor, steps: list[tuple]) -> StepDescriber:
    found = StepDescriber(holder, [x])
    found.describe(steps)
    return found


X = torch.randn(3, 5, 14)


def test_steps_are_described_at_once_as_one_by_one():
    holder = Holder()
    steps = run_steps(holder, X)
    whole, parts = describe(holder, X, steps), StepDescriber(holder, [X])
    for step in steps:
        parts.describe([step])
    assert whole.description == parts.description
    assert (whole.numbers, whole.given, whole.size) == (parts.numbers, parts.given, parts.size)
    assert len(whole.description) == len(steps)
    assert [x is y for x, y in zip(whole.list_tensors(), parts.list_tensors(), strict=True)] == [True] * len(whole.tensors)


def test_what_a_module_is_given_is_numbered_as_given_though_a_function_returns_it():
    holder = Holder()
    steps = run_steps(holder, X)
    found = describe(holder, X, steps)
    given = [found.list_tensors()[number] for number in found.given]
    assert steps[0][3] is X
    assert given[0] is X
    assert given[-1] is holder.table


CHANGES = {
    "a number": {"scale": 3.0},
    "a number of another type": {"scale": 2},
    "an argument by name": {"dim": 2},
    "a bound of a slice": {"rows": slice(0, 5, 1)},
    "a tensor that the module does not hold": {"memory": torch.ones(5, 5).triu(1).bool()},
    "the memory of a given tensor": {"memory": torch.ones(5, 5).tril(-1).bool().mT},
    "which tensor is in a list": {"joined": 0},
    "the probability of a dropout": {"p": 0.5},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
def test_steps_that_differ_are_described_otherwise(changes):
    holder = Holder()
    same = [describe(holder, X, run_steps(holder, X)).description for _ in range(2)]
    other = describe(holder, X, run_steps(holder, X, **changes)).description
    assert same[0] == same[1] != other


def test_tensors_of_other_shapes_strides_or_modules_are_described_otherwise():
    holder = Holder()
    first = describe(holder, X, run_steps(holder, X)).description
    for x in (torch.randn(2, 5, 14), torch.randn(5, 3, 14).transpose(0, 1), X.double(), nn.Parameter(X)):
        assert describe(holder, x, run_steps(holder, x)).description != first
    steps = run_steps(holder, X)
    assert describe(holder, torch.randn(3, 5, 14), steps).description != first  # the module was not given it
    assert describe(Holder(), X, steps).description != first  # its table is not this module's


def test_a_tensor_with_the_id_of_one_that_was_freed_gets_a_number_of_its_own():
    found, x, numbers = StepDescriber(nn.Module(), []), torch.randn(3), []
    for _ in range(9):
        y = x * 1
        found.describe([(torch.mul, (x, 1), {}, y)])
        numbers.append(found.find_number(y))
        del y
    assert numbers == [*range(1, 10)]


@pytest.mark.parametrize(
    ("args", "result"),
    [
        ((object(),), X),
        (([torch.ones(2), {3}],), X),
        ((torch.ones(2, 2).to_sparse(),), X),
        ((X,), torch.ones(2, 2).to_sparse()),
        ((X,), (X, None)),
    ],
)
def test_arguments_and_results_of_other_types_are_not_described(args, result):
    with pytest.raises(UnknownArgumentError):
        StepDescriber(nn.Module(), []).describe([(F.relu, args, {}, result)])
