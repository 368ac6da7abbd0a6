"""Small models that the tests of this room continue: a GPT-2, the same as transformers has it, and one that is a table."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import transformers
from torch import nn

from bounds import DRAWS, EXPONENTIAL, estimate_rounding, is_stable_under_rounding, unit_roundoff
from regard.compiled.matrix_formats import LARGEST
from regard.generate.kv_cache import Cache
from regard.generate.quantization import choose_cache_dtype
from regard.matmul import QuantizedLinear
from regard.models import GPT2, GPT2Config

SIZES = {"layers": 2, "heads": 3, "width": 33, "context": 31, "vocabulary": 53}


def gpt2(seed=0, dtype=torch.float64, loud=8.0, **sizes) -> GPT2:
    """Random, its weights so large that its logits are decided."""
    torch.manual_seed(seed)
    model = GPT2(GPT2Config(**{**SIZES, **sizes})).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.1) if name.endswith("bias") else weight.mul_(loud if weight.dim() == 2 else 1)
    return model


def hugging_face(model: GPT2) -> transformers.GPT2LMHeadModel:
    """The same function as transformers computes it."""
    config = model.config
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "n_positions": config.context}
    other = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, vocab_size=config.vocabulary, bos_token_id=None, eos_token_id=None)
    )
    mine, theirs = model.state_dict(), {}
    names = {"norm_attention": "ln_1", "norm_feed": "ln_2", "attention.out_proj": "attn.c_proj"}
    names |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = mine[f"norm.{kind}"]
        for n in range(config.layers):
            parts = [mine[f"blocks.{n}.attention.{part}.{kind}"] for part in ("W_query", "W_key", "W_value")]
            theirs[f"transformer.h.{n}.attn.c_attn.{kind}"] = across(torch.cat(parts))
            for ours, name in names.items():
                theirs[f"transformer.h.{n}.{name}.{kind}"] = across(mine[f"blocks.{n}.{ours}.{kind}"])
    theirs["transformer.wte.weight"] = theirs["lm_head.weight"] = mine["tokens.weight"]
    theirs["transformer.wpe.weight"] = mine["positions.weight"]
    other = other.to(next(model.parameters()).dtype).eval()
    other.load_state_dict(theirs)
    return other


def across(x: torch.Tensor) -> torch.Tensor:
    """A weight as (in, out); a bias as it is."""
    return x.T if x.dim() == 2 else x


class Table:
    """A model whose logits are a row of a table, by the last token alone; it counts the tokens it has read."""

    def __init__(self, logits: torch.Tensor, context: int = 1000) -> None:
        self.logits, self.calls = logits, []
        self.config = SimpleNamespace(layers=1, context=context, vocabulary=len(logits))

    def __call__(self, tokens, cache=None):
        self.calls.append(tuple(tokens.shape))
        if cache is None:
            return self.logits[tokens]
        cache.extend(tokens)
        return cache.select_wanted(self.logits[tokens])


def table(tokens: int, seed: int = 0, spread: float = 1.0) -> Table:
    return Table(torch.randn(tokens, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread)


def rows(*lengths: int, vocabulary: int = 53, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def stack_tokens(steps) -> torch.Tensor:
    """What was generated, (b, t)."""
    found = list(steps)
    return torch.stack(found, 1) if found else torch.zeros(0, 0)


def restore(model: GPT2, dtype: torch.dtype = torch.float64) -> GPT2:
    """The numbers of a model, in bytes or not, in a GPT-2 that is not quantised."""
    other, modules = GPT2(model.config), dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            owner = modules[name.removesuffix(".weight").removesuffix(".bias")]
            owner = getattr(owner, "matrix", owner)
            whole = isinstance(owner, QuantizedLinear) and name.endswith("weight")
            parameter.copy_(
                owner.dequantize_rows(torch.arange(len(owner.values))) if whole else getattr(owner, name.rsplit(".", 1)[1])
            )
    return other.to(dtype).eval()


def half_step_of_16_bits(x: torch.Tensor) -> torch.Tensor:
    """How far rounding a vector to integers of 16 bits may move each of its numbers."""
    return x.abs().amax(-1, keepdim=True) / (2 * LARGEST)


def half_step_of_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """How far rounding to bfloat16 may move each number."""
    return x.abs() * unit_roundoff(torch.bfloat16)


Step = Callable[[torch.Tensor], torch.Tensor]


def make_shift(seed: int, step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that moves each number half a step up or down, at random."""
    dice = torch.Generator().manual_seed(seed)
    return lambda x: x + step(x) * (torch.randint(0, 2, x.shape, generator=dice) * 2 - 1)


@contextmanager
def shift_cached_numbers(seed: int) -> Iterator[None]:
    """While it lasts, each number that a cache keeps is off by half a step of bfloat16, up or down."""
    shift, append = make_shift(seed, half_step_of_bfloat16), Cache._append
    Cache._append = lambda self, number, dtype, k, v: append(self, number, dtype, shift(k), shift(v))
    try:
        yield
    finally:
        Cache._append = append


def has_bfloat16_cache(projections: list[nn.Module]) -> bool:
    """Return whether the keys that these projections of float32 make are cached in bfloat16."""
    return choose_cache_dtype(projections, torch.float32) == torch.bfloat16


@contextmanager
def shift_numbers(
    before: Iterable[nn.Module], after: Iterable[nn.Module], seed: int, step: Step = half_step_of_16_bits
) -> Iterator[None]:
    """While it lasts, each number that these modules take, or give, is half a step off, up or down."""
    shift = make_shift(seed, step)
    hooks = [one.register_forward_pre_hook(lambda _, given: (shift(given[0]),)) for one in before]
    hooks += [one.register_forward_hook(lambda _, given, output: shift(output)) for one in after]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def list_shifts(model: GPT2, step: Step | None) -> list[Callable[[GPT2], ExitStack]]:
    """List contexts that shift numbers of a GPT-2 as far as a model rounds them, one a seed; none if it rounds nothing.

    Shifted are those that meet a matrix, by a step if there is one (its head meets what the last norm gives), and those in the
    cache if it is bfloat16.
    """
    rounds_cache = has_bfloat16_cache([block.attention.W_key for block in model.blocks])

    def shift(exact: GPT2, seed: int) -> ExitStack:
        stack = ExitStack()
        if step is not None:
            matrices = [one for block in exact.blocks for one in (*block.attention.children(), block.up, block.down)]
            stack.enter_context(shift_numbers([one for one in matrices if hasattr(one, "weight")], [exact.norm], seed, step))
        if rounds_cache:
            stack.enter_context(shift_cached_numbers(seed))
        return stack

    return [partial(shift, seed=seed) for seed in range(DRAWS if rounds_cache or step is not None else 0)]


def terms(model: GPT2) -> int:
    """Those of its widest sum, and the operations of a norm or a GELU."""
    return max(model.config.inner, model.config.width) + EXPONENTIAL


@torch.no_grad()
def rounding_bound(model: GPT2, run: Callable[[GPT2], torch.Tensor], step: Step | None = None) -> float:
    """How far two computations of run(model) may lie apart in float32; step: where vectors are rounded by as much too."""
    exact = restore(model)
    bound, expected = estimate_rounding(exact, run, terms(exact)), run(exact)
    for shift in list_shifts(model, step):
        with shift(exact):
            bound = max(bound, 2 * float((run(exact) - expected).abs().max()))
    return bound


def tokens_are_decided(model: GPT2, run: Callable[[GPT2], torch.Tensor], step: Step | None = None) -> bool:
    """Return whether no rounding of float32, nor one of vectors by a step, changes the tokens that run(model) gives."""
    exact = restore(model)
    expected = run(exact).tolist()
    decided = is_stable_under_rounding(exact, lambda one: run(one).tolist(), terms(exact))
    for shift in list_shifts(model, step):
        with shift(exact):
            decided = decided and run(exact).tolist() == expected
    return decided
