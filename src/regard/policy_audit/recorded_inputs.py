"""The inputs of a policy, from a recording or from a call, and the length of the prompt."""

from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.mechanism.arguments import check_count
from regard.mechanism.request import Request
from regard.observe.attention_changes import RECORD_VALUES
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.recording import Recording
from regard.policies import AttentionInputs


def read_inputs(recording: Recording, layer: int, prompt: int) -> AttentionInputs:
    """Return the queries, keys, values and rule of a recorded layer.

    Raises ConfigError without values or with some heads only, and unless the layer is causal self-attention of whole texts
    without padding; DataError where a number is not finite, so that no row has weights to compare.
    """
    name, v = recording.layers()[layer], recording.values(layer)
    if recording.last.find_histories(layer, "self", None)[0].selected_heads is not None:
        raise ConfigError(
            f"a policy decides from all heads of a layer, but of {name} only {recording.heads(layer)} were recorded: record "
            "without heads=, and select heads of the result."
        )
    if v is None:
        raise ConfigError(f"the values of {name} were not kept, which the error of the output needs. {RECORD_VALUES}")
    found = make_inputs(recording.map(layer).planes.request, v, name, layer, prompt)
    for what, numbers in (("queries", found.q), ("keys", found.k), ("values", v)):
        if not numbers.isfinite().all():
            raise DataError(f"the {what} of {name} are not all finite, so nothing can be compared: is the model damaged?")
    return found


def make_inputs(request: Request | AttentionCall, v: Tensor | None, name: str, layer: int, prompt: int) -> AttentionInputs:
    """Return the inputs of a policy for one layer.

    Raises ConfigError unless it is causal self-attention of whole texts without padding.
    """
    q, k = request.q.shape[2], request.k.shape[2]
    is_plain = q == k and isinstance(request.offset, int) and request.offset == 0 and request.weight is None
    ranges = request.mask.find_key_ranges(q, k, 0) if is_plain and request.mask.is_relative else None
    if ranges is None or (q > 1 and int(ranges[1][0, 0]) > 1):
        raise ConfigError(
            f"a policy needs causal self-attention of every token of a text, in one forward or recorded from its start, "
            f"without padding; {name} has {q:,} queries on {k:,} keys with the mask {request.mask}."
        )
    return join_inputs(request, v, layer, prompt)


def join_inputs(request: Request | AttentionCall, v: Tensor | None, layer: int, prompt: int) -> AttentionInputs:
    """Return the inputs of a policy for a layer whose mask is known to be causal, or that of a policy as well."""
    settings = {field: getattr(request, field) for field in ("q", "k", "mask", "scale", "softcap", "bias", "sinks")}
    return AttentionInputs(**settings, v=v, layer=layer, prompt=prompt)


def find_prompt(recording: Recording, prompt: int | None, tokens: int) -> int:
    """Return the length of the prompt: as given, or that of a recorded generation, or half of a text read at once.

    Raises ConfigError for a length of more tokens than there are.
    """
    if prompt is not None:
        return check_count("prompt", prompt, 1, tokens)
    first = [call.stored.q.shape[2] for call in recording.last.softmax_calls if call.step == 0]
    return first[0] if first and first[0] < tokens else max(tokens // 2, 1)
