"""Loads, MaxVio and its noise floor, the two cures, and information between experts and kinds."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lib import KIMI_K2, MoEBlock, Router, Routing
from moe_lib.balance import (
    auxiliary_loss,
    bias_update,
    load,
    load_by_kind,
    max_violation,
    mutual_information,
    sampling_floor,
    update_bias,
)

SMALL = KIMI_K2.replace(hidden_size=8, moe_intermediate_size=4, n_routed_experts=6, num_experts_per_tok=2)


def drawn_routing(tokens=24, experts=6, k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    return Routing(scores.topk(k).indices, torch.ones(tokens, k), scores)


# --- loads -----------------------------------------------------------------------------------------------------------


def test_load_counts_each_token_once_for_each_of_its_experts():
    assert load(torch.tensor([[0, 2], [2, 1], [2, 0]]), 5).tolist() == [2, 1, 3, 0, 0]
    assert load(torch.zeros(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_padding_loads_nobody():
    indices, mask = torch.tensor([[0, 2], [2, 1], [2, 0], [0, 1]]), torch.tensor([[True, False], [True, False]])
    assert load(indices, 3, mask).tolist() == [2, 0, 2]
    assert load(indices, 3).tolist() == [3, 2, 3]


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 2\) for 3 tokens"):
        load(torch.zeros(3, 2, dtype=torch.int64), 4, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"kinds has shape \(2,\) for 3 tokens"):
        load_by_kind(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 4, 2)


def test_loads_by_kind_add_up_to_the_loads():
    routing, kinds = drawn_routing(), torch.arange(24).view(4, 6) % 3
    mask = torch.arange(24).view(4, 6) % 5 > 0
    table = load_by_kind(routing.indices, kinds, 6, 3, mask)
    assert torch.equal(table.sum(1), load(routing.indices, 6, mask))
    for kind in range(3):
        assert torch.equal(table[:, kind], load(routing.indices, 6, mask & (kinds == kind)))


# --- MaxVio ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loads", "violation"), [([5, 5, 5, 5], 0), ([20, 0, 0, 0], 3), ([6, 4, 5, 5], 0.2), ([1], 0)])
def test_max_violation_by_hand(loads, violation):
    assert max_violation(torch.tensor(loads)).item() == pytest.approx(violation)


def test_max_violation_of_many_loads_at_once():
    loads = torch.tensor([[[5, 5], [10, 0]], [[3, 1], [1, 3]]])
    assert torch.allclose(max_violation(loads), torch.tensor([[0.0, 1.0], [0.5, 0.5]]))


def test_loads_that_are_all_zero_have_no_violation():
    with pytest.raises(ValueError, match="all 0"):
        max_violation(torch.tensor([[1, 2], [0, 0]]))


def simulated_floor(tokens, experts, k, times):
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(times):
        indices = torch.rand(tokens, experts, generator=generator).topk(k).indices
        found.append(max_violation(torch.bincount(indices.flatten(), minlength=experts)))
    found = torch.stack(found)
    return found.mean().item(), found.std().item() / times**0.5


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "times"),
    [(4096, 384, 8, 40), (2300, 32, 2, 300), (64, 8, 2, 2000), (50, 16, 12, 1000), (7, 2, 1, 4000)],
)
def test_the_closed_form_of_the_noise_floor_agrees_with_simulation(tokens, experts, k, times):
    mean, error = simulated_floor(tokens, experts, k, times)
    assert sampling_floor(tokens, experts, k) == pytest.approx(mean, abs=4 * error + 0.02 * mean)


def test_k2s_floor_at_4096_tokens_is_a_third():
    assert round(sampling_floor(4096, 384, 8), 2) == 0.33


def test_the_floor_falls_with_the_root_of_the_tokens_and_is_zero_where_all_are_chosen():
    assert sampling_floor(40_000, 32, 2) / sampling_floor(10_000, 32, 2) == pytest.approx(0.5, rel=0.02)
    assert sampling_floor(100, 4, 4) == 0.0


@pytest.mark.parametrize("sizes", [(0, 4, 1), (5, 4, 5), (5, 4, 0)])
def test_a_floor_of_absurd_sizes_is_refused(sizes):
    with pytest.raises(ValueError, match=f"tokens={sizes[0]}, n_experts={sizes[1]}, k={sizes[2]}"):
        sampling_floor(*sizes)


# --- the loss-free bias ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "steps"),
    [([10, 0], [-1, 1]), ([5, 5], [0, 0]), ([0, 0], [0, 0]), ([9, 1, 2], [-4 / 3, 2 / 3, 2 / 3]), ([7, 5, 3], [-1, 0, 1])],
)
def test_bias_update_by_hand(loads, steps):
    assert torch.allclose(bias_update(torch.tensor(loads), 0.001), 0.001 * torch.tensor(steps, dtype=torch.float32))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=48), st.sampled_from([1e-4, 1e-3, 1e-2]))
def test_an_update_has_mean_zero_and_helps_the_underloaded(loads, gamma):
    loads = torch.tensor(loads)
    step = bias_update(loads, gamma)
    assert step.dtype == torch.float32
    assert abs(step.double().mean()) <= 1e-6 * gamma
    assert step[loads.argmin()] >= step[loads.argmax()]
    assert torch.equal(step, bias_update(loads.float(), gamma))  # half a token or micro-batch weights make floats


def test_the_mean_of_the_bias_stays_where_it_was_over_ten_thousand_updates():
    router, generator = Router(SMALL), torch.Generator().manual_seed(0)
    skew = torch.tensor([9.0, 1, 1, 1, 1, 1])  # one busy expert: without centring the mean would drift by 2/3 gamma a step
    for _ in range(10_000):
        update_bias(router, torch.rand(6, generator=generator) * skew, 0.001)
    assert abs(router.e_score_correction_bias.double().mean()) < 0.001  # rounding alone; less than one step
    assert router.e_score_correction_bias.max() - router.e_score_correction_bias.min() > 5


def test_a_step_of_a_thousandth_is_not_lost_at_a_bias_of_five_and_in_a_bfloat16_model():
    block = MoEBlock(SMALL, dtype=torch.bfloat16)
    block.gate.e_score_correction_bias.fill_(5.0)
    for _ in range(1000):
        update_bias(block.gate, torch.tensor([3, 0, 2, 2, 2, 2]).float() + torch.tensor([0, 0, -0.25, -0.25, -0.25, -0.25]), 0.001)
    moved = block.gate.e_score_correction_bias - 5.0
    assert block.gate.e_score_correction_bias.dtype == torch.float32
    assert moved[1] - moved[0] == pytest.approx(2.0, abs=2e-3)
    stuck = torch.tensor(5.0, dtype=torch.bfloat16)
    assert stuck + 0.001 == stuck  # what would have become of it there


def test_an_update_changes_the_choice_and_not_the_weights():
    torch.manual_seed(0)
    router = Router(SMALL)
    x = torch.randn(512, 8)
    x[:, :] = x + 2 * router.weight[3]  # expert 3 is everybody's favourite
    before = max_violation(load(router(x).indices, 6))
    for _ in range(300):
        update_bias(router, load(router(x).indices, 6), 0.01)
    routing = router(x)
    assert before > 0.9 and max_violation(load(routing.indices, 6)) < 0.25
    chosen = routing.scores.gather(1, routing.indices)
    assert torch.allclose(routing.weights, 2.827 * chosen / chosen.sum(1, keepdim=True))
    assert router.e_score_correction_bias.grad_fn is None


def test_the_sign_flipped_makes_it_worse():
    torch.manual_seed(0)
    router = Router(SMALL)
    x = torch.randn(512, 8)
    other = copy.deepcopy(router)
    for _ in range(100):
        update_bias(router, load(router(x).indices, 6), 0.003)
        update_bias(other, load(other(x).indices, 6), -0.003)
    assert max_violation(load(router(x).indices, 6)) < 0.05
    assert max_violation(load(other(x).indices, 6)) > 1.1  # 2 is the most there can be


# --- the auxiliary loss ----------------------------------------------------------------------------------------------


def slow_auxiliary_loss(routing, mask, alpha, seq_aux):
    """Equations 17 to 20 written out, one token and one expert at a time, in float64."""
    experts, k = routing.scores.shape[1], routing.indices.shape[1]
    rows = [[t + s * mask.shape[1] for t in range(mask.shape[1]) if mask[s, t]] for s in range(len(mask))]
    groups = [row for row in rows if row] if seq_aux else [sum(rows, [])]
    losses = []
    for tokens in groups:
        total = 0.0
        for e in range(experts):
            f = sum(e in routing.indices[t].tolist() for t in tokens) * experts / (k * len(tokens))
            total += f * sum(routing.scores[t, e].item() / routing.scores[t].double().sum().item() for t in tokens) / len(tokens)
        losses.append(total)
    return alpha * sum(losses) / len(losses)


@pytest.mark.parametrize("seq_aux", [True, False])
def test_the_auxiliary_loss_is_the_equations(seq_aux):
    routing = drawn_routing()
    for seed in range(4):
        mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[seed % 4] = seed == 0  # a sequence of padding, or one without any
        wanted = slow_auxiliary_loss(routing, mask, 0.001, seq_aux)
        assert auxiliary_loss(routing, mask, 0.001, seq_aux).item() == pytest.approx(wanted, rel=1e-5)


def test_an_even_load_gives_alpha_and_one_expert_for_all_gives_more():
    even = Routing(torch.tensor([[0, 1], [2, 3]] * 4), torch.ones(8, 2), torch.full((8, 4), 0.5))
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert auxiliary_loss(even, mask, 0.01, True).item() == pytest.approx(0.01)
    skewed = Routing(torch.tensor([[0, 1]] * 8), torch.ones(8, 2), torch.tensor([[0.9, 0.9, 0.1, 0.1]] * 8))
    assert auxiliary_loss(skewed, mask, 0.01, True).item() == pytest.approx(0.01 * 2 * 0.9)


def test_sequences_each_of_one_kind_are_balanced_for_the_batch_and_unbalanced_for_the_sequence():
    first, second = [[0, 1]] * 4, [[2, 3]] * 4
    scores = torch.tensor([[0.9, 0.9, 0.1, 0.1]] * 4 + [[0.1, 0.1, 0.9, 0.9]] * 4)
    routing, mask = Routing(torch.tensor(first + second), torch.ones(8, 2), scores), torch.ones(2, 4, dtype=torch.bool)
    assert auxiliary_loss(routing, mask, 1.0, seq_aux=False).item() == pytest.approx(1.0)
    assert auxiliary_loss(routing, mask, 1.0, seq_aux=True).item() == pytest.approx(1.8)


def test_its_gradient_pushes_down_the_score_of_the_busy_expert_and_padding_has_none():
    torch.manual_seed(0)
    router = Router(SMALL)
    x = torch.randn(2, 5, 8) + router.weight[3].detach()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    routing = router(x)
    routing.scores.retain_grad()
    auxiliary_loss(routing, mask, 1.0, False).backward()
    grad = routing.scores.grad.view(2, 5, 6)
    busiest = load(routing.indices, 6, mask).argmax()
    assert (grad[mask][:, busiest] > 0).all() and (grad[~mask] == 0).all()
    assert router.weight.grad.abs().sum() > 0


def test_the_auxiliary_loss_refuses_a_mask_that_does_not_fit_or_holds_nothing():
    routing = drawn_routing()
    with pytest.raises(ValueError, match=r"\(4, 5\) for 24 tokens"):
        auxiliary_loss(routing, torch.ones(4, 5, dtype=torch.bool), 0.001)
    with pytest.raises(ValueError, match="holds no token"):
        auxiliary_loss(routing, torch.zeros(4, 6, dtype=torch.bool), 0.001)


# --- who serves whom -------------------------------------------------------------------------------------------------


def test_mutual_information_by_hand():
    assert mutual_information(torch.eye(4, dtype=torch.int64) * 7) == pytest.approx(2.0)
    assert mutual_information(torch.ones(5, 3, dtype=torch.int64)) == pytest.approx(0.0, abs=1e-12)
    assert mutual_information(torch.tensor([[4, 0], [2, 2], [0, 0]])) == pytest.approx(0.3112781, abs=1e-6)
    with pytest.raises(ValueError, match="without counts"):
        mutual_information(torch.zeros(2, 2))


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=2, max_size=8).filter(lambda t: sum(map(sum, t)) > 0)
)
def test_mutual_information_is_the_entropies_and_symmetric(table):
    table = torch.tensor(table)

    def entropy(p):
        p = p[p > 0].double() / p.sum()
        return -(p * p.log2()).sum().item()

    wanted = entropy(table.sum(0)) + entropy(table.sum(1)) - entropy(table.flatten())
    assert mutual_information(table) == pytest.approx(wanted, abs=1e-9)
    assert mutual_information(table.T) == pytest.approx(wanted, abs=1e-9)
