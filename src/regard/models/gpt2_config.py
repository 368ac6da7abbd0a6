"""The sizes of a GPT-2, those that were released, and the parameters, memory and multiply-adds of each part."""

from dataclasses import dataclass

from regard.errors import ConfigError
from regard.layers import checks
from regard.mechanism.arguments import check_choice, check_count, check_instance, describe_value
from regard.mechanism.heads import describe_indivisible_width
from regard.mechanism.request import check_probability

ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu")


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2 and the other settings of a checkpoint; checked on creation."""

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.0
    inner: int = 0  # width of the feed-forward layer; four times the width if it is 0
    activation: str = "gelu_tanh"
    epsilon: float = 1e-5  # of the norms
    tied: bool = True  # whether the head is the token embedding

    def __post_init__(self) -> None:
        checks.check_sizes(**{name: getattr(self, name) for name in ("layers", "heads", "width", "context", "vocabulary")})
        if self.width % self.heads:
            raise ConfigError(describe_indivisible_width("width", self.width, "heads", self.heads))
        check_count("inner", self.inner, 0, checks.WIDEST, " where 0 is four times the width")
        check_choice("activation", self.activation, ACTIVATIONS)
        if not isinstance(self.epsilon, float) or not 0 < self.epsilon < 1:
            raise ConfigError(f"epsilon must be a number above 0 and below 1, got {describe_value(self.epsilon)}.")
        check_instance("tied", self.tied, bool)
        check_probability(self.dropout)
        object.__setattr__(self, "inner", self.inner or 4 * self.width)

    @classmethod
    def small(cls) -> "GPT2Config":
        """Return the sizes of 124,439,808 parameters, 117M in the paper."""
        return cls(layers=12, heads=12, width=768)

    @classmethod
    def medium(cls) -> "GPT2Config":
        """Return the sizes of 354,823,168 parameters, 345M in the paper."""
        return cls(layers=24, heads=16, width=1024)

    @classmethod
    def large(cls) -> "GPT2Config":
        """Return the sizes of 774,030,080 parameters, 762M in the paper."""
        return cls(layers=36, heads=20, width=1280)

    @classmethod
    def xl(cls) -> "GPT2Config":
        """Return the sizes of 1,557,611,200 parameters, 1542M in the paper."""
        return cls(layers=48, heads=25, width=1600)

    @property
    def parts(self) -> dict[str, int]:
        """The number of parameters of each part."""
        c, inner = self.width, self.inner
        parts = {
            "token embedding": self.vocabulary * c,
            "position embedding": self.context * c,
            "attention": self.layers * (4 * c * c + 4 * c),
            "feed-forward": self.layers * (2 * c * inner + inner + c),
            "norms": self.layers * 4 * c + 2 * c,
        }
        return parts if self.tied else {**parts, "head": self.vocabulary * c}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(self.parts.values())

    def multiply_adds(self, tokens: int) -> dict[str, int]:
        """Count the multiply-adds of each part in a forward over this many tokens, causal attention as half of the square."""
        c = self.width
        return {
            "attention projections": self.layers * 4 * c * c * tokens,
            "scores and contexts": self.layers * c * tokens * (tokens + 1),
            "feed-forward": self.layers * 2 * c * self.inner * tokens,
            "head": self.vocabulary * c * tokens,
        }

    @property
    def training_flops(self) -> float:
        """The floating-point operations to train on one token: two for a multiply-add, forward once, backward twice."""
        return 6 * sum(self.multiply_adds(self.context).values()) / self.context

    def describe(self, tokens: int | None = None) -> str:
        """Format the parameters, the memory and the multiply-adds of a forward over the context as a table of text."""
        t = self.context if tokens is None else tokens
        lines = [f"{self.layers} layers of {self.heads} heads, width {self.width}, context {self.context}", ""]
        lines += format_table("parameters", self.parts)
        lines += ["", f"float32 {self.parameters * 4 / 1e6:,.0f} MB, bfloat16 {self.parameters * 2 / 1e6:,.0f} MB"]
        cache = 2 * self.layers * self.width * t
        lines += [f"keys and values of {t} tokens: float32 {cache * 4 / 1e6:,.1f} MB, bfloat16 {cache * 2 / 1e6:,.1f} MB", ""]
        return "\n".join([*lines, *format_table(f"multiply-adds of {t} tokens", self.multiply_adds(t))])


def format_table(title: str, parts: dict[str, int]) -> list[str]:
    """Format numbers with their share of the whole."""
    total = sum(parts.values())
    rows = [*parts.items(), ("together", total)]
    width = len(f"{total:,}")
    return [title, *(f"  {name:<22}{number:>{width},}  {number / total:6.1%}" for name, number in rows)]
