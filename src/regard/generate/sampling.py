"""From logits to a token: which tokens remain, how likely each is, and the random generators that choose among them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.mechanism.arguments import check_integer, check_number, check_sequence, describe_value

STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: keeps the seeds of rows, and of the next seed's rows, far apart
SEEDS = 2**63
LOW_TEMPERATURE = 2**-20  # below it, logits divided by the temperature may overflow
LARGEST_PENALTY = 1e20  # largest repetition penalty, and one over the least: with more, logits may overflow
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # that torch accepts


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn; the defaults, and None in their place, leave the model's own probabilities as they are.

    Applied in this order: the repetition penalty, the temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token
    top_k: int = 0  # only the k likeliest; 0 is all (Fan et al. 2018)
    top_p: float = 1.0  # only the likeliest that together have probability p (Holtzman et al. 2020)
    min_p: float = 0.0  # only those at least p times as likely as the likeliest (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # divides logits above 0 of earlier tokens, multiplies those below (Keskar et al. 2019)

    def __post_init__(self) -> None:
        for option in fields(Sampling):
            if getattr(self, option.name) is None:
                object.__setattr__(self, option.name, option.default)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_number(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0, which takes the likeliest token, or above; got {self.temperature!r}.")
        if check_integer("top_k", self.top_k, ", or None for all") < 0:
            raise ConfigError(f"top_k is a number of tokens, 0 for all; got {describe_value(self.top_k)}.")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a probability, from 0 to 1; got {describe_value(getattr(self, name))}.")
        if not 1 / LARGEST_PENALTY <= self.repetition_penalty <= LARGEST_PENALTY:
            limits = f"from {1 / LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}"
            raise ConfigError(
                f"repetition_penalty must be above 0, {limits}, and 1 is none; got {describe_value(self.repetition_penalty)}."
            )

    def compute_scores(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        """Compute logits (b, n) whose softmax is the distribution to draw from, -inf for excluded tokens.

        histories are the tokens of each row so far, for the repetition penalty.
        """
        scores = self.penalize_repetition(widen_logits(logits), histories)
        if self.temperature == 0:
            likeliest = find_likeliest(scores).unsqueeze(-1)
            return torch.full_like(scores, -torch.inf).scatter(-1, likeliest, 0)
        if self.temperature != 1:
            scores = divide_by_temperature(scores, self.temperature)
        if self.top_k and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            scores = keep_nucleus(scores, self.top_p)
        if self.min_p > 0:
            weights = scores.softmax(-1)
            scores = scores.masked_fill(weights < self.min_p * weights.amax(-1, keepdim=True), -torch.inf)
        return scores

    def penalize_repetition(self, scores: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        """Apply the repetition penalty to scores (b, n)."""
        if self.repetition_penalty == 1:
            return scores
        scores = scores.clone()
        for row, history in zip(scores, histories, strict=True):
            before = torch.tensor(sorted(set(history)), device=row.device, dtype=torch.int64)
            old = row[before]
            row[before] = torch.where(old < 0, old * self.repetition_penalty, old / self.repetition_penalty)
        return scores

    def compute_probabilities(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        """Compute the distribution (b, n) to draw from."""
        return self.compute_scores(logits, histories).softmax(-1)

    def choose(self, logits: Tensor, histories: Sequence[Sequence[int]], generators: "RowGenerators") -> Tensor:
        """Choose a token for each row, (b,)."""
        if self.temperature == 0:
            return find_likeliest(self.penalize_repetition(widen_logits(logits), histories))
        return draw_tokens(self.compute_probabilities(logits, histories), generators.draw_uniform())


class RowGenerators:
    """A random generator for each row, so that the draws of a row do not depend on the other rows.

    The seeds of the rows are derived from a number; a list has one seed for each row. torch's global generator is not used.
    """

    def __init__(self, seed: int | Sequence[int] | None, rows: int) -> None:
        if seed is None:
            seed = torch.Generator().seed() % SEEDS
        given = check_seed(seed)
        seeds = given if isinstance(given, list) else [(given + row * STRIDE) % SEEDS for row in range(rows)]
        if len(seeds) != rows:
            raise ConfigError(f"seed is a number, or one for each of the {rows} sequences; got {len(seeds)}.")
        self._generators = [torch.Generator().manual_seed(one % SEEDS) for one in seeds]

    def draw_uniform(self) -> Tensor:
        """Draw a number from 0 to below 1 for each row, (b,)."""
        return torch.cat([torch.rand(1, dtype=torch.float64, generator=one) for one in self._generators])


def find_likeliest(scores: Tensor) -> Tensor:
    """Return the first of the greatest scores (b, n) of each row, (b,)."""
    on_cpu = scores.device.type == "cpu"  # numpy's argmax is ten times as fast there
    places = torch.from_numpy(scores.detach().numpy().argmax(-1)) if on_cpu else scores.argmax(-1)
    check_logits(scores.gather(-1, places.unsqueeze(-1)))  # both treat NaN as the greatest
    return places


def draw_tokens(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the token of each row, (b,), at which the cumulative sum of its probabilities (b, n) passes u (b,)."""
    sums = probabilities.double().cumsum(-1)
    total = check_logits(sums[:, -1:])
    return torch.searchsorted(sums, u.to(sums.device).unsqueeze(-1) * total, right=True).squeeze(-1)


def divide_by_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Divide scores (b, n) by a temperature above 0; by a very low one, their differences to the greatest of a row."""
    if temperature >= LOW_TEMPERATURE:
        return scores / temperature
    least = torch.finfo(scores.dtype).tiny  # a smaller number may be rounded to 0
    return (scores - scores.amax(-1, keepdim=True)) / max(temperature, least)


def keep_nucleus(scores: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens that together have probability p, at least one; set the others to -inf."""
    ordered, places = scores.sort(-1)
    unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - p
    unlikely[..., -1] = False
    return scores.masked_fill(unlikely.scatter(-1, places, unlikely), -torch.inf)


def check_logits(x: Tensor) -> Tensor:
    """Return the numbers, or raise DataError for a NaN, which would be the greatest logit and spread to every sum."""
    if bool(x.isnan().any()):
        raise DataError("a logit is not a number (NaN): the model's weights may be damaged.")
    return x


def widen_logits(logits: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def check_seed(seed: object) -> int | list[int]:
    """Return a seed, or one for each sequence; raise ConfigError if one is no integer that torch accepts."""
    if isinstance(seed, Sequence):
        return [check_one_seed(one) for one in check_sequence("seed", seed)]
    return check_one_seed(seed)


def check_one_seed(seed: object) -> int:
    """Return an integer that torch accepts as a seed, or raise ConfigError."""
    found = check_integer("a seed", seed, ", or a list of one for each sequence")
    if not LEAST_SEED <= found <= MOST_SEED:
        raise ConfigError(f"a seed must be at least -2**63 and below 2**64, got {describe_value(found)}.")
    return found
