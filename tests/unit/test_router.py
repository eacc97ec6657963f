"""The gate, and every fault under "Gate" that other implementations really shipped."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lib import KIMI_K2, MoEBlock, MoEConfig, Router
from moe_lib.router import top_k
from oracle import choice


def router(experts=8, k=2, hidden=8, **changes) -> Router:
    return Router(KIMI_K2.replace(hidden_size=hidden, n_routed_experts=experts, num_experts_per_tok=k, **changes))


def route(gate: Router, scores, bias=None):
    """Route by given scores, past the matrix product."""
    if bias is not None:
        gate.e_score_correction_bias.copy_(torch.tensor(bias))
    return gate.route(torch.tensor([scores]))


@st.composite
def gates(draw):
    groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    kept = draw(st.integers(1, groups))
    k = draw(st.integers(1, kept * size))
    # few distinct values, so that ties are common
    value = st.integers(-6, 6).map(lambda n: n / 4)
    rows = draw(st.lists(st.lists(value, min_size=groups * size, max_size=groups * size), min_size=1, max_size=4))
    bias = draw(st.lists(value, min_size=groups * size, max_size=groups * size))
    return MoEConfig(4, 4, groups * size, k, n_group=groups, topk_group=kept), rows, bias


@given(gates())
def test_choice_equals_plain_python_with_ties_and_negative_scores(case):
    config, rows, bias = case
    gate = Router(config)
    gate.e_score_correction_bias.copy_(torch.tensor(bias))
    routing = gate.route(torch.tensor(rows, dtype=torch.float32))
    assert routing.indices.tolist() == [
        choice(row, bias, config.num_experts_per_tok, config.n_group, config.topk_group) for row in rows
    ]


def test_masked_groups_never_win():
    scores, bias = [0.9, 0.8, 0.7, 0.6, 0.3, 0.3, 0.3, 0.3], [-1.5] * 4 + [-1.4] * 4
    assert sorted(route(router(n_group=2, topk_group=1), scores, bias).indices[0].tolist()) == [0, 1]


def test_all_biased_scores_negative():
    routing = route(router(), [0.1, 0.9, 0.3, 0.8, 0.2, 0.4, 0.5, 0.6], [-2.0] * 8)
    assert routing.indices[0].tolist() == [1, 3]
    torch.testing.assert_close(routing.weights.sum(), torch.tensor(2.827))


def test_bias_changes_who_and_never_how_much():
    scores = [0.8, 0.6, 0.4, 0.2]
    routing = route(router(experts=4), scores, [-10.0, 0, 0, 10.0])
    assert routing.indices[0].tolist() == [3, 1]
    torch.testing.assert_close(routing.weights[0], torch.tensor([0.2, 0.6]) / 0.8 * 2.827)
    torch.testing.assert_close(routing.scores[0], torch.tensor(scores))


def test_bias_is_never_stored_below_float32():
    block = MoEBlock(KIMI_K2.replace(hidden_size=8, moe_intermediate_size=4, n_routed_experts=238))
    steps = 6.817 + 0.001 * torch.arange(238)
    block.gate.e_score_correction_bias.copy_(steps)
    for cast in (lambda b: b.to(torch.bfloat16), lambda b: b.half(), lambda b: b.bfloat16().float(), copy.deepcopy):
        bias = cast(copy.deepcopy(block)).gate.e_score_correction_bias
        assert bias.dtype == torch.float32 and len(bias.unique()) == 238 and torch.equal(bias, steps)
    assert block.double().to(torch.bfloat16).gate.e_score_correction_bias.dtype == torch.float32
    assert block.gate.weight.dtype == torch.bfloat16


def test_bias_given_in_bfloat16_is_stored_in_float32():
    gate = router()
    state = {"weight": gate.weight.detach().clone(), "e_score_correction_bias": torch.arange(8).bfloat16()}
    gate.load_state_dict(state, assign=True)
    assert gate.e_score_correction_bias.dtype == torch.float32 and state["e_score_correction_bias"].dtype == torch.bfloat16


def test_small_steps_of_the_bias_add_up():
    gate = router().bfloat16()
    gate.e_score_correction_bias.fill_(5.0)
    for _ in range(1000):
        gate.e_score_correction_bias += 0.001
    torch.testing.assert_close(gate.e_score_correction_bias, torch.full((8,), 6.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_float32_in_a_bfloat16_model(autocast):
    # two logits, 4.000 and 4.003, either side of the cut: bfloat16 rounds both to 4
    gate = router(experts=8, k=1, hidden=2).to(torch.bfloat16)
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[2], gate.weight[5] = torch.tensor([4.0, 0.0]), torch.tensor([4.0, 0.003])
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = gate(x)
    assert routing.indices.item() == 5
    assert routing.weights.dtype == routing.scores.dtype == torch.float32


def test_float64_is_kept():
    routing = router().double()(torch.randn(3, 8, dtype=torch.float64))
    assert routing.weights.dtype == routing.scores.dtype == torch.float64


def test_ties_go_to_the_lower_number():
    gate = router(experts=384, k=8)
    torch.nn.init.zeros_(gate.weight)
    for _ in range(20):
        assert gate(torch.randn(5, 8)).indices.tolist() == [list(range(8))] * 5
    assert top_k(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), 4).tolist() == [[1, 2, 4, 0]]


def test_groups_of_one_expert_work():
    routing = route(router(n_group=8, topk_group=3, k=3), [0.1, 0.9, 0.3, 0.8, 0.2, 0.4, 0.5, 0.6], [0.0] * 8)
    assert routing.indices[0].tolist() == [1, 3, 7]


def test_weights_without_normalising_and_scale():
    routing = route(router(norm_topk_prob=False, routed_scaling_factor=1.0), [0.1, 0.9, 0.3, 0.8, 0, 0, 0, 0])
    torch.testing.assert_close(routing.weights[0], torch.tensor([0.9, 0.8]))


@pytest.mark.parametrize(("name", "at"), [("e_score_correction_bias", 3), ("weight", (2, 1))])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_refused_at_load_and_named(name, at, value):
    state = {k: v.clone() for k, v in router().state_dict().items()}
    state[name][at] = value
    with pytest.raises(RuntimeError, match=f"{name} holds {value} at"):
        router().load_state_dict(state)


def test_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"shape \(2, 5\).*hidden_size=8"):
        router()(torch.randn(2, 5))


def test_gradient_reaches_weight_and_input_and_none_goes_through_the_choice():
    gate, x = router().double(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    share = torch.randn(5, 2, dtype=torch.float64)
    (gate(x).weights * share).sum().backward()
    indices = gate(x).indices

    def with_choice_fixed(x, weight):
        chosen = torch.sigmoid(x @ weight.T).gather(1, indices)
        return (chosen / chosen.sum(1, keepdim=True) * 2.827 * share).sum()

    inputs = x.detach().clone().requires_grad_(), gate.weight.detach().clone().requires_grad_()
    expected = torch.autograd.grad(with_choice_fixed(*inputs), inputs)
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(gate.weight.grad, expected[1])
    assert x.grad.abs().sum() > 0
