"""The last columns of latent attention are rotated alike in queries and in the keys that all heads share."""

import pytest
import torch

from examination.right_variants import LatentUnabsorbed
from examination.subjects import case_of
from regard import examine
from regard.examination.call_checks import position_checks
from regard.examination.report import Finding


class Turned(LatentUnabsorbed):
    """Queries (b, h, t, d) and shared keys (b, t, d) that are turned, or not, and by positions from a first one on."""

    def __init__(self, queries, keys):
        super().__init__()
        self.queries, self.keys = queries, keys

    def turn(self, x):
        first = self.keys if x.dim() == 3 else self.queries
        if first is None:
            return x
        shape = list(x.shape)
        shape[-2] = first
        return super().turn(torch.cat((x.new_zeros(shape), x), -2))[..., first:, :]


PLAIN = "of {} are rotated by their positions, but those of {}, which they meet, are not"


@pytest.mark.parametrize(
    ("queries", "keys", "does"),
    [
        (0, None, PLAIN.format("queries", "keys")),
        (None, 0, PLAIN.format("keys", "queries")),
        (0, 1, "queries and keys start at different positions"),
        (0, 0, ""),
        (2, 2, ""),
    ],
)
def test_the_rotation_of_shared_keys_is_compared_with_that_of_queries(queries, keys, does):
    torch.manual_seed(0)
    layer = Turned(queries, keys)
    assert [one.kind for one in examine(layer).findings] == (["wrong positions"] if does else [])
    wrong = position_checks.check_positions(case_of(layer).inner_calls)
    assert isinstance(wrong, Finding) == bool(does)
    assert not does or does in wrong.evidence
