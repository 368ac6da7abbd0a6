import pytest
import torch
from torch import nn

from examination.identify.layers import C, Fused, FusedGroups, Plain, TwoMatrices, Unnamed
from regard import StackedHeads
from regard.examination.identify.projection_layouts import (
    find_layouts,
    has_extra_layers,
    list_head_counts,
    parse_matrix_role,
    split_columns,
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "q",
            "W_query query q_proj to_q wq Wq WQ W_Q query_layer linear_q self.query fc_q lin_q queries w_qs attn.q queryProj",
        ),
        ("k", "W_key key k_proj to_k wk Wk W_K keys linear_k lin_k w_ks attention.self.key"),
        ("v", "W_value value v_proj to_v wv Wv W_V values linear_v lin_v val w_vs"),
        ("qkv", "qkv Wqkv to_qkv c_attn in_proj in_proj_weight query_key_value qkv_proj attn.qkv.weight"),
        ("kv", "kv to_kv kv_proj Wkv key_value"),
        ("o", "out_proj o_proj wo W_O to_out.0 c_proj dense proj fc_out unify_heads output.dense"),
        ("", "linears.0 a layer1"),
    ],
)
def test_a_name_says_what_a_matrix_is_for(kind, names):
    assert {name: parse_matrix_role(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def find_first_layout(module, width=C, out=C):
    return next(find_layouts(module, width, out))


def test_separate_matrices_are_reported_by_name_in_any_order():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.value, self.key, self.query = (nn.Linear(C, C) for _ in range(4))

    layout = find_first_layout(Turned())
    assert [one.name for one in (layout.q, layout.k, layout.v, layout.output)] == ["query", "key", "value", "proj"]
    assert layout.has_known_roles


def test_an_output_is_taken_by_name_before_what_else_would_fit():
    class Gated(Plain):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(C, C)
            self.out = self._modules.pop("out_proj")

    assert [one.output.name for one in find_layouts(Gated(), C, C)] == ["out", "gate"]


def test_heads_that_are_modules_stand_side_by_side():
    layout = find_first_layout(StackedHeads(C, 5, 11, 0.0, 3), C, 15)
    assert (layout.heads, layout.has_separate_heads, layout.q.out_features, layout.output) == (3, True, 15, None)


def test_matrices_without_names_are_tried_in_every_order():
    found = list(find_layouts(Unnamed(), C, C))
    assert found[0].says == "linears.0, linears.1, linears.2"
    assert found[0].output.name == "linears.3"
    assert len({one.says for one in found}) == 24
    assert not any(one.has_known_roles for one in found)


@pytest.mark.parametrize("order", ["3hd", "h3d", "hd3", "3dh", "d3h", "dh3"])
def test_the_columns_of_a_fused_matrix_are_taken_apart_in_every_order(order):
    layout = next(one for one in find_layouts(Fused(), C, C) if one.order == order and one.roles == "kqv")
    index = split_columns(layout, 3)
    sizes = {"3": 3, "h": 3, "d": C // 3}
    place = torch.arange(3 * C).view([sizes[axis] for axis in order])
    for n, letter in enumerate("kqv"):
        third = place.select(order.index("3"), n)
        assert torch.equal(index[letter], (third if order.replace("3", "") == "hd" else third.T).flatten())


def test_groups_and_two_matrices_have_their_own_columns():
    grouped = next(one for one in find_layouts(FusedGroups(), 24, 24) if one.order == "grouped")
    assert [index.tolist() for index in split_columns(grouped, 6).values()] == [
        [*range(24)],
        [*range(24, 32)],
        [*range(32, 40)],
    ]
    two = find_first_layout(TwoMatrices(), C, 8)
    assert [index.tolist()[:2] for index in split_columns(two, 3).values()] == [[0, 1], [C, C + 1], [2 * C, 2 * C + 1]]
    assert split_columns(two, 5) is None


def test_no_parameters_are_a_layout_too():
    assert find_first_layout(nn.Dropout()).q is None
    assert find_first_layout(None).says == "no parameters: q = k = v = x"


def test_heads_that_are_stated_are_tried_first_and_all_others_after():
    layer = Plain(C, 4)
    assert list_head_counts(layer, C)[0] == 4
    assert sorted(list_head_counts(layer, C)) == [1, 2, 3, 4, 6, 12]
    assert 12 in list_head_counts(None, 768)[:1]


def test_more_than_attention_is_crowded():
    assert has_extra_layers(nn.TransformerEncoderLayer(C, 3), C)
    assert has_extra_layers(nn.Sequential(Plain(), nn.LayerNorm(C)), C)
    assert not any(has_extra_layers(module, C) for module in (Plain(), Unnamed(), StackedHeads(C, 5, 11, 0.0, 7)))
