"""The checkers of notebook 02 accept right answers, and name what is wrong with answers that only look right."""

import pytest
import torch

from moe_lib import MoEConfig, Router
from moe_lib.checks.gate import BLAME, _cases, _gate, _router, check_groups, check_route, check_scores

# --- the scores ------------------------------------------------------------------------------------------------------------


def right_scores(x, weight):
    return torch.sigmoid(x.float() @ weight.float().T)


def in_place(x, weight):
    return right_scores(x.mul_(2), weight)


@pytest.mark.parametrize(
    "answer", [right_scores, lambda x, w: torch.einsum("th,eh->te", x.float(), w.float()).neg().exp().add(1).reciprocal()]
)
def test_right_scores_pass(answer):
    verdict = check_scores(answer)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda x, w: (x @ w.T).float().sigmoid(), "computed in bfloat16"),
        (lambda x, w: (x @ w.T).sigmoid(), "computed in bfloat16"),
        (lambda x, w: right_scores(x, w).to(x.dtype), "rounded to bfloat16"),
        (lambda x, w: (x.float() @ w.float().T).softmax(-1), "softmax shares"),
        (lambda x, w: (x.float() @ w.float().T).softmax(0), "over the tokens"),
        (lambda x, w: x.float() @ w.float().T, "sigmoid is missing"),
        (lambda x, w: right_scores(x, w).T, "shape [64, 24]; yours has [24, 64]"),
        (lambda x, w: right_scores(x, w).double(), "should be float32"),
        (lambda x, w: torch.sigmoid(2 * x.float() @ w.float().T), "its logit is"),
        (lambda x, w: right_scores(x, w).tolist(), "returned a list"),
        (in_place, "changed in place"),
    ],
)
def test_wrong_scores_are_named(answer, word):
    verdict = check_scores(answer)
    assert verdict.passed is False
    assert word in verdict.message


# --- the groups ------------------------------------------------------------------------------------------------------------


def kept(value, topk_group, size):
    best = value.topk(topk_group, dim=-1).indices
    return torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True).repeat_interleave(size, dim=1)


def pairs(choice, n_group):
    grouped = choice.reshape(len(choice), n_group, -1)
    return grouped.sort(-1, descending=True).values[..., :2].sum(-1)


def right_groups(choice, n_group, topk_group):
    return kept(pairs(choice, n_group), topk_group, choice.shape[1] // n_group)


def dealt(choice, n_group, topk_group):
    turned = choice.reshape(len(choice), -1, n_group).transpose(1, 2).reshape(len(choice), -1)
    return right_groups(turned, n_group, topk_group)[:, :: choice.shape[1] // n_group].repeat(1, choice.shape[1] // n_group)


def by(value):
    def answer(choice, n_group, topk_group):
        return kept(value(choice.reshape(len(choice), n_group, -1)), topk_group, choice.shape[1] // n_group)

    return answer


def test_right_groups_pass():
    verdict = check_groups(right_groups)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (by(lambda g: g.amax(-1)), "best TWO"),
        (by(lambda g: g.sum(-1)), "summed (or averaged) all"),
        (by(lambda g: g.mean(-1)), "summed (or averaged) all"),
        (dealt, "neighbouring experts"),
        (lambda c, n, k: ~right_groups(c, n, k), "upside down"),
        (lambda c, n, k: kept(-pairs(c, n), k, c.shape[1] // n), "LOWEST"),
        (lambda c, n, k: kept(pairs(c, n), k, 1), "should have shape"),
        (lambda c, n, k: right_groups(c, n, k).float(), "torch.bool"),
        (lambda c, n, k: right_groups(c, n, max(k - 1, 1)), "for token 0 you keep 12 experts; 3 groups of 6 are 18"),
        (by(lambda g: g.amin(-1)), "highest sums of their two best"),
        (by(lambda g: g.topk(2, -1).values.sum(-1)), "raised RuntimeError"),
    ],
)
def test_wrong_groups_are_named(answer, word):
    verdict = check_groups(answer)
    assert verdict.passed is False
    assert word in verdict.message


# --- the whole gate --------------------------------------------------------------------------------------------------------


def build(
    choose=lambda scores, bias: scores + bias,
    mask=float("-inf"),
    groups=right_groups,
    take=lambda choice, k: choice.sort(dim=-1, descending=True, stable=True).indices[:, :k],
    weigh=lambda chosen, scores: chosen / chosen.sum(-1, keepdim=True),
    source=lambda scores, bias: scores,
    scaled=lambda weights, scale: weights * scale,
):
    """The gate written once more, with a place for every fault."""

    def answer(scores, bias, k, n_group, topk_group, scale):
        choice = choose(scores, bias)
        choice = choice.masked_fill(~groups(choice, n_group, topk_group), mask)
        indices = take(choice, k)
        return indices, scaled(weigh(source(scores, bias).gather(1, indices), scores), scale)

    return answer


WRONG = [
    ({"source": lambda scores, bias: scores + bias}, "come from the biased scores"),
    ({"mask": 0.0}, "masked with 0.0"),
    ({"scaled": lambda weights, scale: weights}, "multiplication by scale is missing"),
    ({"scaled": lambda weights, scale: weights * scale * scale}, "applied twice"),
    ({"weigh": lambda chosen, scores: chosen}, "not normalised"),
    ({"weigh": lambda chosen, scores: chosen / scores.sum(-1, keepdim=True)}, "over all experts, before the choice"),
    ({"weigh": lambda chosen, scores: chosen.softmax(-1)}, "softmax of the chosen"),
    ({"choose": lambda scores, bias: scores.softmax(-1) + bias}, "went through a softmax"),
    ({"choose": lambda scores, bias: scores}, "bias has no part"),
    ({"groups": by(lambda g: g.amax(-1))}, "scored by its best expert"),
    ({"groups": by(lambda g: g.sum(-1))}, "sum of all its experts"),
    ({"groups": lambda choice, n, k: torch.ones_like(choice, dtype=torch.bool)}, "groups are ignored"),
    ({"take": lambda choice, k: choice.shape[1] - 1 - choice.flip(1).sort(dim=-1, descending=True, stable=True).indices[:, :k]},
     "the higher expert number"),
    ({"take": lambda choice, k: (-choice).sort(dim=-1, stable=True, descending=True).indices[:, :k]}, "LOWEST"),
    ({"take": lambda choice, k: choice.sort(dim=-1, descending=True, stable=True).indices[:, 1 : k + 1]}, "highest biased scores"),
    ({"take": lambda choice, k: choice.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values}, "another order"),
    ({"take": lambda choice, k: choice.argmax(-1, keepdim=True).repeat(1, k)}, "chosen twice"),
    ({"take": lambda choice, k: choice.sort(dim=-1, descending=True, stable=True).indices[:, :k].int()}, "int64"),
    ({"weigh": lambda chosen, scores: chosen / chosen.amax(-1, keepdim=True)}, "its score over the sum of the chosen"),
]  # fmt: skip


def test_the_right_gate_passes():
    verdict = check_route(build())
    assert verdict.passed, verdict


def test_routing_of_the_library_passes():
    def answer(scores, bias, k, n_group, topk_group, scale):
        router = Router(MoEConfig(1, 1, len(bias), k, n_group=n_group, topk_group=topk_group, routed_scaling_factor=scale))
        router.e_score_correction_bias = bias
        return router.route(scores)

    verdict = check_route(answer)
    assert verdict.passed, verdict


@pytest.mark.parametrize(("fault", "word"), WRONG, ids=[word for _, word in WRONG])
def test_wrong_gates_are_named(fault, word):
    for _ in range(3):  # each check draws new numbers
        verdict = check_route(build(**fault))
        assert verdict.passed is False
        assert word in verdict.message


def test_torch_topk_is_refused_for_its_ties():
    verdict = check_route(build(take=lambda choice, k: choice.topk(k, -1).indices))
    assert verdict.passed is False
    assert "equal scores" in verdict.message or "ties by number" in verdict.message


def test_a_bias_changed_in_place_is_seen():
    def answer(scores, bias, *rest):
        bias += 1
        return build()(scores, bias, *rest)

    assert "bias was changed in place" in check_route(answer).message


def test_a_single_tensor_is_refused():
    assert "return two tensors" in check_route(lambda scores, *rest: scores[:, :6]).message


@pytest.mark.parametrize("check", [check_scores, check_groups, check_route])
def test_stubs_are_not_attempted(check):
    def stub(*arguments):
        raise NotImplementedError

    assert check(stub).passed is None
    assert check(lambda *arguments: None).passed is None


def test_the_checkers_leave_the_notebooks_random_numbers_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    check_scores(right_scores), check_groups(right_groups), check_route(build())
    assert torch.equal(torch.rand(4), wanted)


def test_the_faults_start_from_the_right_gate():
    for _, scores, bias, config in _cases():
        indices, weights = _gate(scores, bias, config)
        right = _router(bias, config).route(scores)
        assert torch.equal(indices, right.indices)
        torch.testing.assert_close(weights, right.weights)


@pytest.mark.parametrize("fault", BLAME.values(), ids=str)
def test_every_fault_shows_in_some_case(fault):
    results = [(_gate(s, b, c, **fault), _gate(s, b, c)) for _, s, b, c in _cases()]
    assert any(not torch.equal(w[0], r[0]) or not torch.allclose(w[1], r[1]) for w, r in results)
