"""The algorithm against closed forms and brute force; every test names the bug that it guards against."""

import inspect
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import vpo
from examples import advantages


def random_rewards(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain_advantage(
    rewards: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The definition as loops, in float64: rewards (P, G, m, k), weights (P, K, k)."""
    P, G, m, _ = rewards.shape
    R = torch.zeros(P, G, dtype=torch.float64)
    for p, g in itertools.product(range(P), range(G)):
        answers = [rewards[p, g, j].double() for j in range(m) if mask[p, g, j]]
        if answers:
            R[p, g] = sum(max(float(w.double() @ r) for r in answers) for w in weights[p]) / len(
                weights[p]
            )
    return (R - R.mean(1, keepdim=True)) / (R.std(1, correction=0, keepdim=True) + 1e-6)


# ---------------------------------------------------------------------------------------------------- weightings


@pytest.mark.parametrize(
    "sampler, alpha", [("sobol", 1.0), *(("iid", alpha) for alpha in (0.01, 0.3, 1.0, 5.0, 1000.0))]
)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_weights_are_dirichlet(sampler, alpha, k):
    """Guards against underflow at small alpha, a wrong simplex map, and Sobol with another distribution than iid."""
    n = 20000
    w = vpo.sample_weights(n, k, alpha=alpha, sampler=sampler, generator=generator())
    assert w.shape == (n, k) and torch.isfinite(w).all() and (w >= 0).all()
    torch.testing.assert_close(w.sum(-1), torch.ones(n), atol=1e-5, rtol=0)
    variance = (k - 1) / k**2 / (k * alpha + 1)
    # five standard errors of a mean of n: a false alarm in a million; Sobol is far inside
    torch.testing.assert_close(
        w.mean(0), torch.full((k,), 1 / k), atol=5 * math.sqrt(variance / n) + 1e-6, rtol=0
    )
    torch.testing.assert_close(w.var(0), torch.full((k,), variance), atol=1e-4, rtol=0.08)


@pytest.mark.parametrize("alpha", vpo.ALPHAS)
def test_extreme_alphas_give_corners_and_the_centre(alpha):
    """Guards against NaN weights where a gamma draw underflows."""
    w = vpo.sample_weights(500, 4, alpha=alpha, generator=generator())
    assert torch.isfinite(w).all() and torch.allclose(w.sum(-1), torch.ones(500), atol=1e-5)
    assert (
        (w.amax(-1) > 0.999).all()
        if alpha < 1
        else torch.allclose(w, torch.full_like(w, 0.25), atol=0.01)
    )


@pytest.mark.parametrize("sampler", vpo.SAMPLERS)
def test_weights_follow_their_seed(sampler):
    """Guards against draws from a global or fixed generator."""
    draw = [
        vpo.sample_weights(50, 4, sampler=sampler, generator=generator(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])


def test_sobol_is_less_noisy_than_iid():
    """Guards against a net that scrambling destroyed. Measured ratio 0.35; 0.6 leaves no room for a false alarm."""
    rewards = random_rewards(0, 8, 8, 3, 4)
    truth = vpo.vpo_advantage(rewards, n_weights=100_000, generator=generator())
    error = {
        sampler: sum(
            (
                vpo.vpo_advantage(
                    rewards, n_weights=100, sampler=sampler, generator=generator(seed)
                )
                - truth
            )
            .abs()
            .mean()
            for seed in range(20)
        )
        for sampler in vpo.SAMPLERS
    }
    assert error["sobol"] < 0.6 * error["iid"]


def test_sharing_weights_within_a_group_cancels_noise():
    """Guards against one draw per rollout, a bug that a published re-implementation had: its advantages are noisier.

    Objectives of unequal difficulty, as in every real task: which of them a draw favours moves all rollouts alike.
    Measured ratio 0.2 (0.94 for rewards without any structure).
    """
    rewards = 0.3 * random_rewards(1, 8, 8, 3, 4) + torch.tensor([0.7, 0.3, 0.1, 0.0])
    truth = vpo.vpo_advantage(rewards, n_weights=100_000, generator=generator())
    shared = independent = 0.0
    for seed in range(20):
        shared += (vpo.vpo_advantage(rewards, generator=generator(seed)) - truth).abs().mean()
        weights = vpo.sample_weights(64 * 100, 4, generator=generator(seed)).view(64, 100, 4)
        R = vpo.set_reward(rewards.view(64, 1, 3, 4), weights).view(
            8, 8
        )  # each rollout its own draws
        independent += (vpo.group_normalize(R) - truth).abs().mean()
    assert shared < 0.5 * independent


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"n": 0, "k": 3}, "n_weights = 0"),
        ({"n": 5, "k": 0}, "k = 0"),
        ({"n": 5, "k": 3, "alpha": 0.0}, "alpha = 0"),
        ({"n": 5, "k": 3, "alpha": math.nan}, "alpha = nan"),
        ({"n": 5, "k": 3, "alpha": 1e-40}, "alpha = 1e-40"),
        ({"n": 5, "k": 3, "alpha": 1e31}, "alpha = 1e"),
        ({"n": 5, "k": 3, "alpha": 0.5, "sampler": "sobol"}, "needs alpha = 1"),
        ({"n": 5, "k": 3, "sampler": "halton"}, "halton"),
    ],
)
def test_bad_weightings_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        vpo.sample_weights(**arguments)


# ---------------------------------------------------------------------------------------------------- the set reward


def test_set_reward_matches_the_closed_form():
    """k = 2: the Monte-Carlo estimate against the area under the upper envelope; 200,000 draws, error about 0.001."""
    rewards = random_rewards(2, 6, 4, 5, 2) * 2 - 0.7  # negative rewards too
    weights = vpo.sample_weights(200_000, 2, generator=generator()).expand(6, -1, -1)
    torch.testing.assert_close(
        vpo.set_reward(rewards, weights),
        vpo.set_reward_exact(rewards),
        atol=5e-3,
        rtol=0,
    )


def test_closed_form_by_hand():
    """Lines u and 1 - u: E max = 3/4. One line: its mean. Equal lines divide by zero inside and must not show."""
    assert vpo.set_reward_exact(torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])).item() == pytest.approx(
        0.75
    )
    assert vpo.set_reward_exact(torch.tensor([[[[1.0, 0.2]]]])).item() == pytest.approx(0.6)
    assert vpo.set_reward_exact(torch.full((1, 1, 4, 2), 0.3)).item() == pytest.approx(0.3)
    with pytest.raises(ValueError, match="k = 2"):
        vpo.set_reward_exact(torch.zeros(1, 1, 2, 3))


def test_max_is_inside_the_mean():
    """Guards against max over answers of the mean (scalar RL), and mean over answers: both give 1/2 here, not 3/4."""
    rewards = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    weights = vpo.sample_weights(100_000, 2, generator=generator())[None]
    assert vpo.set_reward(rewards, weights).item() == pytest.approx(0.75, abs=0.005)


def test_sets():
    """Duplicates add nothing, more answers never hurt, order does not matter, an empty set is worth 0."""
    rewards, weights = (
        random_rewards(4, 5, 3, 4, 3) - 0.5,
        vpo.sample_weights(100, 3, generator=generator()).expand(5, -1, -1),
    )
    R = vpo.set_reward(rewards, weights)
    torch.testing.assert_close(
        vpo.set_reward(torch.cat([rewards, rewards[:, :, :1]], 2), weights), R
    )
    assert (
        vpo.set_reward(torch.cat([rewards, random_rewards(5, 5, 3, 1, 3) - 0.5], 2), weights)
        >= R - 1e-6
    ).all()
    torch.testing.assert_close(vpo.set_reward(rewards[:, :, [2, 0, 3, 1]], weights), R)
    assert (vpo.set_reward(rewards, weights, torch.zeros(5, 3, 4, dtype=torch.bool)) == 0).all()


def test_missing_answers_are_not_zero_rewards():
    """Guards against masking by zeros: a zero row would beat negative rewards. NaN in a missing row must not spread."""
    rewards = -1 - random_rewards(6, 2, 3, 2, 4)
    rewards[:, :, 1] = math.nan
    mask = torch.tensor([True, False]).expand(2, 3, 2)
    R = vpo.set_reward(
        rewards, vpo.sample_weights(100, 4, generator=generator()).expand(2, -1, -1), mask
    )
    assert (R < -1).all()


# ---------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_rewards_that_are_no_numbers_show(method, value):
    """In all advantages of their group, hence in the loss, which stops the run; guards against a silent zero."""
    rewards = random_rewards(19, 2, 4, 1, 3)
    rewards[0, 1, 0, 2] = value
    advantages = vpo.ADVANTAGES[method](
        rewards, rewards.mean(-1), torch.ones(2, 4, 1, dtype=torch.bool)
    )
    assert not advantages[0].isfinite().any()
    if method != "gdpo":  # it normalises over the whole batch
        assert advantages[1].isfinite().all() and (advantages[1] != 0).any()


def test_an_empty_rollout_never_beats_an_answer():
    """Negative rewards: at the floor that the task states, silence is as bad as the worst answer, not better."""
    rewards = -random_rewards(20, 3, 4, 2, 3)
    mask = torch.ones(3, 4, 2, dtype=torch.bool)
    mask[:, 2] = False
    for floor, best in ((0.0, True), (-1.0, False)):
        A = vpo.vpo_advantage(rewards, mask, missing_answer_reward=floor, generator=generator())
        assert (A.argmax(1) == 2).all() == best and ((A.argmin(1) == 2).all() != best)


def test_golden_values():
    """Every method's advantages for fixed inputs, for ports to other trainers: see docs/own.md."""
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    for name, case in golden["cases"].items():
        rewards, scalars, mask = (torch.tensor(case[key]) for key in ("rewards", "scalars", "mask"))
        options = case["options"] | (
            {"generator": generator(case["seed"])} if "seed" in case else {}
        )
        A = vpo.ADVANTAGES[case["method"]](rewards, scalars, mask, **options)
        torch.testing.assert_close(
            A, torch.tensor(case["advantages"]), atol=1e-4, rtol=1e-4, msg=name
        )
    assert {case["method"] for case in golden["cases"].values()} == set(vpo.ADVANTAGES)


def test_advantage_equals_plain_loops():
    """The fused routine against the definition, with masks and negative rewards, on the very same draws."""
    rewards, mask = random_rewards(7, 4, 5, 3, 4) * 2 - 1, random_rewards(8, 4, 5, 3) > 0.3
    mask[0, 0] = False  # a rollout without answers scores 0 and stays in the group
    weights = vpo.sample_weights(4 * 64, 4, generator=generator(9)).view(4, 64, 4)
    fused = vpo.vpo_advantage(rewards, mask, n_weights=64, generator=generator(9))
    torch.testing.assert_close(
        fused.double(), plain_advantage(rewards, weights, mask), atol=1e-4, rtol=1e-4
    )


def test_one_answer_is_grpo_on_the_mean():
    """m = 1: E[w . r] is the plain mean of r, so VPO is GRPO. 200,000 draws leave an error of about 0.005."""
    rewards = random_rewards(10, 6, 8, 1, 4)
    mask = torch.ones(6, 8, 1, dtype=torch.bool)
    grpo = vpo.ADVANTAGES["grpo"](rewards, rewards.mean(-1), mask)
    torch.testing.assert_close(
        vpo.ADVANTAGES["vpo"](
            rewards, rewards.mean(-1), mask, n_weights=200_000, generator=generator()
        ),
        grpo,
        atol=0.03,
        rtol=0,
    )


@pytest.mark.parametrize("s", [1, 2, 4, 6])
def test_group_centring_is_the_leave_one_out_baseline(s):
    """B - mean B = (1 - s/G) (B - mean over the s-subsets without g): group normalisation adds no bias."""
    G = 7
    scores = random_rewards(5, 1, G).double()
    B = vpo.subset_best(scores, s)[0]  # (G)
    for g in range(G):
        others = [i for i in range(G) if i != g]
        without = [scores[0, list(rows)].max() for rows in itertools.combinations(others, s)]
        leave_one_out = torch.stack(without).mean()
        torch.testing.assert_close(
            B[g] - B.mean(), (1 - s / G) * (B[g] - leave_one_out), atol=1e-12, rtol=0
        )


def plain_subset_best(scores: torch.Tensor, s: int) -> torch.Tensor:
    """The definition: every subset of s rollouts, its best, averaged over those with g. scores (G) -> (G)."""
    subsets = list(itertools.combinations(range(len(scores)), s))
    return torch.tensor(
        [
            sum(max(scores[i] for i in S) for S in subsets if g in S) / sum(g in S for S in subsets)
            for g in range(len(scores))
        ]
    )


@pytest.mark.parametrize("G, s", [(2, 1), (3, 2), (6, 2), (6, 3), (6, 5), (8, 4)])
@pytest.mark.parametrize("levels", [3, 1000])
def test_subset_best_equals_brute_force(G, s, levels):
    """Ties (three levels), negative values, more dimensions; guards against an index off by one in the counts."""
    scores = (random_rewards(30 + G, 2, G, 3) * levels).floor() / levels - 0.4
    expected = torch.stack(
        [
            torch.stack([plain_subset_best(scores[p, :, j], s) for j in range(3)], -1)
            for p in range(2)
        ]
    )
    torch.testing.assert_close(vpo.subset_best(scores, s), expected, atol=1e-5, rtol=0)


def test_group_vpo_equals_its_definition():
    """Sets of rollouts under every weighting, several answers each, masks and negative rewards; and Max@K likewise."""
    rewards, mask = random_rewards(40, 3, 5, 2, 4) * 2 - 1, random_rewards(41, 3, 5, 2) > 0.4
    weights = vpo.sample_weights(3 * 32, 4, generator=generator(5)).view(3, 32, 4)
    scores = vpo.set_scores(rewards, weights, mask, -1.0)
    B = torch.stack(
        [
            torch.stack([plain_subset_best(scores[p, :, j], 3) for j in range(32)], -1)
            for p in range(3)
        ]
    )
    options = {"n_weights": 32, "missing_answer_reward": -1.0, "subset": 3}
    for A in (
        vpo.group_vpo(rewards, None, mask, generator=generator(5), **options),
        vpo.vpo(rewards, None, mask, generator=generator(5), **options),
        vpo.vpo_advantage(rewards, mask, generator=generator(5), **options),
    ):
        torch.testing.assert_close(A, vpo.group_normalize(B.mean(-1)), atol=1e-3, rtol=0)
    r = rewards[..., :1, 0]
    expected = vpo.group_normalize(torch.stack([plain_subset_best(row, 2) for row in r[..., 0]]))
    torch.testing.assert_close(vpo.max_at_k(rewards, r, mask), expected, atol=1e-4, rtol=0)


def test_corners_of_the_family():
    """s = 1 is the estimator without subsets; m = 1 and one objective make Group VPO Max@K, whatever the weightings."""
    rewards = random_rewards(42, 3, 6, 1, 1)
    mask = torch.ones(3, 6, 1, dtype=torch.bool)
    torch.testing.assert_close(
        vpo.group_vpo(rewards, None, mask),
        vpo.max_at_k(rewards, rewards[..., 0], mask),
        atol=1e-4,
        rtol=0,
    )
    assert torch.equal(
        vpo.vpo_advantage(rewards, subset=1, generator=generator()),
        vpo.vpo_advantage(rewards, generator=generator()),
    )
    torch.testing.assert_close(
        vpo.max_at_k(rewards, rewards[..., 0], mask, subset=1),
        vpo.grpo(rewards, rewards[..., 0], mask),
    )
    assert vpo.default_subset(3) == 2 and vpo.default_subset(8) == 4
    with pytest.raises(ValueError, match="one rollout cannot be normalised"):
        vpo.vpo_advantage(rewards[:, :1], mask[:, :1])


@pytest.mark.parametrize("value", [0.1, 50.3, -1234567.1])
def test_equal_rewards_have_no_advantage_in_sets_either(value):
    """Guards against rounding in the subset means that the normalisation would blow up to +-1."""
    rewards, mask = torch.full((2, 8, 1, 4), value), torch.ones(2, 8, 1, dtype=torch.bool)
    assert (vpo.max_at_k(rewards, rewards[..., 0], mask) == 0).all()
    rewards[..., 1:] = torch.tensor([0.7, 0.3, 0.2])
    assert (vpo.group_vpo(rewards, None, mask) == 0).all()


def test_large_groups():
    """Guards against binomial coefficients that no float holds."""
    scores = random_rewards(43, 1, 200)
    B = vpo.subset_best(scores, 100)
    assert B.isfinite().all() and (B[0].sort().values == B[0, scores[0].argsort()]).all()


@pytest.mark.parametrize("s", [0, 4, 5])
def test_a_set_as_large_as_the_group_is_refused(s):
    with pytest.raises(ValueError, match=f"subset s = {s}: must be 1 to 3"):
        vpo.vpo_advantage(torch.zeros(2, 4, 1, 3), subset=s)


def test_dr_grpo_and_maxrl_by_hand():
    scalars = torch.tensor([[[0.0], [1.0], [0.0], [1.0]], [[0.0]] * 4, [[1.0]] * 4])
    assert vpo.dr_grpo(scalars[..., None], scalars, None)[0].tolist() == [-0.5, 0.5, -0.5, 0.5]
    A = vpo.maxrl(scalars[..., None], scalars, None)
    torch.testing.assert_close(
        A, torch.tensor([[-1.0, 1, -1, 1], [0] * 4, [0] * 4]), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        vpo.maxrl(scalars[..., None], scalars - 2, None, missing_answer_reward=-2.0), A
    )


def test_gdpo_normalises_every_objective_then_the_batch():
    """The paper's example: rewards (0, 1) and (0, 2) are alike to GRPO on their sum, not to GDPO; and objectives that a
    problem lacks count for nothing, even if the padding held rewards."""
    rewards = torch.tensor([[[[0.0, 1.0]], [[0.0, 0.0]]], [[[1.0, 1.0]], [[0.0, 0.0]]]])
    A = vpo.gdpo(rewards, rewards.sum(-1), None)
    assert A[1, 0] == pytest.approx(
        2 * A[0, 0].item(), rel=1e-4
    ) and A.square().mean() == pytest.approx(1, rel=1e-4)
    wide = torch.nn.functional.pad(rewards, (0, 1)) + torch.tensor(
        [0.0, 0.0, 1.0]
    ) * random_rewards(3, 2, 2, 1, 1)
    exists = torch.tensor([[True, True, False]] * 2)
    torch.testing.assert_close(vpo.gdpo(wide, rewards.sum(-1), None, objective_mask=exists), A)


def test_random_weighting_is_grpo_under_one_weighting():
    rewards, mask = random_rewards(50, 3, 6, 1, 4), torch.ones(3, 6, 1, dtype=torch.bool)
    w = vpo.sample_weights(3, 4, generator=generator(6))
    A = vpo.random_weighting(
        rewards, rewards.mean(-1), mask, n_weights=100, subset=4, generator=generator(6)
    )
    torch.testing.assert_close(
        A, vpo.group_normalize(torch.einsum("pgk,pk->pg", rewards[:, :, 0], w)), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "method",
    sorted(vpo.ADVANTAGES.keys() - {*vpo.SEVERAL_ANSWERS, "group_vpo", "goal_conditioned"}),
)
def test_single_answer_methods_refuse_sets(method):
    with pytest.raises(ValueError, match=f"{method} takes one answer per rollout, not m = 2"):
        vpo.ADVANTAGES[method](
            torch.zeros(2, 4, 2, 3), torch.zeros(2, 4, 2), torch.ones(2, 4, 2, dtype=torch.bool)
        )


def test_multi_rlvr_pays_distinct_answers():
    """As in the official code: a repeated answer earns what a missing one does."""
    scalars, mask = random_rewards(11, 3, 4, 2), torch.ones(3, 4, 2, dtype=torch.bool)
    mask[0, 0, 1] = False
    paid = scalars.clone()
    paid[0, 0, 1] = -0.5
    advantages = vpo.ADVANTAGES["multi_rlvr"](
        scalars[..., None], scalars, mask, missing_answer_reward=-0.5
    )
    torch.testing.assert_close(advantages, vpo.group_normalize(paid.sum(-1)))


@pytest.mark.parametrize("value", [0.0, 0.1, 1234567.1, -3.3])
def test_a_group_without_signal_has_no_advantage(value):
    """Guards against 0 / 0 and against rounding of large equal rewards that a bare std would blow up to +-1."""
    assert (vpo.group_normalize(torch.full((2, 7), value)) == 0).all()
    assert (vpo.vpo_advantage(torch.full((2, 7, 3, 4), value), generator=generator()) == 0).all()


def test_normalisation_uses_the_population_std():
    """Guards against torch.std's default correction 1: (1, -1), not (0.71, -0.71)."""
    torch.testing.assert_close(
        vpo.group_normalize(torch.tensor([[1.0, 0.0]])),
        torch.tensor([[1.0, -1.0]]),
        atol=1e-4,
        rtol=0,
    )
    with pytest.raises(ValueError, match="G >= 2"):
        vpo.group_normalize(torch.zeros(3, 1))


@pytest.mark.parametrize("sampler", vpo.SAMPLERS)
def test_absent_objectives_get_no_weight(sampler):
    """A prompt with 2 of 4 objectives equals one that has only these 2; what stands in the others must not matter."""
    rewards = random_rewards(12, 2, 6, 3, 4)
    objectives = torch.tensor([[True, True, False, False]]).expand(2, 4)
    rewards[..., 2:] = math.nan
    masked = vpo.vpo_advantage(
        rewards,
        objective_mask=objectives,
        n_weights=100_000,
        sampler=sampler,
        generator=generator(),
    )
    exact = vpo.group_normalize(vpo.set_reward_exact(rewards[..., :2]))
    torch.testing.assert_close(masked, exact, atol=0.03, rtol=0)
    assert (
        vpo.vpo_advantage(
            rewards, objective_mask=torch.zeros(2, 4, dtype=torch.bool), generator=generator()
        )
        == 0
    ).all()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(P, G, m, k\)"):
        vpo.vpo_advantage(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="mask"):
        vpo.vpo_advantage(torch.zeros(2, 3, 4, 5), torch.ones(2, 3))
    with pytest.raises(ValueError, match="objective_mask"):
        vpo.vpo_advantage(torch.zeros(2, 3, 4, 5), objective_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="weights"):
        vpo.set_reward(torch.zeros(2, 3, 4, 5), torch.zeros(3, 10, 5))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    "options",
    [{}, {"alpha": 0.5}, {"sampler": "sobol"}, {"subset": 2}],
)
def test_one_traced_graph_with_the_same_numbers(options):
    """fullgraph=True raises at any graph break; the seed must draw the same weightings inside a graph as outside."""
    rewards, mask = random_rewards(13, 3, 4, 2, 3), random_rewards(14, 3, 4, 2) > 0.2
    compiled = torch.compile(vpo.vpo_advantage, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    eager = vpo.vpo_advantage(rewards, mask, **options)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(rewards, mask, **options), eager)


# ---------------------------------------------------------------------------------------------------- the loss


def loss_inputs(B: int = 4, T: int = 6):
    old = -random_rewards(15, B, T) * 3
    new = (old + 0.8 * (random_rewards(16, B, T) - 0.5)).requires_grad_()
    return new, old, torch.tensor([1.0, -1.0, 2.0, -0.5]), random_rewards(17, B, T) > 0.3


def test_on_policy_gradient_is_reinforce():
    """At ratio 1 nothing is clipped: the gradient of each sampled token is -A / n_tokens, of every other one 0."""
    _, old, A, mask = loss_inputs()
    new = old.clone().requires_grad_()
    loss, metrics = vpo.policy_loss(new, old, A, mask, mask.sum())
    loss.backward()
    torch.testing.assert_close(new.grad, -A[:, None] * mask / mask.sum())
    assert metrics["clip_fraction"] == 0


def test_clipping_token_by_token():
    """Both clips by hand: ratio 1.5 at A > 0 and 0.5 at A < 0 are clipped, 4 at A < 0 stops at the dual clip 3.

    The tokens of a rollout have different ratios: guards against one ratio for all of them.
    """
    log_ratio = torch.tensor([[1.5, 0.9], [0.5, 4.0], [1.5, 1.0]]).log().requires_grad_()
    A = torch.tensor([1.0, -1.0, -1.0])
    loss, metrics = vpo.policy_loss(
        log_ratio, torch.zeros(3, 2), A, torch.ones(3, 2, dtype=torch.bool), 6
    )
    loss.backward()
    assert loss.item() == pytest.approx((-1.2 - 0.9 + 0.8 + 3.0 + 1.5 + 1.0) / 6)
    has_gradient = torch.tensor([[False, True], [False, False], [True, True]])
    assert torch.equal(log_ratio.grad != 0, has_gradient)
    assert metrics["clip_fraction"] == pytest.approx(0.5)


def test_kl_is_k3():
    """k3 = r - log r - 1 with r = reference / policy, over the sampled tokens; guards against k1 and a flipped sign."""
    new, old, A, mask = loss_inputs()
    reference = old - 0.3
    without, _ = vpo.policy_loss(new, old, A, mask, mask.sum())
    loss, metrics = vpo.policy_loss(
        new, old, A, mask, mask.sum(), ref_logprobs=reference, kl_coef=0.5
    )
    d = (reference - new.detach())[mask]
    assert metrics["kl"].item() == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-5)
    assert (loss - without).item() == pytest.approx(0.5 * metrics["kl"].item(), rel=1e-4)


def test_micro_batches_add_up():
    """Guards against per-micro-batch denominators: rows hold unequal token counts, so their mean would differ."""
    new, old, A, mask = loss_inputs()
    whole, _ = vpo.policy_loss(new, old, A, mask, mask.sum(), ref_logprobs=old, kl_coef=0.1)
    parts = sum(
        vpo.policy_loss(
            new[i : i + 1],
            old[i : i + 1],
            A[i : i + 1],
            mask[i : i + 1],
            mask.sum(),
            ref_logprobs=old[i : i + 1],
            kl_coef=0.1,
        )[0]
        for i in range(4)
    )
    torch.testing.assert_close(parts, whole)


def test_no_advantage_is_no_loss_even_where_the_ratio_overflows():
    """0 * inf is NaN: a rollout without advantage must not end a run because its tokens have become certain."""
    logprobs = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = vpo.policy_loss(logprobs, torch.full((1, 2), -200.0), torch.zeros(1), mask, 2)
    loss.backward()
    assert loss.item() == 0 and not logprobs.grad.any()


def test_padding_cannot_poison_the_loss():
    """Whatever stands at masked positions, infinities too, leaves loss and gradient finite and unchanged."""
    new, old, A, mask = loss_inputs()
    clean, _ = vpo.policy_loss(new, old, A, mask, mask.sum(), ref_logprobs=old, kl_coef=0.1)
    dirty, _ = vpo.policy_loss(
        new,
        old.masked_fill(~mask, -math.inf),
        A,
        mask,
        mask.sum(),
        ref_logprobs=old.masked_fill(~mask, math.inf),
        kl_coef=0.1,
    )
    (gradient,) = torch.autograd.grad(dirty, new)
    torch.testing.assert_close(dirty, clean)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["rewards", "answer_mask"])
def test_arrays_that_are_no_tensors_are_named(name):
    arguments = {"rewards": torch.zeros(1, 2, 1, 2), "answer_mask": torch.ones(1, 2, 1)}
    arguments[name] = arguments[name].numpy()
    with pytest.raises(
        TypeError, match=f"{name}: expected a torch.Tensor, not ndarray; .*as_tensor"
    ):
        vpo.vpo_advantage(**arguments)


@pytest.mark.parametrize("method", vpo.ADVANTAGES)
def test_every_method_takes_all_options(method):
    """Guards against a method of one's own that fails in its first step."""
    options = inspect.signature(vpo.vpo_advantage).parameters.keys() - {"rewards", "answer_mask"}
    signature = inspect.signature(vpo.ADVANTAGES[method])
    arguments = ("rewards", "scalars", "answer_mask")
    assert signature.bind(*arguments, **dict.fromkeys(options)), f"{method} must take **options"


def test_the_printed_table_teaches_what_each_method_pays(capsys):
    """GRPO and Max@K pay the compromise most, sets with a vector the specialist that nothing replaces."""
    advantages.main()
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        words = line.split()
        if len(words) == 6 and words[0] in vpo.ADVANTAGES:
            rows[words[0]] = [float(number) for number in words[1:]]
    assert list(rows) == [m for m in vpo.ADVANTAGES if m not in ("multi_rlvr", "vpo")] + [
        "multi_rlvr",
        "vpo",
    ]
    a, again, b, compromise, failure = range(5)
    for method in ("grpo", "dr_grpo", "maxrl", "gdpo", "max_at_k"):
        assert max(rows[method]) == rows[method][compromise]
    assert max(rows["group_vpo"]) == rows["group_vpo"][b]
    assert rows["group_vpo"][a] == rows["group_vpo"][again] < rows["group_vpo"][compromise]
    assert min(rows["group_vpo"]) == rows["group_vpo"][failure]
    assert max(rows["vpo"]) == rows["vpo"][0], "the two specialists"
    assert max(rows["multi_rlvr"]) > rows["multi_rlvr"][0]
