"""The algorithm against closed forms and brute force; every test names the bug that it guards against."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import LargestTensor, all_there, generator, random_rewards, scored_of
from torch import Tensor

import vpo
from vpo import Options, Scored

NOT_NORMALISED = ("dr_grpo", "maxrl")  # advantages that grow with the rewards


def advantages_of(method: str, scored: Scored | Tensor, **options) -> Tensor:
    """The method's advantages of what was scored, or of rewards (P, G, m, d)."""
    if isinstance(scored, Tensor):
        scored = scored_of(scored)
    return vpo.ADVANTAGES[method](scored, Options(**options))


# Preference weights.


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_weights_are_dirichlet(alpha, d):
    """Guards against NaN where gamma draws underflow, and a wrong map to the simplex."""
    n = 20_000
    weights = vpo.sample_weights(1, n, d, alpha=alpha, generator=generator())[0]
    assert weights.isfinite().all() and (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(n), atol=1e-5, rtol=0)
    variance = (d - 1) / d**2 / (d * alpha + 1)
    five_errors = 5 * math.sqrt(variance / n) + 1e-6  # a false alarm in a million
    assert weights.mean(0).tolist() == pytest.approx([1 / d] * d, abs=five_errors)
    assert weights.var(0).tolist() == pytest.approx([variance] * d, abs=1e-4, rel=0.08)


# Sets of rollouts.


def plain_subset_best(scores: Tensor, s: int) -> Tensor:
    """The definition: the best of every set of s rollouts, averaged over the sets with g. (G) -> (G)."""
    values = []
    for g in range(len(scores)):
        own = [S for S in itertools.combinations(range(len(scores)), s) if g in S]
        values.append(sum(scores[list(S)].max() for S in own) / len(own))
    return torch.stack(values)


def plain_subset_best_of_columns(scores: Tensor, s: int) -> Tensor:
    """(P, G, K) -> (P, G, K)."""
    expected = torch.zeros_like(scores)
    for p, j in itertools.product(range(scores.shape[0]), range(scores.shape[2])):
        expected[p, :, j] = plain_subset_best(scores[p, :, j], s)
    return expected


@pytest.mark.parametrize("G, s", [(2, 1), (3, 2), (6, 2), (6, 3), (6, 5), (8, 4)])
@pytest.mark.parametrize("levels", [3, 1000])
def test_subset_best_equals_brute_force(G, s, levels):
    """Ties (three levels), negative values, more dimensions; guards against counts off by one."""
    scores = (random_rewards(30 + G, 2, G, 3) * levels).floor() / levels - 0.4
    expected = plain_subset_best_of_columns(scores, s)
    torch.testing.assert_close(vpo.subset_best(scores, s), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("s", [2, 2048, 4095])
def test_subset_best_of_a_large_group(s):
    """Guards against binomial coefficients that no float holds. The scores are 0 to G - 1. The highest is the best of
    all its sets. The best of the others in the sets of the lowest is on average (s - 1) G / s. The mean over the group
    is the expected best of s rollouts, s (G + 1) / (s + 1) - 1."""
    G = 4096
    scores = torch.randperm(G, generator=generator()).float()[None]
    B = vpo.subset_best(scores, s)[0]
    assert B[scores[0].argmax()].item() == pytest.approx(G - 1)
    assert B[scores[0].argmin()].item() == pytest.approx((s - 1) * G / s, rel=1e-4)
    assert B.double().mean().item() == pytest.approx(s * (G + 1) / (s + 1) - 1, rel=1e-4)


def test_a_very_low_score_leaves_no_rounding():
    """Every set of four holds one of the best: guards against advantages of 2 where a penalty is -1000."""
    scores = torch.ones(1, 8)
    scores[0, 3] = -1000.0
    assert (vpo.group_normalize(vpo.subset_best(scores, 4)) == 0).all()


# Normalisation.


@pytest.mark.parametrize("value", [0.0, 0.1, 50.3, 1234567.1, -3.3])
@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_equal_rewards_have_no_advantage(method, value):
    """Guards against 0 / 0, rounding that a bare standard deviation would blow up to +-1, and a batch's mean."""
    for seed in range(10):
        rewards = random_rewards(seed, 3, 7, 1, 4)
        rewards[1:] = value * torch.tensor([1.0, 0.7, 0.3, 0.2])
        A = advantages_of(method, rewards, generator=generator())
        assert (A[0] != 0).any() and (A[1:] == 0).all()


@pytest.mark.parametrize("minimum", [0.0, -1000.0])
@pytest.mark.parametrize(
    "method, m", [("grpo", 1), ("max_at_k", 1), ("multi_rlvr", 3), ("dr_grpo", 1), ("maxrl", 1)]
)
def test_rounding_is_no_signal(method, m, minimum):
    """The sum of four percents depends on their order in the last digit: guards against advantages of +-1."""
    missing = torch.full((1, 1), minimum)
    one_pair = torch.tensor([[9.4, 2.8, 83.6, 43.3], [9.4, 2.8, 43.3, 83.6]])
    assert len(one_pair.mean(-1).unique()) == 2, "the test wants sums that differ"
    groups = [one_pair[[0, 0, 1, 0]].view(1, 4, 1, 4).expand(-1, -1, m, -1)]
    for seed in range(200):
        percents = (random_rewards(seed, 4) * 1000).round() / 10
        order = random_rewards(seed, 1, 8, m, 4).argsort(-1)
        groups.append(percents[order])  # in which every answer is a permutation of one vector
    for rewards in groups:
        scored = scored_of(rewards, missing_scalar=missing, minimum=minimum)
        assert (advantages_of(method, scored) == 0).all()


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_rewards_may_be_numbers_of_any_kind(method, kind):
    """Guards against a mean in bfloat16, whose rounding is a signal, and integers, which have none."""
    rewards = (random_rewards(1, 3, 8, 1, 2) > 0.9).to(kind)
    scalars = rewards.amax(-1)
    if kind.is_floating_point:
        scalars = torch.where(scalars > 0, 1.0078125, 1.0).to(kind)  # exact in bfloat16

    def advantages(rewards: Tensor, scalars: Tensor) -> Tensor:
        return advantages_of(method, scored_of(rewards, scalars=scalars), generator=generator())

    expected = advantages(rewards.float(), scalars.float())
    assert expected.abs().max() > 0
    torch.testing.assert_close(advantages(rewards, scalars), expected)


@pytest.mark.parametrize("size, gap", [(1.0, 1e-3), (100.0, 0.01)])
@pytest.mark.parametrize("d", [1, 4])
@pytest.mark.parametrize("method", ["grpo", "max_at_k", "vpo", "group_vpo", "multi_rlvr"])
def test_small_differences_are_a_signal(method, size, gap, d):
    """One of 8 rollouts is a little better in one of d objectives: guards against a threshold that eats it."""
    rewards = torch.full((1, 8, 1, d), 0.9 * size)
    rewards[0, 3, 0, 0] += gap
    A = advantages_of(method, rewards, generator=generator())[0]
    assert A.argmax() == 3 and A[3] > 1
    assert (A[[0, 1, 2, 4, 5, 6, 7]] < 0).all()


@pytest.mark.parametrize("method", ["vpo", "group_vpo"])
def test_small_differences_of_large_rewards_count(method):
    """Guards against w . r in float32, which changed the direction of the advantages by 2%."""
    rewards = 10 + 0.001 * random_rewards(3, 16, 8, 1, 4)
    A = advantages_of(method, rewards, generator=generator())
    exact = advantages_of(method, rewards.double(), generator=generator())
    torch.testing.assert_close(A, exact.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_a_shift_and_a_scale_change_nothing(method):
    """The invariances of group normalisation; rollouts that change places take their advantages along."""
    rewards = random_rewards(21, 3, 6, 1, 4)
    A = advantages_of(method, rewards, generator=generator())
    order = [3, 0, 5, 1, 2, 4]
    turned = advantages_of(method, rewards[:, order], generator=generator())
    torch.testing.assert_close(turned, A[:, order], atol=1e-4, rtol=1e-4)
    if method not in NOT_NORMALISED:
        message = "the advantages change with the scale of the rewards: see NOT_NORMALISED"
        for other in (3 * rewards + 2, rewards * 2.0**90):  # whose square overflows
            moved = advantages_of(method, other, generator=generator())
            torch.testing.assert_close(moved, A, atol=1e-3, rtol=0, msg=message)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_rewards_that_are_no_numbers_show(method, value):
    """In all advantages of their group, hence in the loss, which stops the run; guards against a silent zero."""
    rewards = random_rewards(19, 2, 4, 1, 3)
    rewards[0, 1, 0, 2] = value
    A = advantages_of(method, rewards)
    assert not A[0].isfinite().any()
    if method != "gdpo":  # it normalises over the whole batch
        assert A[1].isfinite().all() and (A[1] != 0).any()


# The options and the methods.


def plain_advantage(rewards: Tensor, weights: Tensor, mask: Tensor, s: int, floor: float) -> Tensor:
    """The definition as loops, in float64: rewards (P, G, m, d), weights (P, K, d) -> (P, G)."""
    P, G, m, _ = rewards.shape
    utilities = torch.full((P, G, weights.shape[1]), floor, dtype=torch.float64)
    for p, g, j in itertools.product(range(P), range(G), range(weights.shape[1])):
        answers = [rewards[p, g, i].double() for i in range(m) if mask[p, g, i]]
        if answers:
            utilities[p, g, j] = max(float(weights[p, j].double() @ r) for r in answers)
    R = plain_subset_best_of_columns(utilities, s).mean(-1)
    return (R - R.mean(1, keepdim=True)) / (R.std(1, correction=0, keepdim=True) + 1e-6)


@pytest.mark.parametrize("floor", [0.0, -1.0])
@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("method", ["vpo", "group_vpo"])
def test_the_estimator_equals_plain_loops(method, s, floor):
    """VPO and Group VPO with several answers, masks and negative rewards, on the very same draws.
    Guards against one draw per rollout, whose noise does not cancel, silence that beats an answer, and a
    missing answer whose zero beats a negative reward, or whose NaN spreads."""
    rewards = random_rewards(7, 3, 5, 3, 4) * 2 - 1
    mask = random_rewards(8, 3, 5, 3) > 0.3
    mask[0, 0] = False  # a rollout without answers stays in the group
    rewards[~mask] = math.nan
    weights = vpo.sample_weights(3, 32, 4, generator=generator(9))
    expected = plain_advantage(rewards, weights, mask, s, floor)
    options = {"n_weights": 32, "subset": s, "generator": generator(9)}
    A = advantages_of(method, scored_of(rewards, mask, minimum=floor), **options)
    torch.testing.assert_close(A.double(), expected, atol=1e-4, rtol=1e-4)


def test_corners_of_the_family():
    """One objective and one answer make Group VPO Max@K, whatever the weights; s = 1 makes Max@K GRPO; one answer makes
    VPO GRPO on the mean, up to an error of about 0.005 of 200,000 draws."""
    rewards = random_rewards(42, 3, 6, 1, 1)
    best_of_sets = advantages_of("max_at_k", rewards)
    torch.testing.assert_close(advantages_of("group_vpo", rewards), best_of_sets, atol=1e-4, rtol=0)
    alone = advantages_of("max_at_k", rewards, subset=1)
    torch.testing.assert_close(alone, advantages_of("grpo", rewards))
    rewards = random_rewards(10, 6, 8, 1, 4)
    A = advantages_of("vpo", rewards, n_weights=200_000, generator=generator())
    torch.testing.assert_close(A, advantages_of("grpo", rewards), atol=0.03, rtol=0)
    assert [vpo.default_subset(G) for G in (2, 3, 8)] == [2, 2, 4]


def test_random_weighting_is_grpo_under_one_weight():
    """Guards against --n-weights and --subset that make it another method."""
    rewards = random_rewards(50, 3, 6, 1, 4)
    w = vpo.sample_weights(3, 1, 4, generator=generator(6))  # (P, 1, d)
    options = {"n_weights": 100, "subset": 4}
    A = advantages_of("random_weighting", rewards, generator=generator(6), **options)
    expected = vpo.group_normalize((rewards[:, :, 0] * w).sum(-1))
    torch.testing.assert_close(A, expected, atol=1e-4, rtol=0)


def test_dr_grpo_and_maxrl_by_hand():
    rewards = torch.tensor([[0.0, 1, 0, 1], [0] * 4, [1] * 4])[..., None, None]  # (3, 4, 1, 1)
    assert advantages_of("dr_grpo", rewards)[0].tolist() == [-0.5, 0.5, -0.5, 0.5]
    expected = torch.tensor([[-1.0, 1, -1, 1], [0] * 4, [0] * 4])
    A = advantages_of("maxrl", rewards)
    torch.testing.assert_close(A, expected, atol=1e-4, rtol=0)
    lower = advantages_of("maxrl", scored_of(rewards - 2, missing_scalar=torch.full((3, 1), -2.0)))
    torch.testing.assert_close(lower, expected, atol=1e-4, rtol=0)


def test_gdpo_normalises_every_objective_then_the_batch():
    """The paper's example: rewards (0, 1) and (0, 2) are alike to GRPO on their sum, not to GDPO."""
    rewards = torch.tensor([[[[0.0, 1.0]], [[0.0, 0.0]]], [[[1.0, 1.0]], [[0.0, 0.0]]]])
    A = advantages_of("gdpo", rewards)
    assert A[1, 0].item() == pytest.approx(2 * A[0, 0].item(), rel=1e-4)
    assert A.square().mean().item() == pytest.approx(1, rel=1e-4)


def test_multi_rlvr_pays_distinct_answers():
    """As in the official code: a repeated answer earns what a missing one does, each by its own mask."""
    rewards = random_rewards(11, 3, 4, 3, 2)
    mask = all_there(rewards)
    mask[0, 0, 1] = False
    repeats = ~all_there(rewards)
    repeats[0, 1, 2] = True
    paid = rewards.mean(-1)
    paid[0, 0, 1] = paid[0, 1, 2] = -0.5
    options = {"missing_scalar": torch.full((3, 1), -0.5), "repeat_mask": repeats}
    A = advantages_of("multi_rlvr", scored_of(rewards, mask, **options))
    torch.testing.assert_close(A, vpo.group_normalize(paid.sum(-1)))


def test_a_repeated_answer_is_not_missing():
    """Guards against VPO that takes one mask for the other. A rollout that gives one bad answer twice is worth that
    answer, and not the reward of silence, even where its first mention cannot be read."""
    rewards = random_rewards(22, 2, 4, 2, 3)
    rewards[:, :, 1] = rewards[:, :, 0]
    mask = all_there(rewards)
    repeats = torch.tensor([False, True]).expand(2, 4, 2)
    A = advantages_of("vpo", scored_of(rewards, mask, repeat_mask=repeats), generator=generator())
    torch.testing.assert_close(A, vpo.vpo_advantage(rewards[:, :, :1], generator=generator()))
    mask = mask & torch.tensor([False, True])
    again = scored_of(rewards, mask, repeat_mask=repeats)
    torch.testing.assert_close(advantages_of("vpo", again, generator=generator()), A)


@pytest.mark.parametrize("method", ["vpo", "group_vpo", "gdpo"])
def test_absent_objectives_count_for_nothing(method):
    """A prompt with 2 of 4 objectives equals one that has these alone; guards against what stands in the others."""
    rewards = random_rewards(12, 2, 6, 1, 4)
    objectives = torch.tensor([[True, True, False, False]]).expand(2, 4)
    if method != "gdpo":
        rewards[..., 2:] = math.nan
    options = {"n_weights": 50_000, "generator": generator()}
    masked = advantages_of(method, scored_of(rewards, objective_mask=objectives), **options)
    alone = advantages_of(method, rewards[..., :2], **options)
    torch.testing.assert_close(masked, alone, atol=0.03, rtol=0)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert (advantages_of(method, scored_of(rewards, objective_mask=nothing)) == 0).all()


@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_autocast_and_rounded_matrix_products_change_nothing(method):
    """Guards against utilities in bfloat16 or TF32, where an answer of 0.501 ties with one of 0.5."""
    rewards = 0.5 + 0.01 * random_rewards(23, 64, 8, 1, 16)
    outside = advantages_of(method, rewards, generator=generator())
    torch.set_float32_matmul_precision("high")  # TF32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = advantages_of(method, rewards, generator=generator())
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_types_follow_the_arguments_not_the_default(method, alpha, default):
    """Guards against weights in bfloat16, whose sum is not 1, and against a product of two types."""
    for kind in (torch.float32, torch.float64):
        torch.set_default_dtype(torch.float32)
        rewards = random_rewards(26, 3, 8, 1, 2).to(kind)
        scored = scored_of(rewards, scalars=rewards.mean(-1))
        usual = advantages_of(method, scored, alpha=alpha, generator=generator())
        torch.set_default_dtype(default)
        A = advantages_of(method, scored, alpha=alpha, generator=generator())
        assert A.dtype == kind
        assert torch.equal(A, usual)


@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_shapes_are_known_without_numbers(method):
    """Tensors on the meta device have none; trainers plan memory with them."""
    scored = scored_of(random_rewards(27, 3, 8, 1, 2))
    tensors = {name: x.to("meta") for name, x in vars(scored).items() if isinstance(x, Tensor)}
    A = advantages_of(method, replace(scored, **tensors))
    assert A.is_meta and A.shape == (3, 8)


@pytest.mark.parametrize("subset", [1, 4])
def test_the_estimator_is_fused(subset):
    """Guards against products (P, G, m, K, d) in memory, two gigabytes for a large batch."""
    rewards = random_rewards(24, 3, 8, 5, 16)
    mask = random_rewards(25, 3, 8, 5) > 0.2
    objectives = torch.ones(3, 16, dtype=torch.bool)
    with LargestTensor() as largest:
        vpo.vpo_advantage(rewards, mask, objective_mask=objectives, subset=subset)
    assert largest.n == 3 * 8 * 5 * 100


ZEROS = torch.zeros(2, 4, 1, 3)  # (P, G, m, d)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: vpo.sample_weights(2, 5, 3, alpha=0.04), "alpha = 0.04: must be 0.05 to 100"),
        (lambda: vpo.vpo_advantage(ZEROS, subset=4), "a set of s = 4 rollouts"),
        (lambda: vpo.vpo_advantage(ZEROS, torch.ones(2, 3)), "answer_mask"),
        (lambda: vpo.vpo_advantage(ZEROS.numpy()), r"a tensor \(P, G, m, d\), not ndarray"),
        (lambda: advantages_of("grpo", torch.zeros(2, 4, 2, 3)), "takes one answer per rollout"),
    ],
)
def test_what_cannot_be_computed_is_refused(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_golden_values():
    """Every method's advantages for fixed inputs, for ports to other trainers: see docs/own.md."""
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    for name, case in golden["cases"].items():
        if "seed" in case and not torch.backends.mkl.is_available():
            continue  # its draws are those of the builds for x86
        stored = golden["inputs"][case["inputs"]]
        inputs = {key: torch.tensor(value) for key, value in stored.items()}
        rewards, mask = inputs.pop("rewards"), inputs.pop("answer_mask")
        if "weights" in case:
            R = vpo.set_reward(rewards, torch.tensor(case["weights"]), mask, **case["options"])
            A = vpo.group_normalize(R)
        else:
            own = generator(case["seed"]) if "seed" in case else None
            scored = scored_of(rewards, mask, **inputs)
            A = advantages_of(case["method"], scored, generator=own, **case["options"])
        expected = torch.tensor(case["advantages"])
        torch.testing.assert_close(A, expected, atol=case["tolerance"], rtol=0, msg=name)
    methods = {case["method"] for case in golden["cases"].values()}
    assert methods >= {"grpo", "max_at_k", "multi_rlvr", "vpo", "group_vpo"}


# The loss.


def loss_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs and old_logprobs (B, T), advantages (B), token_mask (B, T)."""
    old = -random_rewards(15, 4, 6) * 3
    new = (old + 0.8 * (random_rewards(16, 4, 6) - 0.5)).requires_grad_()
    return new, old, torch.tensor([1.0, -1.0, 2.0, -0.5]), random_rewards(17, 4, 6) > 0.3


def test_on_policy_gradient_is_reinforce():
    """At ratio 1 nothing is clipped: a sampled token's gradient is -A / n_tokens, any other's 0.
    Guards against a denominator per micro-batch: n_tokens is that of the whole batch."""
    _, old, A, mask = loss_inputs()
    new = old.clone().requires_grad_()
    loss, metrics = vpo.policy_loss(new, old, A, mask, 50)
    loss.backward()
    torch.testing.assert_close(new.grad, -A[:, None] * mask / 50)
    assert metrics["clip_fraction"] == 0


def test_clipping_token_by_token():
    """Ratio 1.5 at A > 0 and 0.5 at A < 0 are clipped, 4 at A < 0 stops at the dual clip 3. The
    tokens of a rollout have different ratios: guards against one ratio for all of them."""
    log_ratio = torch.tensor([[1.5, 0.9], [0.5, 4.0], [1.5, 1.0]]).log().requires_grad_()
    A = torch.tensor([1.0, -1.0, -1.0])
    mask = torch.ones(3, 2, dtype=torch.bool)
    loss, metrics = vpo.policy_loss(log_ratio, torch.zeros(3, 2), A, mask, 6)
    loss.backward()
    assert loss.item() == pytest.approx((-1.2 - 0.9 + 0.8 + 3.0 + 1.5 + 1.0) / 6)
    has_gradient = torch.tensor([[False, True], [False, False], [True, True]])
    assert torch.equal(log_ratio.grad != 0, has_gradient)
    assert metrics["clip_fraction"].item() == pytest.approx(0.5)


def kl_of(log_x: Tensor) -> Tensor:
    """The KL term alone of tokens (T) whose reference is more likely by log_x nats."""
    old = torch.zeros(1, len(log_x))
    mask = torch.ones(1, len(log_x), dtype=torch.bool)
    reference = torch.full((1, len(log_x)), -1.0)
    logprobs = reference - log_x[None]
    options = {"ref_logprobs": reference, "kl_coef": 0.5}
    loss, metrics = vpo.policy_loss(logprobs, old, torch.zeros(1), mask, 1, **options)
    assert metrics["kl"].item() == pytest.approx(2 * loss.item(), rel=1e-5)
    return 2 * loss


@pytest.mark.parametrize("log_x", [-30.0, -2.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 9.9])
def test_kl_is_k3(log_x):
    """x - log x - 1 with x = reference / policy; guards against k1, a flipped sign, and a slope that is rounded."""
    expected = math.exp(log_x) - log_x - 1
    log_ratio = torch.tensor([log_x], requires_grad=True)
    kl = kl_of(log_ratio)
    kl.backward()
    assert kl.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert log_ratio.grad.item() == pytest.approx(math.expm1(log_x), rel=1e-3)


def test_kl_stays_finite_where_the_policy_has_lost_a_token():
    """The policy gives a token -101 nats, the reference -1: guards against exp(100), which ends a
    run. Beyond 10 nats the term goes on as a straight line, without a jump in value or slope."""
    log_x = torch.tensor([100.0], requires_grad=True)
    kl = kl_of(log_x)
    kl.backward()
    slope = math.exp(10) - 1
    assert kl.item() == pytest.approx(slope * 90 + math.exp(10) - 11, rel=1e-5)
    assert log_x.grad.item() == pytest.approx(slope, rel=1e-5)
    below, above = (kl_of(torch.tensor([x])).item() for x in (9.999, 10.001))
    assert (above - below) / 0.002 == pytest.approx(slope, rel=1e-2)


def test_nothing_times_infinity_is_nothing():
    """A rollout without advantage whose tokens become certain, a token that the reference excludes where the KL term has
    no weight, and a batch without tokens end no run."""
    certain = torch.zeros(1, 2, requires_grad=True)
    everything = torch.ones(1, 2, dtype=torch.bool)
    old = torch.full((1, 2), -200.0)  # the ratio overflows
    loss, _ = vpo.policy_loss(certain, old, torch.zeros(1), everything, 2)
    loss.backward()
    assert loss.item() == 0 and not certain.grad.any()
    new, old, A, mask = loss_inputs()
    expected, _ = vpo.policy_loss(new, old, A, mask, mask.sum())
    excluded = torch.full_like(old, -math.inf)
    loss, _ = vpo.policy_loss(new, old, A, mask, mask.sum(), ref_logprobs=excluded, kl_coef=0.0)
    torch.testing.assert_close(loss, expected)
    for n_tokens in (0, torch.tensor(0)):
        loss, metrics = vpo.policy_loss(new, old, A, torch.zeros_like(mask), n_tokens)
        assert loss.item() == 0 and metrics["clip_fraction"].item() == 0


def test_padding_cannot_poison_the_loss():
    """Whatever stands at masked positions, infinity and NaN too, leaves loss and gradient unchanged."""
    new, old, A, mask = loss_inputs()
    options = {"ref_logprobs": old, "kl_coef": 0.1, "entropy": old.square(), "entropy_coef": 0.1}
    clean, _ = vpo.policy_loss(new, old, A, mask, mask.sum(), **options)
    options["ref_logprobs"] = old.masked_fill(~mask, math.inf)
    options["entropy"] = old.square().masked_fill(~mask, math.nan)
    poisoned = old.masked_fill(~mask, math.nan)
    dirty, _ = vpo.policy_loss(new, poisoned, A, mask, mask.sum(), **options)
    torch.testing.assert_close(dirty, clean)
    (expected,) = torch.autograd.grad(clean, new)
    (gradient,) = torch.autograd.grad(dirty, new)
    torch.testing.assert_close(gradient, expected)
