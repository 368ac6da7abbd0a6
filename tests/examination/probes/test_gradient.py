"""Weights that cannot be trained are found; weights that shall not be are no fault."""

import pytest
import torch
from torch import nn

from examination import right_designs as designs
from examination import wrong_training as wrong
from examination.subjects import D_IN, D_OUT, Layer, case_of, hiding, kinds, later
from regard import Given
from regard.examination.probes.gradient import check_case

weigh = hiding(later)


def findings(layer, **told):
    return [one for one in check_case(case_of(layer.eval(), **told)) if hasattr(one, "kind")]


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (wrong.Detached, ("query and key",)),
        (wrong.WithoutGradient, ("query", "key and value")),
        (wrong.WeightData, ("query",)),
        (wrong.OutputUnused, ("gate",)),
        (wrong.HeadsInAList, ("heads",)),
    ],
)
def test_a_weight_that_gets_no_gradient_is_named(made, names):
    (finding,) = findings(made())
    assert finding.kind == "not trainable"
    assert all(name in finding.evidence for name in names)


def test_a_layer_without_any_gradient_is_found():
    class Nothing(Layer):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    (finding,) = findings(Nothing(weigh))
    assert "3 weights" in finding.evidence


def test_a_gradient_of_nan_is_found_where_outputs_are_numbers():
    rows = torch.arange(6) < torch.tensor([3, 6])[:, None]
    between = Given((rows[:, :, None] & rows[:, None, :]).unsqueeze(1))
    (finding,) = findings(wrong.GradientOfNothing(), expects=between, sample=torch.randn(2, 6, wrong.C))
    assert "NaN" in finding.evidence


def test_a_tensor_that_is_no_parameter_is_found():
    layer = Layer(weigh)
    layer.scaling = [torch.ones(D_OUT, requires_grad=True)]
    (finding,) = findings(layer)
    assert "scaling" in finding.evidence


def test_frozen_weights_are_no_finding():
    layer = Layer(weigh).requires_grad_(False)
    layer.W_value.requires_grad_(True)
    assert findings(layer) == []
    assert findings(layer.requires_grad_(False)) == []


def test_an_output_that_begins_with_zeros_is_no_finding():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.output = Layer(weigh), nn.Linear(D_OUT, D_IN)
            nn.init.zeros_(self.output.weight)

        def forward(self, x):
            return x + self.output(self.attention(x))

    assert findings(Residual()) == []


def test_what_a_model_holds_for_other_outputs_is_no_finding():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layers, self.pooler = nn.Embedding(9, D_IN), nn.ModuleList([Layer(weigh)]), nn.Linear(D_IN, D_IN)

        def forward(self, x):
            return self.layers[0](x)

    assert findings(Model()) == []


def test_weights_of_an_argument_that_is_not_given_cannot_be_determined():
    (unknown,) = check_case(case_of(designs.OptionalContext().eval()))
    assert "k_context and v_context" in unknown.what

    class Masked(designs.OptionalContext):
        def forward(self, x, key_padding_mask=None):
            return super().forward(x)

    (finding,) = findings(Masked())
    assert "k_context" in finding.evidence


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_that_takes_only_one_way_back_is_no_finding():
    (checked,) = check_case(case_of(designs.Checkpointed().eval()))
    assert checked.sensitivity == "4 weights"


def test_weights_that_were_made_in_inference_mode_cannot_be_determined():
    with torch.inference_mode():
        layer = Layer(weigh)
    (unknown,) = check_case(case_of(layer))
    assert "inference_mode" in unknown.needs


def test_gradients_that_were_there_stay():
    layer = Layer(weigh)
    layer.W_query.weight.grad = torch.ones_like(layer.W_query.weight)
    said = list(check_case(case_of(layer)))
    assert kinds(said) == []
    assert torch.equal(layer.W_query.weight.grad, torch.ones_like(layer.W_query.weight))
    assert layer.W_key.weight.grad is None
