"""What moves beside attention is laid at the door of the first module that moves."""

import re

import torch

import regard
from examination.whole_models import Still, gpt2


def test_a_leak_beside_attention_is_laid_at_the_door_of_its_module():
    model = gpt2()
    feed = model.blocks[2].up
    plain = feed.forward
    feed.forward = lambda x: plain(x - x.mean(1, keepdim=True))
    (finding,) = regard.examine(model).findings
    assert finding.kind == "future leak"
    assert finding.evidence.endswith("the first module whose output changes there is blocks.2.up")


def test_outputs_that_are_no_numbers_are_laid_at_a_modules_door_or_a_weights():
    model = gpt2()
    model.blocks[1].norm_feed.forward = lambda x: x * torch.nan
    (finding,) = regard.examine(model).findings
    assert finding.kind == "blind row"
    assert finding.evidence.endswith("the first module with outputs that are not finite is blocks.1.norm_feed")
    model = gpt2()
    model.blocks[2].up.weight.data[3, 5] = torch.nan
    (finding,) = regard.examine(model).findings
    assert "there is NaN or inf in the weight blocks.2.up.weight" in finding.evidence


def test_attention_by_hand_that_leaks_is_named_with_its_weight_and_the_advice_to_hide():
    finding = regard.examine(Still(lambda t: torch.zeros(t, t))).findings[0]
    assert re.match(r"attention: row 0 puts 0\.\d+ on token \d+, which comes later", finding.evidence)
    assert finding.cure.startswith("Apply the expected mask in that layer, before its softmax")
