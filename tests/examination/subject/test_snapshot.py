"""What a module keeps beside its weights is put back between calls, and what changed is named."""

import torch
from torch import nn

from regard.examination.subject.restore_state import take_snapshot


class Keeping(nn.Module):
    """A module with a count, a list, a plain tensor and a buffer."""

    def __init__(self):
        super().__init__()
        self.count, self.list, self.plain = 0, [1], torch.zeros(2)
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.zeros(2))


def test_what_changed_is_named_and_put_back_and_modes_hooks_and_weights_stay():
    module = nn.Sequential(Keeping())
    part = module[0]
    kept = take_snapshot(module)
    assert kept.list_changes() == []
    part.count, part.new = 1, 2
    part.list.append(3), part.plain.add_(1), part.table.add_(1), part.weight.data.add_(1), part.train(False)
    part.register_forward_hook(lambda *_: None)
    assert kept.list_changes() == ["0.count", "0.list", "0.new", "0.plain", "0.table"]
    kept.restore()
    assert kept.list_changes() == []
    assert (part.count, part.list, hasattr(part, "new")) == (0, [1], False)
    assert not part.plain.any()
    assert not part.table.any()
    assert part.weight.all()
    assert not part.training
    assert len(part._forward_hooks) == 1
