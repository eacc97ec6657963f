"""What a GPU would be asked, without one: tensors that have shapes and no values, so that any look at a value raises."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from moe_lib import DEEPSEEK_V3, KIMI_K2, MoEBlock
from moe_lib.experts import GroupedExperts

LOOKS = (DataDependentOutputException, DynamicOutputShapeException)


@pytest.mark.parametrize("config", [KIMI_K2, DEEPSEEK_V3], ids=["Kimi K2", "DeepSeek-V3"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_forward_of_the_grouped_block_never_waits_for_a_value(monkeypatch, config, tokens):
    monkeypatch.setattr(GroupedExperts, "forward", GroupedExperts._grouped)  # the path of a GPU
    with FakeTensorMode(), torch.inference_mode():
        x = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16)
        assert MoEBlock(config, dtype=torch.bfloat16)(x).shape == x.shape


def test_the_path_of_a_cpu_does_look():
    with FakeTensorMode(), torch.inference_mode(), pytest.raises(LOOKS):
        MoEBlock(KIMI_K2, dtype=torch.bfloat16)(torch.empty(1, 4, KIMI_K2.hidden_size, dtype=torch.bfloat16))


@pytest.mark.parametrize("look", [lambda i: torch.bincount(i, minlength=9), lambda i: i.max().item(), lambda i: i[i > 0]])
def test_what_would_be_refused(look):
    with FakeTensorMode(), pytest.raises(LOOKS):
        look(torch.zeros(8, dtype=torch.int64))
