import pytest
import torch

from moe_lib import SwiGLUExpert, swiglu


def test_swiglu_by_hand():
    gate, up = torch.tensor([0.0, 1.0, -1.0, 3.0]), torch.tensor([5.0, 2.0, 2.0, -1.0])
    by_hand = [0.0, 2 / (1 + 2.718281828459045**-1), -2 / (1 + 2.718281828459045), -3 / (1 + 2.718281828459045**-3)]
    torch.testing.assert_close(swiglu(gate, up), torch.tensor(by_hand))


def test_gradients_are_each_other():
    gate, up = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64, requires_grad=True)
    swiglu(gate, up).sum().backward()
    s = gate.detach().sigmoid()
    torch.testing.assert_close(up.grad, gate.detach() * s)
    torch.testing.assert_close(gate.grad, up.detach() * (s + gate.detach() * s * (1 - s)))


def test_gate_and_up_have_their_own_places():
    expert = SwiGLUExpert(4, 3)
    with torch.no_grad():
        expert.gate_proj.weight.fill_(0.75)
        expert.up_proj.weight.fill_(-0.25)
        expert.down_proj.weight.fill_(1 / 3)
    silu_3 = 3 / (1 + torch.exp(torch.tensor(-3.0)))
    torch.testing.assert_close(expert(torch.ones(2, 4)), torch.full((2, 4), -silu_3.item()))


def test_any_leading_shape():
    expert = SwiGLUExpert(4, 3)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(expert(x)[1, 3], expert(x[1, 3]))
    assert expert(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0)])
def test_empty_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="needs at least 1"):
        SwiGLUExpert(*sizes)
