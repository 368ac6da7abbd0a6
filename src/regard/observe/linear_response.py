"""The response of a module to values that replace its own: whether it is a matrix times these, and which."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.attention_map import LIMIT_BYTES, check_result_size
from regard.map.implicit_map import ImplicitMap, SampledOutputs
from regard.map.stored_matrix import StoredMatrix

ROUNDINGS = 64  # of an output, times the square root of the number of tokens


class NotLinearError(ConfigError):
    """An output is no matrix times values: it states why, with numbers."""


@dataclass(frozen=True, eq=False)
class Response:
    """The values that replace others at one place of a module, (b, t, c), and its output at another, without the offset.

    own are the module's own values, and output (b, t, n) what it makes of them; offset is what it makes of 0.
    """

    label: str
    run: Callable[[Tensor], Tensor]
    own: Tensor
    output: Tensor
    offset: Tensor
    doubled: Tensor  # what it makes of own times -2

    @property
    def rounding(self) -> float:
        """The rounding of an output, relative to the largest. A layer in float64 may compute some steps in float32."""
        eps = max(torch.finfo(torch.float32).eps, torch.finfo(self.output.dtype).eps)
        return float(ROUNDINGS * self.output.shape[1] ** 0.5 * eps)

    def respond(self, values: Tensor) -> Tensor:
        """Compute what the module makes of values (b, t, c), without the offset."""
        return self.run(values) - self.offset

    def draw(self, *shape: int) -> Tensor:
        """Draw values of the size of the module's own."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return drawn.to(self.own) * self.own.std().clamp(min=torch.finfo(self.own.dtype).tiny)

    def check_scale(self) -> None:
        """Raise NotLinearError unless -2 v gives -2 y, to the bit if there is no offset, and y depends on v."""
        y, z = self.output - self.offset, self.doubled - self.offset
        if not y.isfinite().all() or not y.any():
            reason = "does not depend on the values" if y.isfinite().all() else "for the values, or for 0, is not finite"
            raise NotLinearError(f"{self.label}: the output {reason}.")
        size = self.output.abs().amax() + self.offset.abs().amax()
        smallest = torch.finfo(y.dtype).tiny  # below which numbers lose bits
        allowed = self.rounding * size if self.offset.any() else smallest * y.shape[1]
        self.refuse((z + 2 * y).abs(), allowed, y, "-2 v does not give -2 y")

    def check_sum(self) -> None:
        """Raise NotLinearError unless the sum of two random v gives the sum of their y within rounding."""
        one, other = (self.draw(2, *self.own.shape)[n] for n in range(2))
        y, z, both = self.respond(one), self.respond(other), self.respond(one + other)
        allowed = self.rounding * (y.abs().amax() + z.abs().amax() + self.offset.abs().amax())
        self.refuse((both - y - z).abs(), allowed, y, "u and v do not give the sum of their outputs")

    def refuse(self, deviation: Tensor, allowed: Tensor | float, y: Tensor, reason: str) -> None:
        """Raise NotLinearError where a deviation (b, t, n) is not within what is allowed."""
        if bool((deviation <= allowed).all()):
            return
        row, token, channel = (int(n) for n in torch.unravel_index(deviation.argmax(), deviation.shape))
        raise NotLinearError(
            f"{self.label} is not linear: {reason}, by up to {float(deviation.max() / y.abs().max()):.2g} of the largest "
            f"output, at row {row}, token {token}, channel {channel}."
        )

    def mixes_tokens(self) -> bool:
        """Return whether an output depends on the values of another token."""
        for token in (0, self.own.shape[1] - 1):
            values = torch.zeros_like(self.own)
            values[:, token] = self.draw(*self.own.shape)[:, token]
            y = self.respond(values).abs()
            y[:, token] = 0
            if bool((y > self.rounding * self.offset.abs().amax()).any()):
                return True
        return False

    def find_channels(self) -> Tensor:
        """Return which channel of the values each channel of the output (n,) is made of.

        Every channel of every batch row has a number, and values of 0 where a bit of it is 0 show that bit. Raises
        NotLinearError if an output is made of several channels or rows.
        """
        (b, t, c), n = self.own.shape, self.output.shape[2]
        drawn, numbers = self.draw(b, t, c), torch.arange(b * c, device=self.own.device).view(b, 1, c)
        limit = ROUNDINGS * torch.finfo(self.output.dtype).eps * (self.respond(drawn).abs() + self.offset.abs()).amax(1)
        found = torch.zeros(b, n, dtype=torch.long, device=self.output.device)
        is_dead = torch.ones_like(found, dtype=torch.bool)
        for bit in range(max(1, (b * c - 1).bit_length())):
            is_on = (numbers >> bit) & 1 == 1
            on, off = ((self.respond(drawn * mask).abs().amax(1) > limit) for mask in (is_on, ~is_on))
            if bool((on & off).any()):
                row, channel = (on & off).nonzero()[0].tolist()
                raise NotLinearError(
                    f"{self.label} is no matrix of tokens: channel {channel} of its output in row {row} is made of several "
                    f"channels or rows of the values, as after a projection. Name the output before that."
                )
            found += on.long() << bit
            is_dead &= ~(on | off)
        rows, channels = found // c, found % c
        one = channels.masked_fill(is_dead, -1).amax(0)
        own = torch.arange(b, device=found.device).unsqueeze(1)
        if not bool((is_dead | ((rows == own) & (channels == one))).all()):
            raise NotLinearError(f"{self.label} is no matrix of tokens: its output mixes the rows of the batch.")
        return torch.where(one < 0, torch.arange(n, device=one.device) % c, one)

    def count_channels(self) -> int:
        """Return how many channels in a row have the same matrix: those of a head."""
        (b, t, c), n = self.own.shape, self.output.shape[2]
        y = torch.cat([self.respond(one.expand(b, t, c)) for one in self.draw(2, b, t, 1)])
        limit = ROUNDINGS * t**0.5 * torch.finfo(y.dtype).eps * (y.abs().amax((0, 1)) + self.offset.abs().amax((0, 1)))
        for size in (size for size in range(n, 1, -1) if n % size == 0):
            heads, limits = y.unflatten(2, (-1, size)), limit.unflatten(0, (-1, size)).amin(-1, keepdim=True)
            if bool(((heads - heads[..., :1]).abs() <= limits).all()):
                return size
        return 1

    def build_map(self) -> ImplicitMap:
        """Return the matrix, a column a run, with the module's own values and outputs. Raises NotLinearError if it has none."""
        channels, size = self.find_channels(), self.count_channels()
        (b, t, _), n = self.own.shape, self.output.shape[2]
        check_result_size(b * n // size * t * t * self.output.element_size(), "fewer tokens or rows", LIMIT_BYTES)
        entries = self.output.new_empty(b, n // size, t, t)
        for token in range(t):
            values = torch.zeros_like(self.own)
            values[:, token] = 1
            entries[..., token] = self.respond(values)[..., ::size].mT
        v, y = (x.unflatten(2, (-1, size)).transpose(1, 2) for x in (self.own[..., channels], self.output - self.offset))
        outputs = SampledOutputs(torch.arange(t, device=y.device), y.contiguous())
        found = ImplicitMap(StoredMatrix(entries=entries, title=self.label), values=v.contiguous(), outputs=outputs)
        error = found.certificate().error
        if not error <= self.rounding * (1 + float(self.offset.abs().amax() / y.abs().amax())):
            raise NotLinearError(f"{self.label}: the matrix times the values differs from the output by {error:.2g} of it.")
        return found
