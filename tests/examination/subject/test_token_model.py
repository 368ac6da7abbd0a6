"""Which subjects are models of token ids, the ids they are asked with, and the outputs that are read."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from examination.whole_models import WIDTH, gpt2, kinds, seeing
from observe import models as others
from regard import Everything
from regard.errors import ConfigError
from regard.examination.whole_models.whole_model import is_model


def test_a_model_is_distinguished_from_a_layer():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.attention = nn.Embedding(16, 12), nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, x):
            return self.attention(*[x + self.places(torch.arange(x.shape[1]))] * 3)[0]

    assert is_model(gpt2())
    assert is_model(others.llama())
    assert not is_model(regard.MultiHeadAttention(14, 30, 17, 0.0, 5))
    assert not is_model(Places())
    assert not is_model(F.scaled_dot_product_attention)
    assert is_model(gpt2(), torch.zeros(2, 5, dtype=torch.long))
    assert not is_model(gpt2(), torch.zeros(2, 5, WIDTH))


def test_the_outputs_of_each_token_are_found_in_what_a_model_returns():
    @dataclass
    class Output:
        loss: None
        logits: torch.Tensor

    for returned in (lambda y: Output(None, y), lambda y: (torch.zeros(()), [y]), lambda y: {"loss": None, "logits": y}):
        model = gpt2()
        plain = model.forward
        model.forward = lambda ids, plain=plain, returned=returned: returned(plain(ids))
        report = regard.examine(model)
        assert report
        assert any("end to end" in one.what for one in report.checked)


def test_a_model_that_gives_the_last_token_alone_gets_the_argument_to_pass():
    model = gpt2()
    plain = model.forward
    model.forward = lambda ids: plain(ids)[:, -1:]
    seeing(model.blocks[3].attention, Everything())
    report = regard.examine(model)
    assert report.findings[0].evidence.startswith("blocks.3.attention: row 0 puts")
    assert any("examine(lambda ids" in one.needs for one in report.unknown)


@pytest.mark.slow
def test_of_a_long_sample_the_first_tokens_are_looked_at_and_some_of_them_changed():
    model = gpt2(context=1000, layers=2)
    report = regard.examine(model, sample=torch.arange(4000).view(4, 1000) % 97)
    assert report
    assert report.notes[0].startswith("token ids (2, 256), the first of 1,000; 16 of the tokens were replaced")
    assert report.reach.words[:3] == ("0", "17", "34")
    feed = model.blocks[1].up
    plain = feed.forward
    feed.forward = lambda x: plain(x + x.mean(1, keepdim=True))
    assert kinds(regard.examine(model, sample=torch.arange(500) % 97)) == ["future leak"]


def test_a_model_that_takes_no_ids_says_what_to_pass_and_raising_on_a_sample_is_found():
    model = gpt2()
    model.forward = lambda ids: 1 / 0
    with pytest.raises(ConfigError, match="sample="):
        regard.examine(model)
    (finding,) = regard.examine(model, sample=torch.arange(6)).findings
    assert finding.kind == "raises"
    assert finding.evidence == "ZeroDivisionError on token ids (1, 6): division by zero"
