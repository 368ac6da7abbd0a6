"""A language model of two layers whose weights are set by hand, so that it copies what followed a token before."""

import torch

from regard.models import GPT2, GPT2Config

VOCABULARY, CONTEXT = 60, 48
SHARP = 400.0  # between a query and the key it is meant to find


def make_induction_model(seed: int) -> GPT2:
    """Two layers by hand: 0.0 writes the code of the previous token, 1.0 finds it by its own token and copies what is there.

    The residual stream holds a code for each token, one for each position, and the code of the previous token, in directions
    drawn by the seed; the other heads and all feed-forward layers have small random weights.
    """
    width, e = 256, 128
    torch.manual_seed(seed)
    model = GPT2(GPT2Config(2, width // e, width, CONTEXT, VOCABULARY))
    basis = torch.linalg.qr(torch.randn(width, width))[0]
    token, place, before = basis[:VOCABULARY], basis[VOCABULARY : VOCABULARY + CONTEXT], basis[-VOCABULARY:]
    with torch.no_grad():
        model.tokens.weight.copy_(token)
        model.positions.weight.copy_(place)
        first, second = (block.attention for block in model.blocks)
        for layer in (first, second):
            for projection in (layer.W_query, layer.W_key, layer.W_value, layer.out_proj):
                projection.weight.normal_(std=0.002)
        units = torch.eye(e)
        first.W_key.weight[:e] = SHARP**0.5 * units[:, :CONTEXT] @ place
        first.W_query.weight[:e] = SHARP**0.5 * units[:, : CONTEXT - 1] @ place[1:]  # finds the position before its own
        first.W_value.weight[:e] = units[:, :VOCABULARY] @ token
        first.out_proj.weight[:, :e] = before.T @ units[:VOCABULARY]
        second.W_query.weight[:e] = SHARP**0.5 * units[:, :VOCABULARY] @ token
        second.W_key.weight[:e] = SHARP**0.5 * units[:, :VOCABULARY] @ before
        second.W_value.weight[:e] = units[:, :VOCABULARY] @ token
        second.out_proj.weight[:, :e] = 3 * token.T @ units[:VOCABULARY]
    return model.eval()
