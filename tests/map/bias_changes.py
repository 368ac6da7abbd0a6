"""What is done with a bias (2, 3, 41, k) that is computed from fewer numbers, and with the same bias stored whole."""

import copy
import operator

import torch

DOUBLE = torch.float64
ROWS, COLUMNS = torch.tensor([3, 0, -1, -2]), torch.tensor([7, -1, -3, 0])
KEPT = {  # what has the same form
    "slices": lambda x: x[:, 1:, 5:, :-7],
    "a row of heads": lambda x: x[:, 2],
    "heads by number": lambda x: x[:, (2, 0)],
    "heads by a list": lambda x: x[:, [2, 0]],
    "one matrix, expanded": lambda x: x[0, 1].expand(x.shape[2:]),
    "all batch rows": lambda x: x[:1].expand(4, *x.shape[1:]),
    "planes by number": lambda x: x[torch.zeros(4, dtype=torch.long), torch.tensor([0, 2, 1, 1])],
    "a copy": torch.clone,
    "a deep copy": copy.deepcopy,
    "the same precision": lambda x: x.to(DOUBLE),
}
READ = {
    "entries": lambda x: x[0, 1][ROWS, COLUMNS],
    "entries that broadcast": lambda x: x[0, 1][ROWS.unsqueeze(-1), COLUMNS],
    "a block by number": lambda x: x[0, 1][torch.arange(3, 9).unsqueeze(-1), torch.arange(2, 17)],
    "every other row": lambda x: x[0, 1][torch.arange(3, 9, 2).flip(0).unsqueeze(-1), torch.arange(17)],
    "entries of planes": lambda x: x[torch.tensor([0, 1, 0, 1]), torch.tensor([2, 1, 0, 2]), ROWS, COLUMNS],
    "entries of all planes": lambda x: x[:, :, ROWS, COLUMNS],
    "a pair of each query": lambda x: x[
        torch.arange(2).view(-1, 1, 1), torch.arange(3).view(1, -1, 1), torch.arange(41), torch.arange(41).flip(0)
    ],
    "entries of planes apart": lambda x: x[torch.tensor([0, 1]), :, ROWS[:2], COLUMNS[:2]],
    "rows": lambda x: x[0, 1][ROWS],
    "rows of all heads": lambda x: x[:, :, ROWS],
    "selected rows": lambda x: x.index_select(2, torch.tensor([3, 0, 40])),
    "one row": lambda x: x[:1, :, -1:],
    "a bool index": lambda x: x[0, 1][ROWS.new_ones(41).bool()],
    "every third key": lambda x: x[..., ::3],
    "an empty slice": lambda x: x[..., 5:5],
    "another precision": lambda x: x.to(torch.bfloat16).double(),
    "a sum": lambda x: x + 1,
    "a sum in place": lambda x: torch.zeros(x.shape, dtype=DOUBLE).add_(x),
    "a slice of a sum": lambda x: operator.iadd(torch.ones(6, 4, dtype=DOUBLE), x[0, 1][2:8, 1:5]),
    "the largest": torch.amax,
    "its transpose": lambda x: x.mT,
    "joined": lambda x: torch.cat([x, x], 1),
}
