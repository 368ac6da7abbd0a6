"""Copying: whether a head raises the logit of the token that it attends to."""

import torch
from torch import Tensor

from regard.attribution.factored_matrix import FactoredMatrix
from regard.attribution.model_parts import LayerParts, ModelParts
from regard.errors import ConfigError
from regard.mechanism.heads import share
from regard.observe.map_view import MapView
from regard.observe.score_interval import QueryScores


def score_copying(look: MapView, values: Tensor, layer: LayerParts, parts: ModelParts, tokens: Tensor) -> QueryScores:
    """Return Σ_j A_ij (ℓ_ij(t_j) - mean over t of ℓ_ij(t)) for each query i, in logits, (b, h, q).

    ℓ_ij(t) = u_tᵀ N(v_j W_O) / s_i is what key j's value adds to the logit of token t by the direct path: W_O is the head's
    part of the output projection, N the linear part of the last norm, s_i the scale by which that norm divides at query i, u_t
    a row of the unembedding. Above 0, the head raises the logit of the tokens that it attends to, over those of other tokens.
    Nothing is stored that is larger than (b, h, k, e). values (b, g, k, e); tokens (b, k).
    Source: direct logit attribution, Elhage et al. 2021; copying of attended tokens, Olsson et al. 2022.
    """
    if layer.output is None:
        raise ConfigError("the output projection of this layer was not found.")
    words = parts.unembedding - parts.unembedding.mean(0)
    reader = parts.norm.apply_transposed(words[tokens.cpu()])  # (b, k, c)
    seen = torch.einsum("bkc,hec->bhke", reader, layer.output)
    added = (share(values.to(seen), look.map.shape[1]) * seen).sum(-1, keepdim=True)  # of each key, (b, h, k, 1)
    scale = parts.norm.measure_scale(parts.final.cpu()).unsqueeze(1)  # (b, 1, q)
    changes = (look.map @ added.to(look.statistics.largest)).squeeze(-1).double()
    return look.score_queries(changes / scale.to(changes.device))


def score_ov_eigenvalues(layer: LayerParts, parts: ModelParts) -> Tensor:
    """Return Σ λ / Σ abs(λ) over the eigenvalues λ of each head's OV circuit, (h,): 1 where all are positive, which is copying.

    The circuit W_E N_in W_V W_O N_out W_U maps each token to the logits that it raises where it is attended to; the linear
    parts of the norms are folded in, and the unembedding is centered, which changes no probability. Its n x n eigenvalues are
    those of an e x e matrix. Positions, and what earlier layers add to the embedding, are left out.
    Source: Elhage et al. 2021, "copying / primitive in-context learning".
    """
    if layer.output is None or layer.value is None or parts.embedding is None or layer.norm is None:
        raise ConfigError("the value projection, the output projection or the embedding of this layer was not found.")
    inner = compute_vocabulary_product(parts)
    read = layer.norm.apply_transposed(layer.value.transpose(1, 2))  # (g, e, c)
    read = share(read.unsqueeze(0), len(layer.output))[0].transpose(1, 2)
    circuits = zip(read.double(), layer.output.double() @ inner, strict=True)  # (c, e) and (e, c) of each head
    return torch.stack([score_eigenvalues(FactoredMatrix(*factors).eigenvalues()) for factors in circuits])


def score_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """Return Σ λ / Σ abs(λ), from -1 to 1. Source: Elhage et al. 2021."""
    score: Tensor = eigenvalues.real.sum() / eigenvalues.abs().sum()
    return score


def compute_vocabulary_product(parts: ModelParts) -> Tensor:
    """Return N_out W_U W_E, (c, c): what a head's output and input share through the vocabulary, float64."""
    assert parts.embedding is not None
    words = parts.unembedding - parts.unembedding.mean(0)
    product = (words.T @ parts.embedding).double()
    found: Tensor = parts.norm.apply_transposed(product.T).T  # over the residual that a head writes
    return found
