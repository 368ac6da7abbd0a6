"""Messages name modules by their paths, and the recorded model, whose path is empty, as "the model"."""

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import CutEdges, KnockOut, MissingNameError
from regard.observe.recorded_runs.part_names import describe_module, join_names


class Distances(nn.Module):
    """Attention by distances, whose weights are stored as they are, with a note."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the context of one head."""
        return torch.softmax(-torch.cdist(x, x), dim=-1) @ x


class Activated(nn.Module):
    """Attention without a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the context of one head."""
        return torch.relu(x @ x.transpose(1, 2)) @ x


def record_model(model: nn.Module, forwards: int = 1) -> regard.Recording:
    """Return the recording of so many forwards."""
    torch.manual_seed(0)
    with regard.record(model) as recording:
        for _ in range(forwards):
            model(torch.randn(2, 5, 3))
    return recording


def test_a_module_is_its_path_and_the_empty_path_is_the_model():
    assert [describe_module("h.0"), describe_module("")] == ["h.0", "the model"]
    assert join_names(["", "h.0"]) == "the model, h.0"
    assert join_names([*"abc"], most=1) == "a and 2 more"
    assert join_names([]) == "nothing"


def test_notes_and_errors_call_a_recorded_model_the_model():
    recording = record_model(Distances())
    assert recording.notes
    assert all(note.startswith("the model: its scores are ") for note in recording.notes)
    for call in (lambda: recording["x"], lambda: recording.map("x"), lambda: regard.heads(recording, layers=["x"])):
        with pytest.raises(MissingNameError, match=r"Recorded: the model\.$"):
            call()


def test_one_call_and_one_module_are_in_the_singular():
    assert repr(record_model(Distances())) == "Recording(Distances, 1 run, 1 call of 1 module)"
    twice = record_model(Distances(), forwards=2)
    assert repr(twice) == "Recording(Distances, 2 runs, 2 calls of 1 module)"
    assert repr(twice.last) == "Run(1 call of 1 module)"
    assert repr(record_model(nn.Sequential(Distances(), Distances())).last) == "Run(2 calls of 2 modules)"


def test_a_change_that_was_not_applied_names_its_layers():
    model, x = Distances(), torch.randn(2, 5, 3)
    warned = pytest.warns(UserWarning, match=r"^KnockOut of layer 3 was not applied: .* ran there: layer 0 is the model\.$")
    with warned, regard.intervene(model, KnockOut(layer=3)):
        model(x)
    for layer, where in ((None, "all layers"), ("", "the model"), ("h.0", "layer 'h.0'")):
        warned = pytest.warns(UserWarning, match=f"^CutEdges of {where} was not applied: no cross attention ran there\\.$")
        with warned, regard.intervene(model, CutEdges(layer=layer, keys=0, kind="cross")):
            model(x)
