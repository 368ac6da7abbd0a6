"""The linear attention of the modules that run, from the product that completes a call until its module ends.

That a product is linear attention is known by the feature maps of its queries and keys, not by names.
"""

import weakref

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.feature_maps import is_feature_map
from regard.observe.interception.handwritten.ancestors.token_pairs import find_meeting
from regard.observe.interception.handwritten.ancestors.windows import list_joined
from regard.observe.interception.handwritten.linear.chunk_loops import FoundCall, join_loops
from regard.observe.interception.handwritten.linear.chunked_attention import ChunkedCall
from regard.observe.interception.handwritten.linear.chunked_attention import start_call as start_chunked_call
from regard.observe.interception.handwritten.linear.corrected_values import are_corrected, list_refs, list_sources
from regard.observe.interception.handwritten.linear.linear_attention import (
    ChainRoles,
    are_projected_tokens,
    find_roles,
    has_moved_axes,
    is_attention,
    mixes_within_tokens,
)
from regard.observe.interception.handwritten.linear.linear_call import CHANGED, LinearCall, read_call
from regard.observe.interception.handwritten.linear.linear_outputs import LinearOutputs, PlacedEntries
from regard.observe.interception.handwritten.linear.linear_product import LinearProduct, name_kernel
from regard.observe.interception.handwritten.linear.linear_scores import list_token_lengths
from regard.observe.interception.handwritten.linear.running_chunks import RunningChunks
from regard.observe.interception.handwritten.linear.unnormalized_call import ActivatedCall
from regard.observe.interception.handwritten.products.labelled_product import align_labels
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

COPIED = "it is linear attention, whose keys were repeated before they were multiplied with the values, which is not followed"


class LinearContexts(LinearOutputs):
    """The linear attention of the modules that run."""

    def __init__(self, table: AxisTable) -> None:
        super().__init__()
        self.table = table
        self.chunks = RunningChunks(table)

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        self.chunks.clear()

    def take_calls(self, frame: ModuleFrame) -> list[FoundCall]:
        """Return the calls of a module that ends, and forget them."""
        ended = [one for one in self.found if one.frame() is frame]
        self.found = [one for one in self.found if one.frame() is not frame]
        return join_loops(ended)

    def forget_calls(self, outputs: "list[weakref.ref[Tensor]]") -> None:
        """Forget the calls with these outputs, or with chunks that these are added to: they are recorded as parts of a loop."""
        known = {*map(id, outputs)}  # equal references would compare the tensors
        parts = [(one, one.call.added if isinstance(one.call, ChunkedCall) else []) for one in self.found]
        self.found = [one for one, added in parts if known.isdisjoint(map(id, (one.output, *added)))]

    def reads_for_chunks(self, frame: ModuleFrame, outputs: "list[weakref.ref[Tensor]]") -> bool:
        """Return whether chunks of a module add what a loop read, and have values, as of a delta rule, made of the rest."""
        chunks = [one.call for one in self.found if isinstance(one.call, ChunkedCall) and one.frame() is frame]
        parts = [x for chunk in chunks for x in (*chunk.added, weakref.ref(chunk.made[0]))]
        made = {id(one) for x in parts for one in list_refs(frame, x)}
        return any(one.is_sure for one in chunks) and all(id(x) in made for x in outputs)

    def start_call(self, made: LinearProduct, has_softmax: bool = False) -> bool:
        """Start a call if a product is of queries with products of keys with values; return whether it is.

        A running sum needs no feature maps: nothing else has one. Nor do queries, keys and values that layers have made. Keys
        need none where queries are a softmax over their features (`has_softmax`), which are no keys themselves.
        """
        frames, table, product, trace, place = made.frames, self.table, made.product, made.trace, made.place
        if not made.y.numel():
            return False
        q = product.operands[1 - place]
        queries = weakref.ref(q), q.numel()
        is_running = trace.form is not None and trace.form.has_running_sum
        is_running |= trace.has_copied_keys and "cumsum" in trace.changes
        has_map = is_feature_map(frames, queries)
        if not is_running and mixes_within_tokens(frames, product, product.list_rows(1 - place)):
            return False
        is_known = True  # whether a product that cannot be read is linear attention all the same
        try:
            if trace.form is None or trace.dims is None or has_moved_axes(table, trace.form, trace.dims):
                if not (is_running or has_map):
                    return False
                if trace.has_copied_keys:
                    raise UnreadableError(COPIED)
                if not multiplies_features(frames, made.x):
                    return False
                raise UnreadableError(CHANGED.format(" and ".join(dict.fromkeys(trace.changes)) or "moves of entries"))
            dims = product.build_dims(table, {place: trace.dims})
            roles = find_roles(table, trace.form, q, dims[1 - place], dims[2])
            if roles is None or not roles.k.numel() or not is_attention(frames, table, roles):
                return False
            is_known = has_map and (roles.is_causal or has_softmax or has_feature_map(frames, roles.k, made.x))
            is_known |= is_running and roles.is_causal
            if not is_known and (is_running or not are_projected_tokens(frames, table, roles)):
                return False
            call, places = read_call(table, roles, made)
        except UnreadableError as error:
            if is_known:
                self.miss_call(frames, made.name, str(error), made.y)
            return is_known
        self.add_call(made, call, places)
        self.found[-1] = self.found[-1]._replace(chunk=self.chunks.sums.get(made.x))
        return True

    def miss_call(self, frames: list[ModuleFrame], name: str, reason: str, y: Tensor) -> None:
        """Add a call with output y that a function of this name completes and that cannot be read."""
        self.found.append(FoundCall(weakref.ref(frames[-1]), name_kernel(name), None, reason, output=weakref.ref(y)))

    def start_chunk(self, made: LinearProduct, roles: ChainRoles, is_sure: bool = True) -> None:
        """Start a call of masked scores of chunks of tokens that are multiplied with values."""
        try:
            lengths = list_token_lengths(made.frames[-1], self.table, roles)
            call, places = start_chunked_call(self.table, roles, made, lengths)
        except UnreadableError as error:
            self.miss_call(made.frames, made.name, str(error), made.y)
        else:
            call.is_sure = is_sure
            call.earlier = self.list_ancestors(made.frames, [roles.q, roles.k, roles.v])
            self.find_states(made.frames[-1], call, roles.k)
            self.add_call(made, call, places)

    def find_states(self, frame: ModuleFrame, call: ChunkedCall, k: Tensor) -> None:
        """Hold what may be the state before the first chunk, and what the values of a delta rule are made of.

        These were made of the values of an earlier chunk, or of products with their keys k.
        """
        earlier = [one.call for one in self.found if isinstance(one.call, ChunkedCall) and one.frame() is frame]
        if not earlier:
            call.states = [x.detach().clone() for x in frame.input_tensors if call.can_start_from(x)]
        if earlier and earlier[-1].sources is not None and earlier[-1].sizes == call.sizes:
            call.sources = earlier[-1].sources
            return
        v, found = call.made[0], list_sources(frame, call.made[0])
        if are_corrected(frame, v, k) or any(x is one.made[0] for one in earlier for x in found):
            call.sources = [x for x in found if x.numel() >= v.numel()]

    def has_chunks(self, frame: ModuleFrame) -> bool:
        """Return whether a module has multiplied scores of chunks of tokens with values."""
        return any(isinstance(one.call, ChunkedCall) and one.call.is_sure and one.frame() is frame for one in self.found)

    def start_call_of_scores(self, made: LinearProduct, roles: ChainRoles) -> bool:
        """Start a call of scores that are multiplied with values; return whether they have the formula of one."""
        try:
            call, places = read_call(self.table, roles, made)
        except UnreadableError:
            return False
        self.add_call(made, call, places)
        return True

    def add_activated_call(
        self, frames: list[ModuleFrame], call: RecurrenceCall, places: Tensor, y: Tensor, roots: int
    ) -> None:
        """Add a call of activated scores with output y, whose entries have these places in (b, h, q, e)."""
        activated = ActivatedCall.copy_call(call)
        self.found.append(FoundCall(weakref.ref(frames[-1]), call.kernel, activated, "", roots, weakref.ref(y)))
        self.contexts[y] = PlacedEntries(activated, places)

    def add_call(self, made: LinearProduct, call: LinearCall | ChunkedCall, places: Tensor) -> None:
        """Add a call whose output a product is, times other factors of its rows."""
        self.found.append(FoundCall(weakref.ref(made.frames[-1]), call.kernel, call, output=weakref.ref(made.y)))
        self.contexts[made.y] = context = PlacedEntries(call, places)
        for factor, labels in made.factors:
            self.divide_rows(context, made.y, align_labels(factor, labels, made.product.result), factor, is_quotient=False)


def has_feature_map(frames: list[ModuleFrame], k: Tensor, x: Tensor) -> bool:
    """Return whether a feature map made the keys k of x, products of keys with values."""
    ref = weakref.ref(k)
    if any(frame.find_makers(ref) for frame in frames):
        return is_feature_map(frames, (ref, k.numel()))
    return multiplies_features(frames, x)  # keys in the order that x has them in, or an argument


def multiplies_features(frames: list[ModuleFrame], x: Tensor) -> bool:
    """Return whether x was made of a product of a feature map with other tokens, or joined of such products."""
    parts = list_joined(frames[-1], (weakref.ref(x), x.numel()))
    meetings = [find_meeting(frames[-1], *part) for part in parts]
    return all(one is not None and any(is_feature_map(frames, given) for given in one[1]) for one in meetings)
