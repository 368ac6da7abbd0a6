"""A file of layers as somebody writes it, for the tests of regard examine: right and wrong ones, and some that end or hang."""

import sys

LAYERS = '''
"""A file as somebody writes it."""
import ctypes
import math
import os
import sys
import time
import torch
from torch import nn
from beside import WIDTH


class Attention(nn.Module):
    leak = False

    def __init__(self, d_in, d_out, bias=False, name="plain"):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=bias) for _ in range(3))
        assert name in ("plain", "fancy")

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
        hidden = torch.ones_like(scores).triu(1).bool()
        return (scores if self.leak else scores.masked_fill(hidden, -torch.inf)).softmax(-1) @ v


class Leaking(Attention):
    leak = True


class Holder:
    layer = Attention(WIDTH, 6)


def function(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def maker(width=WIDTH):
    print("making")
    return Attention(width, 6)


class Ending(Attention):
    def __init__(self, how, tokens=6):
        super().__init__(14, 6)
        self.how, self.tokens = how, tokens

    def forward(self, x):
        if x.shape[1] > self.tokens:
            getattr(self, self.how)()
        return super().forward(x)

    def exits(self):
        sys.exit(0)

    def exits_at_once(self):
        os._exit(0)

    def is_interrupted(self):
        raise KeyboardInterrupt

    def crashes(self):
        ctypes.string_at(0)

    def waits(self):
        print(f"waiting in {os.getpid()}", flush=True)
        time.sleep(600)

    def holds_the_lock(self):
        sum(range(10**13))

    def prints(self):
        for _ in range(100):
            print("x" * 1000, flush=True)


number = 7
print("running")
'''


def write_layers(folder, monkeypatch):
    """Write the file into a folder, where it can be imported as well; the path of it."""
    monkeypatch.syspath_prepend(folder)  # and what the command puts before it is gone afterwards
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    (folder / "beside.py").write_text("WIDTH = 14\n")
    path = folder / "attention_of_mine.py"
    path.write_text(LAYERS)
    return path
