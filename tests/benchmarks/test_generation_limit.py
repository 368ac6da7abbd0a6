"""The limit that generation is compared with: what memory and the products of large matrices allow."""

import pytest
import torch

from regard.models import GPT2
from regard.models.gpt2_config import GPT2Config

generation = pytest.importorskip("benchmarks.generation", reason="the engines that it compares with are not installed")
PEAK = {torch.float32: 200.0, torch.bfloat16: 800.0}


def test_a_token_takes_at_least_as_long_as_the_matrices_take_through_memory():
    with torch.device("meta"):
        model = GPT2(GPT2Config(layers=12, heads=12, width=768))
    numbers = sum(x.numel() for name, x in model.named_parameters() if x.dim() == 2 and "position" not in name)
    found = generation.bound_seconds(1, 16, 128, "float32", PEAK, bandwidth=4.0)
    assert found == pytest.approx(128 * 4 * numbers / 4e9, rel=1e-6)
    assert generation.bound_seconds(1, 16, 128, "int4, Q4_0", PEAK, bandwidth=4.0) < found / 7


def test_a_long_prompt_takes_at_least_as_long_as_its_products():
    found = generation.bound_seconds(1, 1000, 1, "float32", PEAK, bandwidth=1e6)
    products = 2 * 12 * 12 * 768**2 * 1000  # of the layers alone
    assert products / 200e9 < found < 1.3 * products / 200e9
    assert generation.bound_seconds(1, 1000, 1, "int8", PEAK, bandwidth=1e6) == pytest.approx(found / 4)
