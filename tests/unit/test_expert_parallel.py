"""Building and training a block over ranks: no rank ever holds another's experts, and any number of ranks is one block."""

import sys

import pytest
import torch
from safetensors.torch import save_file

import live  # noqa: F401
import rank_work as work
from moe_lib import KIMI_K2, MoEBlock
from moe_lib.expert_parallel import SeededExperts, drawn, fill_from_seed
from moe_lib.ranks import Ranks

CONFIG = KIMI_K2.replace(hidden_size=32, moe_intermediate_size=16, n_routed_experts=16, num_experts_per_tok=3)
BIG = KIMI_K2.replace(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=64, num_experts_per_tok=4)


@pytest.fixture(scope="module")
def eight():
    with Ranks(8) as ranks:
        yield ranks


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_seed_gives_one_block_on_any_number_of_ranks(eight, size):
    whole = MoEBlock(CONFIG, "loop")
    fill_from_seed(whole, 7)
    union = {}
    for part in eight.run(work.seeded, CONFIG, 7, ranks=size):
        union |= part
    tensors = whole.to_hf()
    assert union.keys() == tensors.keys() and all(torch.equal(union[k], tensors[k]) for k in tensors)
    other = MoEBlock(CONFIG, "grouped")
    fill_from_seed(other, 8)
    assert not any(torch.equal(tensors[k], t) for k, t in other.to_hf().items() if not k.endswith("bias"))


def test_experts_drawn_when_needed_are_those_of_the_seed():
    whole, lean = MoEBlock(CONFIG, "loop"), MoEBlock(CONFIG, SeededExperts(CONFIG, 7))
    fill_from_seed(whole, 7)
    fill_from_seed(lean, 7)
    for tokens in (0, 1, 30):
        x = torch.randn(tokens, CONFIG.hidden_size)
        assert torch.equal(lean(x), whole(x))


def test_weights_are_drawn_with_the_spread_of_a_linear_layer():
    weight = drawn("experts.3.up_proj.weight", (500, 400), 1)
    assert weight.abs().max() <= 0.05 and weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert drawn("gate.weight", (500, 400), 1).std().item() == pytest.approx(0.05, rel=0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a process's memory as Linux tells it")
@pytest.mark.parametrize("source", ["seed", "checkpoint"])
def test_a_ranks_peak_memory_is_its_share_and_the_shared_parts(eight, source, tmp_path):
    """Measured while eight ranks build: within 10% of an eighth of the experts plus gate and shared expert."""
    path = None
    if source == "checkpoint":
        path = str(tmp_path / "layer.safetensors")
        block = MoEBlock(BIG, "loop", dtype=torch.bfloat16)
        save_file(block.to_hf(), path)
    dtype = torch.float32 if source == "seed" else torch.bfloat16
    share = BIG.routed_params // 8 + BIG.shared_params + BIG.router_params
    expected = share * dtype.itemsize
    for measured in eight.run(work.peak_of_building, BIG, dtype, path):
        assert 0.9 * expected < measured < 1.10 * expected, f"{measured / expected:.3f} of what a rank should hold"


def test_two_training_steps_on_two_ranks_are_two_steps_of_one_process(eight):
    whole = MoEBlock(CONFIG, "loop")
    fill_from_seed(whole, 7)
    x, target = torch.randn(2, 24, CONFIG.hidden_size), torch.randn(2, 24, CONFIG.hidden_size)
    optimizer = torch.optim.SGD(whole.parameters(), 0.05, momentum=0.9)
    for inputs, wanted in zip(x, target):
        optimizer.zero_grad()
        (whole(inputs) - wanted).square().sum().backward()
        optimizer.step()
    union = {}
    for part in eight.run(work.train, CONFIG, 7, x, target, ranks=2):
        union |= part
    for name, tensor in whole.to_hf().items():
        torch.testing.assert_close(union[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")
