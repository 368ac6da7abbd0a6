"""Right kernels that go block by block, as those in wrong_kernels, each with a limit of its own."""

from examination.wrong_kernels import online
from examination.wrong_masks import Fused


class Online(Fused):
    """A block of 32 keys at a time."""

    def attend(self, q, k, v):
        return online(q, k, v, 32)


class WholeBlocks(Fused):
    """It takes whole blocks of 16 alone."""

    def attend(self, q, k, v):
        assert q.shape[-2] % 16 == 0, "whole blocks of 16"
        return online(q, k, v, 16)


class ManyTokensRefused(Fused):
    """It takes 64 tokens at most."""

    def attend(self, q, k, v):
        if q.shape[-2] > 64:
            raise ValueError("64 tokens at most")
        return online(q, k, v, 16)


def online_function(q, k, v):
    """A function, a block of 64 keys at a time."""
    return online(q, k, v, 64)


KERNELS = [
    *((make.__name__, make) for make in (Online, WholeBlocks, ManyTokensRefused)),
    ("online_function", lambda: online_function),
    ("Online in bfloat16", lambda: Online().bfloat16()),
]
