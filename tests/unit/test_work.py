"""What is counted equals what can be told from the shapes."""

import pytest
import torch
import torch.nn.functional as F

from moe_lib import MoEBlock, MoEConfig, SwiGLUExpert
from moe_lib.work import Work, work_of


def test_an_expert_is_three_products_and_two_other_operations():
    expert = SwiGLUExpert(12, 8)
    work = work_of(expert, torch.randn(5, 12))
    assert (work.products, work.others, work.flops) == (3, 2, 5 * 2 * 3 * 12 * 8)
    assert work.names == {"mm": 3, "silu": 1, "mul": 1}


@pytest.mark.parametrize("shape", [(12,), (0, 12), (2, 3, 12)])
def test_flops_follow_the_rows_whatever_the_layout(shape):
    rows = torch.Size(shape[:-1]).numel()
    assert work_of(SwiGLUExpert(12, 8), torch.randn(shape)).flops == rows * 2 * 3 * 12 * 8


def test_a_grouped_product_counts_once_and_each_row_once():
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    work = work_of(lambda: F.grouped_mm(torch.randn(7, 16), torch.randn(3, 16, 8), offs=ends))
    assert (work.products, work.flops) == (1, 2 * 7 * 16 * 8)


def test_a_block_does_the_flops_its_config_tells():
    config = MoEConfig(16, 8, 6, 2)
    assert work_of(MoEBlock(config), torch.randn(9, 16)).flops == 9 * config.flops_per_token


def test_views_and_reads_are_not_work():
    def look(x):
        return x.view(-1)[:3].unsqueeze(0).T.double(), x.sum().item()

    assert work_of(look, torch.randn(4, 4)).names == {"sum": 1}


def test_nothing_is_counted_after_the_with():
    with Work() as work:
        torch.randn(3)
    torch.randn(3)
    assert work.names == {"randn": 1} and work.products == work.flops == 0


def test_the_number_of_threads_is_put_back_even_after_a_failure():
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        work_of(lambda: 1 / 0)
    assert torch.get_num_threads() == threads
