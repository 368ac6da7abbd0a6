"""Generating with SmolLM2-135M-Instruct: beside transformers' own generate, the same weights, greedy.

Equal are the tokens in float32; of weights in fewer bits the largest difference of the logits from float32's is given, as a
share of the logits' deviation. The page also lists the likeliest alternatives of each token, records the prompt, and then reads
the new tokens once more to record them and to list what each looked at. Needs --model smollm2, see docs/heads.md.
"""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import CAUSAL_LM, TransformersModel, load_model
from regard.generate import generate, quantise
from regard.models import TransformersDecoder
from regard.show.page.session import GenerationRequest, Session

TITLE = "Generating with SmolLM2-135M-Instruct: tokens a second, greedy"
COLUMNS = ["prompt", "new", "by", "weights", "seconds", "tokens a second", "logits off float32's by"]
CASES = ((16, 128), (1000, 32))  # prompt, new tokens
WEIGHTS = ("bfloat16", "int8", "int4")


class NumberedModel(TransformersModel):
    """A model whose texts are the numbers of tokens, so that the page reads the same prompt as the others."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(number) for number in text.split()]

    def list_ends(self) -> list[int]:
        """Return no tokens: every text has the same length."""
        return []


def run(peak: dict[torch.dtype, float]) -> Table:
    """Time each way in turn, after the tokens in float32 are found to be equal."""
    table, loaded = Table(TITLE, COLUMNS), load_model(SMOLLM2, CAUSAL_LM)
    assert isinstance(loaded, TransformersModel)
    model, numbered = loaded.model, NumberedModel(SMOLLM2, loaded.model, loaded.tokenizer)
    model.generation_config.eos_token_id = None
    models = {"float32": model, **{to: quantise(model, to) for to in WEIGHTS}}
    with torch.inference_mode():
        for prompt, new in CASES:
            tokens = torch.randint(0, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(prompt))
            expected = generate_by_transformers(model, tokens, new)
            for found in (generate_by_regard(model, tokens, new), generate_on_page(numbered, tokens, new)):
                assert torch.equal(found, expected), f"not the same tokens: {found.tolist()} and {expected.tolist()}"
            exact = model(tokens).logits
            ways = {"transformers, float32": partial(generate_by_transformers, model, tokens, new)}
            ways |= {f"regard, {to}": partial(generate_by_regard, one, tokens, new) for to, one in models.items()}
            ways["regard's page, float32"] = partial(generate_on_page, numbered, tokens, new)
            medians = time_contenders({name: partial(count_tokens, way) for name, way in ways.items()}, 0.0).medians
            for name, milliseconds in medians.items():
                by, weights = name.split(", ")
                error = float((models[weights](tokens).logits - exact).abs().max() / exact.std())
                table.add(prompt, new, by, weights, milliseconds / 1e3, 1e3 * new / milliseconds, error)
    return table


def generate_by_transformers(model: nn.Module, tokens: Tensor, new: int) -> Tensor:
    """Return the new tokens by transformers' generate."""
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, tokens.shape[1] :]  # type: ignore[operator, no-any-return]


def generate_by_regard(model: nn.Module, tokens: Tensor, new: int) -> Tensor:
    """Return the new tokens by regard.generate."""
    return torch.cat(list(generate(TransformersDecoder(model), tokens, new, temperature=0)))


def generate_on_page(model: NumberedModel, tokens: Tensor, new: int) -> Tensor:
    """Return the new tokens as the page writes them, once it has recorded the text."""
    asked = GenerationRequest(" ".join(map(str, tokens[0].tolist())), new, temperature=0.0)
    *lines, last = Session(None, model).generate_text(asked, lambda: None)
    assert "recording" in last
    return torch.tensor([line["token"] for line in lines if "token" in line])  # the first may say that loops are compiled


def count_tokens(way: partial[Tensor]) -> Tensor:
    """Return the number of tokens that a way generates, which is the same for all."""
    return torch.tensor(way().numel())
