"""The linear parts around attention, found in any model by running it: which modules they are is measured, not read from names.

The model runs once on a probe while hooks keep what goes into and out of its modules at a few positions. A module is the
output projection of a layer if its input equals the layer's context, head by head; it is the value projection if the values
are columns of its output; it is the last norm if the logits are its output times the unembedding. Each linear map is then read
off by the module's own forward on the unit vectors, so that quantized, adapted and renamed modules work alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.activation_trace import (
    POSITIONS,
    Activation,
    ActivationTrace,
    cut_positions,
    find_columns,
    get_tolerance,
    is_near,
    widen,
)
from regard.attribution.direct_path import measure_direct_gains
from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sequence_reader import compute_logits
from regard.mechanism.arguments import check_floating, describe_value
from regard.observe import Recording, record

NEAR_NORM = 1e-2  # the same of a norm
PROBE = 64.0  # size of the unit vectors of which a matrix is read off, so that a bias hides none of its digits; a power of 2


@dataclass(frozen=True, eq=False)
class Norm:
    """y = gain (x - mean(x)) / √(var(x) + eps) + shift, without the mean if not `is_centered`; without a norm, gain is 1."""

    gain: Tensor  # (c,)
    is_centered: bool
    eps: float = 0.0  # added to the variance

    def apply_transposed(self, u: Tensor) -> Tensor:
        """Return the u' (..., c) for which u'ᵀ x = uᵀ (gain (x - mean(x))) for every x."""
        found = u * self.gain
        return found - found.mean(-1, keepdim=True) if self.is_centered else found

    def apply_linear_part(self, x: Tensor) -> Tensor:
        """Return gain (x - mean(x)) of vectors (..., c), or gain x if the norm is not centered."""
        return self.gain * (x - x.mean(-1, keepdim=True) if self.is_centered else x)

    def measure_scale(self, x: Tensor) -> Tensor:
        """Return the scale by which a vector (..., c) is divided, (...): of its deviation, or of its root mean square."""
        x = x.double()
        x = x - x.mean(-1, keepdim=True) if self.is_centered else x
        return (x.square().mean(-1) + self.eps).sqrt()


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The projections of one attention layer, by head: `output` (h, e, c), `value` (g, c, e), None where not found.

    The output projection is that to the residual stream: times the number by which the model multiplies it, as Granite does.
    """

    output: Tensor | None
    value: Tensor | None
    norm: Norm | None  # before the value projection


@dataclass(frozen=True, eq=False)
class ModelParts:
    """Embedding and unembedding (n, c), last norm, what goes into it (b, t, c), and the parts of each layer by its name.

    The embedding is what the first layer reads of each token, position aside: of BLOOM, after the norm that it applies to it,
    of Gemma and Granite, times the number by which they multiply it.
    """

    embedding: Tensor | None
    unembedding: Tensor
    norm: Norm
    final: Tensor
    layers: Mapping[str, LayerParts]


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """A linear module with its outputs (g, p, e) and matrices (g, c, e) by head."""

    activation: Activation
    outputs: Tensor
    matrices: Tensor


def find_parts(
    model: nn.Module, trace: ActivationTrace, recording: Recording, logits: Tensor, unembedding: Tensor | None = None
) -> ModelParts:
    """Find the linear parts of a model from the trace and the recording (with values) of the same forward pass.

    `logits` (b, t, n) are what the model returned. Raises ConfigError if the unembedding is not found, or if the logits are not
    the output of the last norm times the unembedding, plus its bias if it has one.
    """
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ConfigError("the weights are sharded over several processes (FSDP): load the model in one process.")
    words = find_embedding(model, "get_output_embeddings", "head") if unembedding is None else unembedding
    embedding = find_embedding(model, "get_input_embeddings", "tokens")
    words = embedding if words is None else words
    if words is None:
        raise ConfigError(
            "the matrix that turns vectors into logits was not found: pass it as unembedding=, (n, c), one row for each token."
        )
    last, final = trace.norms[-1] if trace.norms else None, trace.last
    does_fit = last is not None and len(last.y[0]) == words.shape[1]
    if last is not None and not does_fit and unembedding is not None:
        raise ConfigError(f"unembedding must be (n, c) = ({logits.shape[2]}, {len(last.y[0])}), got {tuple(words.shape)}.")
    words = widen(words.detach())
    shown, tolerance = cut_positions(logits, trace.positions) - find_logit_bias(model, words), get_tolerance(logits.dtype)
    if last is None or final is None or not does_fit or not is_near(shown, last.y @ words.to(last.y).T, tolerance):
        raise ConfigError(
            "the logits are not the output of the last norm times the unembedding, so what a head adds to them cannot be "
            "computed. Measure what it does by regard.effects."
        )
    norm = fit_norm(last)
    if norm is None:
        raise ConfigError(
            f"the last norm, {last.name}, is neither a layer norm nor an RMS norm, so what a head adds to the logits cannot be "
            "computed. Measure what it does by regard.effects."
        )
    names = recording.layers()
    outputs = [find_output_projection(recording, number, trace) for number in range(len(names))]
    gains = measure_direct_gains(model, trace, [one for one in outputs if one is not None])
    layers = {
        name: find_layer(recording, number, trace, one, gains.get(id(one), 0.0))
        for number, (name, one) in enumerate(zip(names, outputs, strict=True))
    }
    if embedding is not None:
        embedding = apply_first_norm(trace, scale_embedding(model, trace, embedding.detach()))
    return ModelParts(None if embedding is None else widen(embedding).cpu(), words.cpu(), norm, widen(final), layers)


def check_unembedding(unembedding: Tensor | None) -> None:
    """Raise ConfigError if an unembedding is given that is not a matrix (n, c)."""
    if unembedding is not None and check_floating("unembedding", unembedding).dim() != 2:
        raise ConfigError(f"unembedding must be (n, c), one row for each token, got {describe_value(unembedding)}.")


def find_embedding(model: nn.Module, getter: str, attribute: str) -> Tensor | None:
    """Return the weight (n, c) of a model's embedding or unembedding: by transformers' method, or of this package's GPT-2."""
    method = getattr(model, getter, None)
    found = method() if callable(method) else getattr(model, attribute, None)
    weight = getattr(found, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None


def find_logit_bias(model: nn.Module, unembedding: Tensor) -> Tensor | float:
    """Return the bias (n,) that a model's unembedding adds to the logits, as GPT-J's; 0 without one."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    bias = getattr(head, "bias", None)
    return widen(bias.detach()) if isinstance(bias, Tensor) and bias.shape == unembedding.shape[:1] else 0.0


@torch.no_grad()
def scale_embedding(model: nn.Module, trace: ActivationTrace, embedding: Tensor) -> Tensor:
    """Return the embedding (n, c) times the number by which its module multiplies it, as XGLM's, or the model, as Gemma.

    The number of the model is known where the first norm reads the embedding alone, without positions.
    """
    find_module: Any = getattr(model, "get_input_embeddings", lambda: None)
    module = find_module()
    if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
        embedding = module(torch.arange(len(embedding), device=embedding.device))
    if trace.tokens is None or not trace.norms or trace.norms[0].x.shape[1] != embedding.shape[1]:
        return embedding
    tokens, first = trace.tokens[0].to(embedding.device), trace.norms[0]
    read, x = widen(embedding[tokens]).to(first.x), first.x[: len(tokens)]
    factor = (read * x).sum() / read.square().sum()
    is_scaled = abs(factor - 1) > first.tolerance and is_near(factor * read, x, first.tolerance)
    return embedding * float(factor) if is_scaled else embedding


@torch.no_grad()
def apply_first_norm(trace: ActivationTrace, embedding: Tensor) -> Tensor:
    """Return the embedding (n, c) as the first layer reads it: after the norm that some models, as BLOOM, apply to it."""
    first, second = (trace.norms + trace.norms[:1])[:2]
    if first.y.shape[1] != embedding.shape[1] or not is_near(second.x, first.y, first.tolerance):
        return embedding
    with evaluate_mode(first.module):
        normed: Tensor = first.module(embedding)
    return normed


def find_output_projection(recording: Recording, number: int, trace: ActivationTrace) -> Activation | None:
    """Find the module whose input is the context of a layer, head by head, and whose output goes into no norm."""
    values, m = recording.values(number), recording.map(number)
    if values is None:
        return None
    context = m.select(batch=0) @ widen(values[:1])
    joined = widen(context[0, :, : trace.positions].transpose(0, 1).flatten(1))  # (p, h e)
    found = next((one for one in trace.linear if is_near(one.x, joined, one.tolerance)), None)
    is_normed = found is not None and any(is_near(norm.x, found.y, norm.tolerance) for norm in trace.norms)
    return None if is_normed else found


def find_layer(
    recording: Recording, number: int, trace: ActivationTrace, projection: Activation | None, gain: float
) -> LayerParts:
    """Find the matrices of a layer: of its output projection, times its gain, and of that of its values."""
    values = recording.values(number)
    if values is None:
        return LayerParts(None, None, None)
    matrix = read_matrix(projection) if projection is not None and gain else None
    output = None if matrix is None else (matrix * gain).view(recording.map(number).shape[1], -1, matrix.shape[1])
    found = find_projection(trace, widen(values[0, :, : trace.positions]))
    norm = None if found is None else find_norm_before(trace, found.activation)
    return LayerParts(output, None, None) if found is None or norm is None else LayerParts(output, found.matrices, norm)


def find_projection(trace: ActivationTrace, heads: Tensor) -> HeadProjection | None:
    """Find the linear module whose output has vectors (g, p, e) in its columns at the first p positions.

    Heads of zeros are found beside others; where all are, so that any module may have made them, none is.
    """
    for one in trace.linear if heads.any() else ():
        y = one.y[: heads.shape[1]]
        if find_columns(y, heads[0], one.tolerance) is None:  # of most modules, without a look at the other heads
            continue
        columns = [find_columns(y, head, one.tolerance) for head in heads]
        if None not in columns and (matrix := read_matrix(one)) is not None:
            parts = [slice(start, start + heads.shape[2]) for start in columns if start is not None]
            return HeadProjection(one, *(torch.stack([x[:, part] for part in parts]) for x in (one.y, matrix)))
    return None


def find_norm_before(trace: ActivationTrace, one: Activation) -> Norm | None:
    """Return the norm whose output goes into a module, of gain 1 if no norm does.

    None for a norm of another kind, and where the module reads a projection of the stream: a latent vector, as DeepSeek's.
    """
    before = next((norm for norm in trace.norms if is_near(norm.y, one.x, one.tolerance)), None)
    if is_projected(trace, one if before is None else before):
        return None
    return Norm(torch.ones(one.x.shape[1]), False) if before is None else fit_norm(before)


def is_projected(trace: ActivationTrace, one: Activation) -> bool:
    """Return whether the input of a module is columns of what a linear module made of a norm's output."""
    sources = (other for other in trace.linear if find_columns(other.y, one.x, one.tolerance) is not None)
    return any(is_near(norm.y, other.x, other.tolerance) for other in sources for norm in trace.norms)


@torch.no_grad()
def read_matrix(one: Activation) -> Tensor | None:
    """Return the matrix (c_in, c_out) of a linear module, from its forward on the unit vectors; None if it is not linear."""
    weight: Any = one.module.weight
    unit = torch.eye(one.x.shape[1], device=weight.device, dtype=weight.dtype if weight.is_floating_point() else torch.float32)
    with evaluate_mode(one.module):
        shift = one.module(torch.zeros_like(unit[:1]))
        matrix = (widen(one.module(PROBE * unit)) - widen(shift)).cpu() / PROBE
    return matrix if is_near(one.x.cpu() @ matrix.to(one.x.dtype) + widen(shift).cpu(), one.y.cpu(), one.tolerance) else None


@torch.no_grad()
def fit_norm(one: Activation) -> Norm | None:
    """Return the gain of a norm, by least squares for each channel; whichever of layer norm and RMS norm fits better.

    It is fitted to the activation and to the module's forward on random vectors: a few positions alone fit norms of both kinds.
    The number added to the variance is that which the module names eps or variance_epsilon, if the fit is better with it.
    None if the best fit is not near.
    """
    weight: Any = one.module.weight
    inputs = torch.randn(POSITIONS, one.x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight)
    x = torch.cat([one.x.double().cpu(), inputs.double().cpu()])
    with evaluate_mode(one.module):
        y = torch.cat([one.y.double().cpu(), one.module(inputs).double().cpu()])
    named = [getattr(one.module, name, 0.0) for name in ("eps", "variance_epsilon")]
    fits = []
    for eps in (0.0, *(float(eps) for eps in named if isinstance(eps, float) and eps > 0)):
        for is_centered in (True, False):
            norm = Norm(torch.empty(0), is_centered, eps)
            z = (x - x.mean(-1, keepdim=True) if is_centered else x) / norm.measure_scale(x).unsqueeze(-1)
            z0, y0 = (z - z.mean(0), y - y.mean(0)) if is_centered else (z, y)  # an RMS norm has no shift
            gain = (z0 * y0).sum(0) / z0.square().sum(0).clamp(min=1e-30)
            fits.append((float((gain * z0 - y0).norm()), replace(norm, gain=gain.to(one.y.dtype))))
    error, best = min(fits, key=lambda fit: fit[0])
    return best if error <= max(NEAR_NORM, one.tolerance) * float(y.norm()) else None


def trace_forward(model: nn.Module, tokens: Tensor, positions: int = POSITIONS) -> tuple[ActivationTrace, Recording, Tensor]:
    """Run a model on tokens (b, t): return its modules' activations at the first positions, its recording and its logits."""
    trace = ActivationTrace(positions)
    with trace.watch(model), record(model, keep="values") as recording:
        logits = compute_logits(model, tokens).detach()
    return trace, recording, logits
