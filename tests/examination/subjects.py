"""What the tests examine: a layer whose weights are any function of its scores, and a case of a subject."""

import torch
from torch import nn

from regard import Causal
from regard.examination.case import Case
from regard.examination.subject import inputs
from regard.examination.subject.adapters import iterate_adapters

D_IN, D_OUT = 7, 5


class Layer(nn.Module):
    """weights(scores) v, the scores scaled."""

    def __init__(self, weights, d_in=D_IN, d_out=D_OUT):
        super().__init__()
        torch.manual_seed(0)
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))
        self.weights = weights

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        return self.weights(q @ k.mT / q.shape[-1] ** 0.5) @ v


class Residual(nn.Module):
    """A layer beside its input."""

    def __init__(self, weights):
        super().__init__()
        self.layer = Layer(weights, D_IN, D_IN)

    def forward(self, x):
        return x + self.layer(x)


def hiding(hidden, value=-torch.inf):
    """Weights where hidden(q, k), a bool table, has the score `value` before the softmax."""
    return lambda scores: scores.masked_fill(hidden(*scores.shape[-2:]), value).softmax(-1)


def later(q, k, diagonal=1):
    """The lectures' table of what is hidden."""
    return torch.ones(q, k, dtype=torch.bool).triu(diagonal)


def make_hidden_table(rule):
    """What a rule hides."""
    return lambda q, k: ~rule.table(q, k)


CAUSAL = Layer(hiding(later))


def case_of(subject, expects=None, sample=None, offset=0):
    """The case that examine would make."""
    expects = expects or Causal()
    given = None if sample is None else (sample,) if isinstance(sample, torch.Tensor) else sample
    chosen, shapes = inputs.find_working_inputs(list(iterate_adapters(subject, expects, offset)), expects, given, offset)
    return Case(chosen, expects, shapes, None, offset)


def kinds(said):
    """The kinds of the findings among what a probe said."""
    return [one.kind for one in said if hasattr(one, "kind")]
