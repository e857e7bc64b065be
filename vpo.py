"""Vector Policy Optimization (arXiv 2605.22817): reward vectors in, advantages and loss out.

    w_1..w_K ~ Dirichlet(alpha)            sample_weights   once per prompt, for all its G rollouts
    u_j(g) = max_{y in S} w_j . r(y)       set_scores       S = the m answers of rollout g
    R_g = 1/K sum_j u_j(g)                 set_reward       Eq. 2, which estimates Eq. 1, E_w u(g)
    A_g = (R_g - mean R) / (std R + eps)   group_normalize  over the G rollouts of one prompt
    loss = PPO-clip(A) + beta k3(pi, ref)  policy_loss      mean over all sampled tokens

Letters in shapes: P prompts, G rollouts of each (its group), m answers per rollout, d objectives
(components of a reward vector), K preference weights, B rollouts of a micro-batch, T tokens.

Four methods form one family. They differ in what a set S is and in its utility:

    GRPO        one rollout with one answer        the task scalar (by default the mean of r)
    Max@K       s rollouts of the group            the best task scalar in the set
    VPO         the m answers of one rollout       the best w . r in the set, averaged over w
    Group VPO   s rollouts of the group            the best w . r in the set, averaged over w

Group VPO is ours and not in the paper: the sets are formed across the rollouts of a group, by
`subset_best`. Every token of a rollout gets the rollout's advantage.

The file imports torch alone, so that it can be copied into another trainer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# With a smaller alpha draws underflow in float32, with a larger one every w is nearly central.
ALPHAS = (0.05, 100.0)
EPS = 1e-6  # eps; a group whose standard deviation is smaller has no signal, see `center`
KL_LINEAR = 10.0  # nats; beyond this log-ratio the estimate of the KL is a straight line


# The equations.


def sample_weights(
    P: int,
    K: int,
    d: int,
    *,
    alpha: float = 1.0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw K preference weights over d objectives for each of P prompts, w ~ Dirichlet(alpha).

    Args:
        alpha: 1 is uniform on the simplex, less favours its corners, more its centre.
        generator: on `device`. None: torch's default one.
        device: where the weights are; None: that of the generator, else the CPU.

    Returns:
        (P, K, d) in float32, non-negative, every row sums to 1.
    """
    if K < 1 or d < 1:
        raise ValueError(f"n_weights = {K}, objectives d = {d}: both must be at least 1")
    if not ALPHAS[0] <= alpha <= ALPHAS[1]:
        raise ValueError(f"alpha = {alpha}: must be {ALPHAS[0]:g} to {ALPHAS[1]:g}")
    if device is None and generator is not None:
        device = generator.device
    if alpha == 1:
        draws = torch.empty(P, K, d, dtype=torch.float32, device=device)
        draws = draws.exponential_(generator=generator)
    else:
        concentration = torch.full((P, K, d), alpha, dtype=torch.float32, device=device)
        # torch.distributions takes no generator.
        draws = torch._standard_gamma(concentration, generator=generator)
    return draws / draws.sum(-1, keepdim=True)


def set_scores(
    rewards: Tensor,
    weights: Tensor,
    answer_mask: Tensor | None = None,
    empty_rollout_utility: float = 0.0,
) -> Tensor:
    """The utility of every rollout's best answer, u_j(g) = max_{y in S} w_j . r(y): (P, G, K).

    Args:
        rewards: (P, G, m, d) reward vectors.
        weights: (P, K, d) preference weights of each prompt.
        answer_mask: (P, G, m) bool, False where an answer is missing. None: all are there.
        empty_rollout_utility: where no answer is; the least reward, so that silence never wins.
    """
    P, _, _, d = _check_rewards(rewards, answer_mask)
    if weights.ndim != 3 or weights.shape[0] != P or weights.shape[2] != d:
        raise ValueError(f"weights {tuple(weights.shape)}: expected (P, K, d) = ({P}, K, {d})")
    utilities = _products(rewards, weights)  # (P, G, m, K)
    if answer_mask is not None:
        is_missing = ~answer_mask.bool()[..., None]  # (P, G, m, 1)
        utilities = utilities.masked_fill(is_missing, -math.inf)
        is_empty = is_missing.all(2, keepdim=True)  # (P, G, 1, 1)
        utilities = utilities.masked_fill(is_empty, empty_rollout_utility)
    return utilities.amax(2)


def subset_best(scores: Tensor, s: int) -> Tensor:
    """B(g): the best score in a set of s rollouts that holds g, averaged over all such sets.

    As the reward of g it maximises the expected best of s rollouts (arXiv 2505.15201, 2510.23393).
    Sort the group and count ranks from 0. Of the C(G-1, s-1) sets that hold rank i, rank i is the
    best of C(i, s-1), and a higher rank j is the best of C(j-1, s-2):

        B(i) = ( C(i, s-1) u_i  +  sum_{j > i} C(j-1, s-2) u_j ) / C(G-1, s-1)

    For G = 3, s = 2 and u_0 < u_1 < u_2 that is B(0) = B(1) = (u_1 + u_2) / 2 and B(2) = u_2.

    Args:
        scores: (P, G, ...), as is the result.
        s: rollouts per set, 1 <= s < G; 1 changes nothing. A set as large as the group would give
            every rollout the same.
    """
    if s == 1:
        return scores
    G = scores.shape[1]
    if not 1 <= s < G:
        raise ValueError(f"a set of s = {s} rollouts needs a group of more, and G is {G}")
    n_sets = math.comb(G - 1, s - 1)
    scores = _float32_or_more(scores)
    own = scores.new_tensor([math.comb(i, s - 1) / n_sets for i in range(G)])  # (G)
    above = scores.new_tensor([0.0] + [math.comb(j - 1, s - 2) / n_sets for j in range(1, G)])

    highest = scores.amax(1, keepdim=True)  # subtracted so that equal scores become exact zeros
    ranked, order = (scores - highest).sort(1)
    ranked = ranked.transpose(1, -1)  # (P, ..., G)
    weighted = ranked * above
    sum_above = weighted.flip(-1).cumsum(-1).flip(-1) - weighted  # over j > i
    best_by_rank = (ranked * own + sum_above).transpose(1, -1)
    best = torch.empty_like(scores).scatter(1, order, best_by_rank)
    return best + highest


def set_reward(
    rewards: Tensor,
    weights: Tensor,
    answer_mask: Tensor | None = None,
    empty_rollout_utility: float = 0.0,
    subset: int = 1,
) -> Tensor:
    """R_g = 1/K sum_j u_j(g) (Eq. 2), which estimates R(S) = E_w max_{y in S} w . r(y) (Eq. 1).

    Two specialists, r = (1, 0) and (0, 1), are worth E max(w_1, w_2) = 3/4 together. Two equal
    compromises, r = (1/2, 1/2), are worth 1/2. With the mean inside both sets would be worth 1/2.

    A set is the answers of s = `subset` rollouts; 1 is VPO, more Group VPO. The other arguments are
    those of `set_scores`. Returns (P, G).
    """
    utilities = set_scores(rewards, weights, answer_mask, empty_rollout_utility)  # (P, G, K)
    return subset_best(utilities, subset).mean(-1)


def center(scores: Tensor, eps: float = EPS) -> Tensor:
    """R_g - mean R over each prompt's group (P, G), exactly 0 where only rounding differs.

    That is where the population standard deviation is below eps. With scores beyond 1 the bound
    grows with the largest of them, as their rounding errors do.
    """
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(f"scores {tuple(scores.shape)}: expected (P, G) with G >= 2")
    scores = _float32_or_more(scores)
    shifted = scores - scores[:, :1]  # so that rounding cannot make equal scores differ
    centered = shifted - shifted.mean(1, keepdim=True)
    scale = scores.abs().amax(1, keepdim=True).clamp_min(1.0)  # (P, 1)
    return torch.where(_std(centered) < eps * scale, 0.0, centered)


def group_normalize(scores: Tensor, eps: float = EPS) -> Tensor:
    """A_g = (R_g - mean R) / (std R + eps) over each prompt's group (P, G), as in GRPO.

    std is the population's. Groups that differ by rounding alone get exactly 0, see `center`.
    """
    centered = center(scores, eps)  # R_g - mean R
    return centered / (_std(centered) + eps)


def vpo_advantage(  # noqa: PLR0913 - every argument is one symbol of the paper
    rewards: Tensor,
    answer_mask: Tensor | None = None,
    *,
    objective_mask: Tensor | None = None,
    n_weights: int = 100,
    alpha: float = 1.0,
    empty_rollout_utility: float = 0.0,
    subset: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The advantage of VPO, Eq. 2 normalised in the group; of Group VPO where subset > 1: (P, G).

    The G rollouts of a prompt share its preference weights. Only then do the errors of the random
    weights cancel in R_g - mean R. A NaN in a reward makes its whole group's advantages NaN.

    Args:
        rewards, answer_mask, empty_rollout_utility: see `set_scores`.
        objective_mask: (P, d) bool, which objectives a prompt has. The others get no weight.
        n_weights, alpha: K, preference weights per prompt, and of their Dirichlet distribution.
        subset: s, rollouts that form a set together, with all their answers. 1 is VPO.
        generator: of the weights, on the device of `rewards`. None: torch's default one.
    """
    P, _, _, d = _check_rewards(rewards, answer_mask)
    dtype = _float32_or_more(rewards).dtype
    rewards = _float64(rewards)
    weights = sample_weights(
        P, n_weights, d, alpha=alpha, generator=generator, device=rewards.device
    )
    if objective_mask is not None:
        rewards, weights = _present(rewards, weights, objective_mask)
    set_rewards = set_reward(rewards, weights, answer_mask, empty_rollout_utility, subset)  # (P, G)
    return group_normalize(set_rewards).to(dtype)


# The methods: (what the rollouts earned, options) -> advantages (P, G).


@dataclass
class Scored:
    """What the rollouts of P prompts earned: G rollouts each, m answers each, d objectives."""

    vectors: Tensor  # (P, G, m, d) `minimum` where an answer is missing, 0 beyond a prompt's own d
    scalars: Tensor  # (P, G, m) the task scalar of each answer, for the methods without w
    answer_mask: Tensor  # (P, G, m) bool, False where an answer is missing
    repeat_mask: Tensor  # (P, G, m) bool, True where it repeats an earlier one of its rollout
    objective_mask: Tensor  # (P, d) bool, the objectives that each prompt has
    missing_scalar: Tensor  # (P, 1) the task scalar of a missing answer
    minimum: float = 0.0  # the least that a component can be


@dataclass
class Options:
    """The options of the methods. Each method takes those that it needs."""

    n_weights: int = 100  # K, preference weights per prompt
    alpha: float = 1.0  # of their Dirichlet distribution
    subset: int = 0  # s, rollouts that form a set together; 0: the method's own default
    generator: torch.Generator | None = None  # of the weights; None: torch's default one


def grpo(scored: Scored, options: Options) -> Tensor:
    """GRPO (arXiv 2402.03300): the task scalar, normalised in the group."""
    return group_normalize(single(scored))


def dr_grpo(scored: Scored, options: Options) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): r - mean r, not divided by the standard deviation."""
    return center(single(scored))


def maxrl(scored: Scored, options: Options) -> Tensor:
    """MaxRL (arXiv 2602.02710): (r - mean r) / mean r for r in {0, 1}; 0 where the mean is."""
    # The least scalar becomes 0, so that no r is negative.
    r = single(scored) - scored.missing_scalar
    mean = r.mean(1, keepdim=True)
    return torch.where(mean.abs() < EPS, 0.0, center(r) / (mean + EPS))


def gdpo(scored: Scored, options: Options) -> Tensor:
    """GDPO (arXiv 2601.05242): each objective normalised in the group, their sum over the batch."""
    P, G = single(scored).shape
    by_objective = scored.vectors[:, :, 0].transpose(1, 2).flatten(0, 1)  # (P * d, G)
    normalized = group_normalize(by_objective).view(P, -1, G)  # (P, d, G)
    total = normalized.masked_fill(~scored.objective_mask[..., None], 0.0).sum(1)  # (P, G)
    advantages = group_normalize(total.view(1, P * G)).view(P, G)
    return torch.where(total == 0, 0.0, advantages)  # no signal: 0, not rounding errors


def max_at_k(scored: Scored, options: Options) -> Tensor:
    """Max@K (arXiv 2510.23393, 2505.15201): the best scalar in sets of s rollouts, normalised."""
    r = single(scored)
    return group_normalize(subset_best(r, options.subset or default_subset(r.shape[1])))


def random_weighting(scored: Scored, options: Options) -> Tensor:
    """Random weighting (arXiv 2605.22817, baselines): w . r under one w per prompt and step."""
    check_single(scored)
    return vpo(scored, replace(options, n_weights=1, subset=1))


def multi_rlvr(scored: Scored, options: Options) -> Tensor:
    """Multi-RLVR (arXiv 2605.22817, baselines): the sum of the scalars of the distinct answers.

    As in the paper's official code a repeated answer earns what a missing one does.
    """
    is_paid = scored.answer_mask & ~scored.repeat_mask  # (P, G, m)
    paid = torch.where(is_paid, _float32_or_more(scored.scalars), scored.missing_scalar[..., None])
    return group_normalize(paid.sum(-1))


def vpo(scored: Scored, options: Options) -> Tensor:
    """VPO (arXiv 2605.22817): the sets are the m answers of one rollout, or of s rollouts."""
    return vpo_advantage(
        scored.vectors,
        scored.answer_mask,
        objective_mask=scored.objective_mask,
        n_weights=options.n_weights,
        alpha=options.alpha,
        empty_rollout_utility=scored.minimum,
        subset=options.subset or 1,
        generator=options.generator,
    )


def group_vpo(scored: Scored, options: Options) -> Tensor:
    """Group VPO (ours): the sets are formed across the group's rollouts of one answer each."""
    s = options.subset or default_subset(scored.vectors.shape[1])
    return vpo(scored, replace(options, subset=s))


ADVANTAGES: dict[str, Callable[[Scored, Options], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "max_at_k": max_at_k,
    "random_weighting": random_weighting,
    "multi_rlvr": multi_rlvr,
    "vpo": vpo,
    "group_vpo": group_vpo,
}
SEVERAL_ANSWERS = ["multi_rlvr", "vpo"]  # the methods whose rollouts hold m answers


def answers_per_rollout(method: str, m: int) -> int:
    """m for the methods whose rollouts hold several answers, 1 for the others."""
    return m if method in SEVERAL_ANSWERS else 1


def default_subset(G: int) -> int:
    """The default s of Max@K and Group VPO for G > 2 rollouts: half of them, at least two."""
    return max(2, G // 2)


def single(scored: Scored) -> Tensor:
    """The task scalars (P, G) of rollouts that hold one answer each."""
    check_single(scored)
    return _float32_or_more(scored.scalars[..., 0])


def check_single(scored: Scored) -> None:
    """Raise ValueError unless each rollout holds one answer."""
    m = scored.scalars.shape[-1]
    if m != 1:
        raise ValueError(f"takes one answer per rollout, not m = {m}; vpo takes several")


# The loss.


def policy_loss(  # noqa: PLR0913 - every argument is one symbol of the paper
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    n_tokens: int | Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    clip: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip with dual clip, plus kl_coef times an estimate of KL(policy || reference policy).

    A bonus, entropy_coef times the mean entropy, is subtracted. Dual clip (arXiv 1912.09729)
    bounds the loss where the advantage is negative. The estimate of KL, k3, is x - log x - 1 with
    x = reference / policy. Its gradient is on average that of KL(reference || policy), which brings
    rare tokens back. Beyond log x = KL_LINEAR it is a straight line, so that it stays finite.

    Args:
        logprobs, old_logprobs, ref_logprobs: (B, T) of the sampled tokens, in nats.
        entropy: (B, T) of the policy's distributions there, in nats; for entropy_coef.
        advantages: (B,), or (B, T) where each token has its own.
        token_mask: (B, T) bool, which tokens were sampled. A row may have none.
        n_tokens: sampled tokens in the WHOLE batch, so that micro-batches add up to one gradient.

    Returns:
        The scalar loss, and metrics without gradient, sums over these tokens divided by n_tokens:
        policy_loss (without KL and entropy), clip_fraction (tokens whose gradient is clipped
        away), kl (nats per token).
    """
    A = advantages if advantages.ndim == 2 else advantages[:, None]  # (B, T) or (B, 1)
    token_mask = token_mask.bool()
    n_tokens = torch.as_tensor(n_tokens).clamp_min(1)  # a batch without tokens has a loss of 0
    log_ratio = (logprobs - old_logprobs).masked_fill(~token_mask, 0.0)
    ratio = log_ratio.clamp_max(80).exp()  # finite, so that an advantage of 0 gives a loss of 0
    unclipped = -A * ratio
    clipped = -A * ratio.clamp(1 - clip, 1 + clip)
    token_loss = torch.maximum(unclipped, clipped)  # (B, T); at ratio 1 its gradient is -A
    token_loss = torch.where(A < 0, torch.minimum(token_loss, -A * dual_clip), token_loss)
    loss = token_loss.masked_fill(~token_mask, 0.0).sum() / n_tokens

    is_clipped = (clipped > unclipped) | ((A < 0) & (ratio > dual_clip))
    clip_fraction = (is_clipped & token_mask).sum(dtype=torch.float32) / n_tokens
    metrics = {"policy_loss": loss.detach(), "clip_fraction": clip_fraction}
    if entropy_coef:
        loss = loss - entropy_coef * entropy.masked_fill(~token_mask, 0.0).sum() / n_tokens
    if ref_logprobs is None:
        return loss, metrics
    log_x = (ref_logprobs - logprobs).masked_fill(~token_mask, 0.0)
    curved = log_x.clamp_max(KL_LINEAR)
    beyond = (log_x - KL_LINEAR).relu() * (math.exp(KL_LINEAR) - 1)
    kl = (curved.expm1() - curved + beyond).sum() / n_tokens
    metrics["kl"] = kl.detach()
    if kl_coef:  # 0 times an infinite estimate would be NaN
        loss = loss + kl_coef * kl
    return loss, metrics


# Helpers.


def _float32_or_more(x: Tensor) -> Tensor:
    """Any numbers in float32 at least: bfloat16 would round a mean, and integers have none."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _float64(x: Tensor) -> Tensor:
    """Numbers in float64, so that small differences of large ones count. MPS has no float64."""
    return _float32_or_more(x) if x.is_mps else x.double()


def _products(rewards: Tensor, weights: Tensor) -> Tensor:
    """w . r of every answer (P, G, m, d) under every weight (P, K, d): (P, G, m, K).

    The products are exact: float32, and autocast or TF32 even more, would lose small differences.
    """
    answers = _float64(rewards).flatten(1, 2)  # (P, G * m, d)
    device = "cpu" if rewards.is_meta else rewards.device.type  # "meta" has no autocast
    with torch.autocast(device, enabled=False):
        products = torch.bmm(answers, weights.to(answers.dtype).mT)  # (P, G * m, K)
    return products.view(*rewards.shape[:3], -1).to(_float32_or_more(rewards).dtype)


def _std(centered: Tensor) -> Tensor:
    """The population standard deviation (P, 1) of centered scores (P, G), without overflow."""
    scale = centered.abs().amax(1, keepdim=True).clamp_min(1.0)
    return scale * (centered / scale).square().mean(1, keepdim=True).sqrt()


def _check_rewards(rewards: Tensor, answer_mask: Tensor | None = None) -> torch.Size:
    """The shape (P, G, m, d) of rewards, if they and the mask have it."""
    if not isinstance(rewards, Tensor):
        raise TypeError(f"rewards: expected a tensor (P, G, m, d), not {type(rewards).__name__}")
    shape = tuple(rewards.shape)
    if len(shape) != 4 or 0 in shape:
        raise ValueError(f"rewards {shape}: expected (P, G, m, d), none of them 0")
    if answer_mask is not None and answer_mask.shape != shape[:3]:
        raise ValueError(f"answer_mask {tuple(answer_mask.shape)}: expected {shape[:3]}")
    return rewards.shape


def _present(rewards: Tensor, weights: Tensor, objective_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards (P, G, m, d) and weights (P, K, d) without the objectives that a prompt lacks.

    A Dirichlet draw that loses some components and is rescaled is one of the others' Dirichlet. A
    prompt without any objective keeps all weights: its answers earn 0 under each.
    """
    P, _, _, d = rewards.shape
    if objective_mask.shape != (P, d):
        raise ValueError(f"objective_mask {tuple(objective_mask.shape)}: expected {(P, d)}")
    is_absent = ~objective_mask.bool()  # (P, d)
    rewards = rewards.masked_fill(is_absent[:, None, None], 0.0)
    has_some = ~is_absent.all(-1, keepdim=True)  # (P, 1)
    weights = weights.masked_fill((is_absent & has_some)[:, None], 0.0)
    return rewards, weights / weights.sum(-1, keepdim=True)
