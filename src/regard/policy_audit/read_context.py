"""ReadContext: the prompt of a text, read once by a model of transformers, and continued with many policies."""

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.models.transformers_decoder import find_cache_name
from regard.observe.intervene import intervene
from regard.observe.record import record
from regard.observe.recording import Recording
from regard.policies import Policy
from regard.policy_audit.apply_policy import ApplyPolicy


@dataclass(frozen=True, eq=False)
class ReadContext:
    """What a model keeps of the tokens (1, c) that it has read: its cache, and a recording from which a policy chooses."""

    model: nn.Module
    tokens: int
    cache: Any
    recording: Recording

    @classmethod
    def read(cls, model: nn.Module, ids: Tensor) -> "ReadContext | None":
        """Read tokens (1, c); None unless the model is one of transformers whose cache holds every key of every layer."""
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            return None
        name, cache = find_cache_name(model), transformers.DynamicCache(config=model.config)
        kinds = {type(layer) for layer in cache.layers}
        if name not in inspect.signature(model.forward).parameters or kinds != {transformers.cache_utils.DynamicLayer}:
            return None
        body: nn.Module = model.base_model  # without the head: nobody needs the logits of the context
        with record(body, keep="values") as recording:
            body(input_ids=ids, use_cache=True, **{name: cache})
        layers = range(len(recording.layers()))
        if recording.missed or any(recording.map(layer).planes.request.bias is not None for layer in layers):
            return None
        return cls(model, ids.shape[1], cache, recording)

    def continue_with(self, ids: Tensor, policy: Policy | None) -> Tensor:
        """Return the logits (1, n, vocabulary) of tokens (1, n) after the context, with a policy that reads it whole."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]  # an update gives a layer new tensors
        changes = [] if policy is None else [ApplyPolicy(policy, self.tokens, self.recording)]
        with intervene(self.model, *changes):
            logits: Tensor = self.model(input_ids=ids, use_cache=True, **{find_cache_name(self.model): cache}).logits
        return logits
