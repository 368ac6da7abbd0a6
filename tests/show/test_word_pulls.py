import torch

import regard
from regard import GPT2
from regard.show.word_pulls import compute_pulls, find_largest_part, sum_over_queries


def test_pulls_add_up_to_gradients_times_contexts_and_name_the_head_with_most():
    model = GPT2.load("pocket", torch.float64)
    ids = torch.tensor([model.text.encode("Lily had a red ball.")])
    words = model.text.pieces(ids[0].tolist())
    with regard.record(model, keep="values") as recording:
        logits = model(ids)
    attribution = recording.attribute(logits[0, -1].max())
    rows = compute_pulls(attribution, words)
    assert sorted(row.position for row in rows) == list(range(len(words)))
    assert [abs(row.pull) for row in rows] == sorted((abs(row.pull) for row in rows), reverse=True)
    pairs = (attribution.gradients_and_contexts(layer) for layer in range(6))
    exact = sum((gradient * context).sum() for gradient, context in pairs)
    torch.testing.assert_close(torch.tensor(sum(row.pull for row in rows)).double(), exact.detach(), rtol=1e-6, atol=1e-6)
    dense = torch.stack([attribution.map(layer).dense()[0] for layer in range(6)])  # (layers, h, q, k)
    for row in rows:
        assert row.word == words[row.position]
        parts = dense[..., row.position].sum(-1)
        layer, head = map(int, row.head.split("."))
        assert abs(row.head_pull - float(parts[layer, head])) < 1e-6
        assert abs(row.head_pull) > float(parts.abs().max()) - 1e-6
    assert sum_over_queries(attribution, "cut").shape == (6, 6, len(words))


def test_the_largest_part_is_that_of_the_largest_size():
    assert find_largest_part(torch.tensor([[0.5, 0.1], [-2.0, 1.0], [0.0, 0.3]])) == ("1.0", -2.0)
