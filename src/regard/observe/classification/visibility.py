"""Which keys the queries of a map may see, and which queries are at tokens: what its mask and its bias alone state."""

import functools
import math
from functools import cached_property

import torch
from torch import Tensor

from regard.map.hiding_bias import drop_repeats, find_hiding_bias
from regard.map.map_planes import MapPlanes
from regard.map.plane import BLOCK_NUMBERS
from regard.map.weight_sums import SumRequest
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import CLASSES
from regard.mechanism.request import Request
from regard.observe.score_interval import apply_to_distinct, take_distinct

SHARED = 32  # masks of small matrices, with the lengths they are applied to, whose tables are kept


class Visibility:
    """What the queries of matrices may see: a key that the mask shows and the bias does not hide. What is found is cached.

    A query is at a token if it sees something and, where keys are its own tokens (`own`), sees its own too, unless no query of
    its batch row and head does: so a query on padding is not.
    """

    def __init__(self, planes: MapPlanes, own: bool) -> None:
        self.planes, self.own, self.shape, self.device = planes, own, planes.shape, planes.device
        self._requests: dict[tuple[int, float, float], SumRequest] = {}

    @cached_property
    def positions(self) -> Tensor:
        """The positions of the queries among the keys, (b, q)."""
        b, _, q, _ = self.shape
        queries, offset = torch.arange(q, device=self.device), self.planes.request.offset
        if isinstance(offset, int):
            return (queries + offset).expand(b, q)
        return offset.expand(len(self.planes.request.q))[self.planes.row_numbers].unsqueeze(-1) + queries

    @cached_property
    def is_token(self) -> Tensor:
        """Whether a query is at a token rather than at padding, which is masked out everywhere or from itself, (b, h, q)."""
        if not self.own:
            return self.can_see_any_key
        own = take_distinct(self.is_own_token_visible)
        has_none = ~own.any(-1, keepdim=True)
        if not has_none.any():
            return own.expand(self.shape[:3])
        return apply_to_distinct(torch.logical_and, (own | has_none).expand(self.shape[:3]), self.can_see_any_key)

    @cached_property
    def is_own_token_visible(self) -> Tensor:
        """Whether each query may see the key at its own position, bool (b, h, q)."""
        return self.is_visible(self.positions)

    @cached_property
    def can_see_any_key(self) -> Tensor:
        """Whether a query may see any key, (b, h, q); True for all if no finite bias hides keys.

        A query from which the mask or -inf hides all has no weights, which tells. The softmax of finite numbers has weights.
        """
        b, h, q, k = self.shape
        if self.hiding_bias == -math.inf:
            return torch.ones(1, 1, q, dtype=torch.bool, device=self.device).expand(b, h, q)
        queries, keys = (torch.arange(size, device=self.device) for size in (q, k))
        parts = queries.unsqueeze(-1).split(max(1, BLOCK_NUMBERS // max(b * h * k, 1)))
        return torch.cat([take_distinct(self.can_see_all(part, keys)).any(-1) for part in parts], -1).expand(b, h, q)

    @cached_property
    def hiding_bias(self) -> float:
        """The largest number in the bias that hides its key; -inf if no other number does."""
        return find_hiding_bias(self.planes.request)

    @property
    def has_hiding_bias(self) -> bool:
        """Whether a number of the bias hides keys, or -inf."""
        bias = self.planes.request.bias
        return bias is not None and (self.hiding_bias > -math.inf or bool((drop_repeats(bias) == -math.inf).any()))

    @cached_property
    def is_real_key(self) -> Tensor:
        """Whether a key is not padding, (b, h, k), where all queries at tokens count."""
        return self.find_real_keys(self.is_token)

    @cached_property
    def first_tokens(self) -> list[int]:
        """The first token of each batch row, by index, where all queries at tokens count."""
        return self.find_first_tokens(self.is_token)

    @cached_property
    def visible_keys(self) -> Tensor:
        """Whether each query may see each key of small matrices, (b or 1, h or 1, q, k)."""
        q, k = (torch.arange(size, device=self.device) for size in self.shape[2:])
        return take_distinct(self.can_see_all(q.unsqueeze(-1), k))

    def find_real_keys(self, counted: Tensor) -> Tensor:
        """Return whether a key is not padding, (b, h, k): a key whose own query does not count, by (b, h, q), is padding.

        If keys are not the queries' own tokens: whether the first query that counts may see the key.
        """
        b, h, q, k = self.shape
        if self.own:
            positions, counted = take_distinct(self.positions).unsqueeze(1), take_distinct(counted)
            padding = torch.where(counted, -1, positions)
            places = padding.masked_fill((padding < 0) | (padding >= k), k)  # k marks none
            found = torch.ones(*places.shape[:2], k + 1, dtype=torch.bool, device=self.device)
            return found.scatter_(2, places, False)[..., :k].expand(b, h, k)
        if not q:
            return torch.zeros(b, h, k, dtype=torch.bool, device=self.device)
        query = counted.int().argmax(-1, keepdim=True)  # the first that counts
        seen = self.can_see_all(query, torch.arange(k, device=query.device))
        return seen & counted.any(-1, keepdim=True)

    def find_first_tokens(self, counted: Tensor) -> list[int]:
        """Return the first key of each batch row that its first query that counts, (b, h, q), may see."""
        b, _, q, k = self.shape
        if not q or not k:
            return [0] * b
        counted = counted.any(1)
        query = counted.int().argmax(-1).view(-1, 1, 1)
        keys = torch.arange(k, device=query.device)
        seen = self.can_see_all(query, keys).any(1) & counted.any(-1, keepdim=True)
        found: list[int] = seen.int().argmax(-1).tolist()
        return found

    def request_sums(self, window: int, share: float, sink: float) -> SumRequest:
        """Return the request for sums of small matrices where all queries at tokens count."""
        key = window, share, sink
        if key not in self._requests:
            real = take_distinct(self.is_real_key)
            tables = take_distinct(self.is_token), self.visible_keys, real, count_share(real, share)
            self._requests[key] = SumRequest(*key, *tables, torch.tensor(self.first_tokens, device=self.device))
        return self._requests[key]

    def list_keys_before(self, back: int) -> Tensor:
        """Return the key `back` before the position of each query, (b, q)."""
        return apply_to_distinct(lambda own: own - back, self.positions)

    def is_visible(self, keys: Tensor) -> Tensor:
        """Return whether each query may see the key given for it, by index (b, q), as (b, h, q); False for an index outside."""
        b, h, q, k = self.shape
        keys = take_distinct(keys).unsqueeze(1)
        seen = self.can_see_all(torch.arange(q, device=keys.device), keys.clamp(0, k - 1))
        return (take_distinct(seen) & (keys >= 0) & (keys < k)).expand(b, h, q)

    def can_see_all(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries may see keys, by index, both broadcasting with each other to (b, h, ...).

        Indices of at most two axes are the same for all batch rows and heads. What repeats is expanded.
        """
        request = self.planes.request
        inner = (1,) * max(x.dim() if x.dim() <= 2 else x.dim() - 2 for x in (queries, keys))
        b, h = self.planes.row_numbers.view(-1, 1, *inner), self.planes.head_numbers.view(1, -1, *inner)
        shape = torch.broadcast_tensors(b, h, queries, keys)[0].shape  # broadcast_shapes takes 50 times as long
        seen = request.mask.can_see(b, h, queries, keys, request.offset)
        if request.bias is not None:
            places = zip((b, h, queries, keys), request.bias.shape, strict=True)
            index = tuple(x if size > 1 else x.new_zeros(()) for x, size in places)
            seen = seen & ~(request.bias[index] <= self.hiding_bias)
        return seen.expand(shape)


def find_visibility(planes: MapPlanes, own: bool) -> Visibility:
    """Return what the queries of a map may see; small matrices on a CPU with equal masks of a few numbers share it."""
    request, found = planes.request, Visibility(planes, own)
    can_share = planes.is_batch and request.q.device.type == "cpu" and isinstance(request.offset, int)
    if not can_share or not is_plain_mask(request.mask) or found.has_hiding_bias:
        return found
    return share_visibility(request.mask, int(request.offset), planes.shape, own)


def is_plain_mask(mask: Mask) -> bool:
    """Return whether a mask is one of regard's own, and the same for all batch rows and heads: a few numbers describe it."""
    parts = [one for one in mask.arguments if isinstance(one, Mask)]
    is_own = CLASSES.get(type(mask).__name__) is type(mask) and not mask.is_batch_specific
    return is_own and all(is_plain_mask(part) for part in parts)


@functools.lru_cache(SHARED)
def share_visibility(mask: Mask, offset: int, shape: tuple[int, int, int, int], own: bool) -> Visibility:
    """Return what queries of matrices of this shape, (b, h, q, k), may see by a mask alone."""
    b, h, q, k = shape
    nothing = torch.zeros(1, 1, 1, 1, device="cpu")
    queries, keys = nothing.expand(b, h, q, 1), nothing.expand(b, h, k, 1)
    request = Request(queries, keys, keys, mask, 1.0, None, None, None, offset, 0.0, 4)
    return Visibility(MapPlanes(request, range(b), range(h)), own)


def count_share(real: Tensor, share: float) -> Tensor:
    """Return how many keys are a share of those that are real, bool (b, h, k), at least one: (b, h)."""
    return (real.sum(-1).float() * share).ceil().clamp(min=1).long()
