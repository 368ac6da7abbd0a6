"""find_circuits: the OV and QK circuits of the heads of a model, as factored matrices."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regard.attribution.activation_trace import ActivationTrace, is_near, widen
from regard.attribution.factored_matrix import FactoredMatrix
from regard.attribution.model_parts import (
    NEAR_NORM,
    HeadProjection,
    ModelParts,
    Norm,
    check_unembedding,
    find_norm_before,
    find_parts,
    find_projection,
    trace_forward,
)
from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.mechanism.arguments import check_choice, check_count, check_index, check_instance, describe_value
from regard.observe.recording import Recording

SPACES = ("residual", "tokens")
MOST_POSITIONS = 64  # at which the outputs of projections are kept: distances below it can be measured


@dataclass(frozen=True, eq=False)
class QueryKeyParts:
    """The projections of the queries and keys of a layer, the norm before them, and what came of their outputs.

    outputs and turned (h + g, p, d) are the outputs of both projections, and the queries and keys that attention took.
    """

    query: HeadProjection
    key: HeadProjection
    norm: Norm
    outputs: Tensor
    turned: Tensor


@dataclass(frozen=True, eq=False)
class Circuits:
    """The OV and QK circuits of the heads of a model, in the space of the residual stream (c) or of the tokens (n).

    The linear part of the norm before the projections is folded in. Left out are the scale by which that norm divides (it is
    frozen: divide x by it), its shift and the biases of the projections, so that a score has further terms of the query alone
    and of the key alone. Of tokens, the residual stream is the token's embedding, without position or earlier layers.
    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """

    recording: Recording
    trace: ActivationTrace
    parts: ModelParts
    query_key_parts: dict[str, QueryKeyParts] = field(default_factory=dict, repr=False)  # of the layers asked for so far

    def ov(self, layer: int, head: int, space: str = "residual") -> FactoredMatrix:
        """Return N_in W_V W_O, (c, c): x @ A is what a head writes where it attends to x.

        In the space "tokens" it is W_E N_in W_V W_O N_out W_U, (n, n): by how much each attended token raises each logit by the
        direct path, with N_out the linear part of the last norm and the unembedding centered, which changes no probability.
        Raises ConfigError where the value or the output projection was not found.
        """
        check_choice("space", space, SPACES)
        name, head, h = self.find_head(layer, head)
        found = self.parts.layers[name]
        if found.output is None or found.value is None or found.norm is None:
            raise ConfigError(
                f"the value projection or the output projection of {name} was not found, so its heads have no OV circuit. "
                "Choose another layer, or measure what its heads do by regard.effects."
            )
        left = found.norm.apply_transposed(found.value[head * len(found.value) // h].T).T
        if space == "residual":
            return FactoredMatrix(left, found.output[head])
        words = self.parts.unembedding - self.parts.unembedding.mean(0)
        return FactoredMatrix(self.get_embedding() @ left, found.output[head] @ self.parts.norm.apply_transposed(words).T)

    def qk(self, layer: int, head: int, space: str = "residual", *, distance: int | None = None) -> FactoredMatrix:
        """Return N_in W_Q W_Kᵀ N_inᵀ, (c, c), or W_E ... W_Eᵀ, (n, n): x_i A x_j is query times key, before the scale.

        With rotary positions it depends on the distance, by how many tokens the key comes before the query: it is
        N_in W_Q R W_Kᵀ N_inᵀ with the rotation R by that many positions, measured on the tokens given to find_circuits, of
        which there must be more than distance; at most 63. Other models need no distance and have one matrix for all.
        Raises ConfigError for rotary positions without a distance, and where the projections were not found.
        """
        check_choice("space", space, SPACES)
        name, head, h = self.find_head(layer, head)
        found = self.find_query_key_parts(name, layer)
        left, right = found.query.matrices[head], found.key.matrices[head * len(found.key.matrices) // h]
        outputs, turned = found.outputs, found.turned
        if not is_near(outputs, turned, found.query.activation.tolerance):
            if distance is None:
                raise ConfigError(
                    f"the queries and keys of {name} are rotated by position, so its QK circuit depends on the distance: "
                    "pass distance=, by how many tokens the key comes before the query."
                )
            distance = check_count("distance", distance, least=0, most=turned.shape[1] - 1)
            rotation = measure_rotation(outputs[:, distance], turned[:, distance])
            if rotation is None:
                raise ConfigError(
                    f"the queries and keys of {name} are changed after their projection, not only rotated, so its heads have "
                    "no QK circuit. Choose another layer."
                )
            left = left @ rotation
        left, right = found.norm.apply_transposed(left.T).T, found.norm.apply_transposed(right.T)
        if space == "residual":
            return FactoredMatrix(left, right)
        return FactoredMatrix(self.get_embedding() @ left, right @ self.get_embedding().T)

    def find_query_key_parts(self, name: str, layer: int) -> QueryKeyParts:
        """Return the projections of the queries and keys of a layer, found once. Raises ConfigError where they are not."""
        if name in self.query_key_parts:
            return self.query_key_parts[name]
        request = self.recording.map(layer).planes.request
        q, k = (widen(x[0, :, : self.trace.positions]) for x in (request.q, request.k))
        query, key = (find_projection(self.trace, x) or find_projection(self.trace, x[:, :1]) for x in (q, k))
        norm = None if query is None else find_norm_before(self.trace, query.activation)
        if query is not None and key is not None and norm is not None:
            one, other = query.activation, key.activation
            if is_near(one.x, other.x, one.tolerance):
                outputs, turned = torch.cat([query.outputs, key.outputs]).cpu(), torch.cat([q, k]).cpu()
                return self.query_key_parts.setdefault(name, QueryKeyParts(query, key, norm, outputs, turned))
        raise ConfigError(
            f"the projections of the queries and keys of {name} were not found, or not behind one norm, so its heads have no "
            "QK circuit. Choose another layer."
        )

    def find_head(self, layer: int, head: int) -> tuple[str, int, int]:
        """Return the name of a layer, the head counted from 0, and the number of heads. Raises OutOfRangeError."""
        names = self.recording.layers()
        name = names[check_index("layer", layer, len(names), "the model")]
        h = self.recording.map(layer).shape[1]
        return name, check_index("head", head, h, "the layer"), h

    def get_embedding(self) -> Tensor:
        """Return the embedding (n, c). Raises ConfigError where it was not found."""
        if self.parts.embedding is None:
            raise ConfigError("the embedding of the model was not found: use space='residual'.")
        return self.parts.embedding


def find_circuits(model: nn.Module, tokens: Tensor, *, unembedding: Tensor | None = None) -> Circuits:
    """Find the OV and QK circuits of the heads of a language model by running it on tokens (b, t), t at least 2.

    A module is a projection if its outputs are the recorded queries, keys or values, or its inputs the recorded contexts; its
    matrix is read off its own forward. unembedding (n, c) is needed only where the model has no get_output_embeddings.
    Raises ConfigError where the logits are not the last norm times the unembedding.
    """
    check_instance("model", model, nn.Module, "Pass a language model that maps tokens (b, t) to logits.")
    if (
        not isinstance(tokens, Tensor)
        or tokens.dim() != 2
        or tokens.is_floating_point()
        or min(tokens.shape[0], tokens.shape[1] - 1) < 1
    ):
        raise ConfigError(f"tokens must be ids (b, t), t at least 2, got {describe_value(tokens)}.")
    check_unembedding(unembedding)
    with evaluate_mode(model), torch.no_grad():
        trace, recording, logits = trace_forward(model, tokens, min(tokens.shape[1], MOST_POSITIONS))
        return Circuits(recording, trace, find_parts(model, trace, recording, logits, unembedding))


def measure_rotation(x: Tensor, y: Tensor) -> Tensor | None:
    """Return the matrix R (d, d) of y = x R, for x and y (s, d), if it rotates pairs of columns by an angle each, or None.

    The pairs are columns i and i + r/2, or 2i and 2i + 1, of the first r columns, of as many as are rotated. Each angle is the
    least squares estimate over the s vectors. Source: Su et al. 2021, equation 34.
    """
    d = x.shape[1]
    for columns in map(torch.arange, range(d // 2 * 2, 0, -2)):
        for first, second in (columns.chunk(2), (columns[::2], columns[1::2])):
            one, other = (torch.complex(z[:, first], z[:, second]) for z in (x, y))
            turn = (other * one.conj()).sum(0)
            turn = turn / turn.abs()
            rotation = torch.eye(d, dtype=x.dtype)
            rotation[first, first] = rotation[second, second] = turn.real
            rotation[first, second], rotation[second, first] = turn.imag, -turn.imag
            if (x @ rotation - y).norm() <= NEAR_NORM * y.norm():
                return rotation
    return None
