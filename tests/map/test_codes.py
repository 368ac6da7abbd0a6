import torch

from regard.map.codes import decode_weights, encode_weights


def test_a_code_is_within_one_part_in_five_thousand_of_its_weight():
    weights = torch.logspace(-9, 0, 10_007)
    found = decode_weights(encode_weights(weights))
    assert ((found / weights - 1).abs() < 1 / 5000).all()
    assert encode_weights(torch.ones(1)).item() == 65535


def test_larger_weights_have_no_smaller_codes():
    codes = encode_weights(torch.logspace(-12, 0, 10_007)).to(torch.int32)
    assert (codes.diff() >= 0).all()
    assert codes.min() == 1


def test_a_visible_zero_is_1_and_a_hidden_one_is_0():
    weights = torch.tensor([0.0, 0.0, 1e-30, 0.25])
    assert encode_weights(weights, torch.tensor([True, False, True, True])).tolist() == [1, 0, 1, 65535 - 4096]
    assert encode_weights(weights).tolist() == [0, 0, 1, 65535 - 4096]


def test_nan_has_no_code():
    assert encode_weights(torch.tensor([torch.nan, 1.0])).tolist() == [0, 65535]
