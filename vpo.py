"""The algorithm of Vector Policy Optimization (arXiv 2605.22817), nothing else: pure tensor functions on any device.

    w_1..w_K ~ Dirichlet(alpha)              sample_weights     drawn once per prompt, shared by its G rollouts
    u_j(g) = max_{y in S} w_j.r(y)           set_scores         S = the m answers of rollout g
    R_g  = 1/K sum_j u_j(g)                  set_reward
    A_g  = (R_g - mean R) / (std R + eps)    group_normalize    over the G rollouts of one prompt
    loss = PPO-clip(A) + beta KL(pi || ref)  policy_loss        averaged over all sampled tokens

P prompts, G rollouts per prompt (the group), m answers per rollout, k reward components, K weightings, T tokens.

One family: where s rollouts form a set together, u_j(g) gives way to B_j(g), its mean best over the s-subsets of the
group that contain g (subset_best). GRPO: the scalar, s = 1. Max@K: the scalar, s > 1. VPO: the vector, m > 1, s = 1.
Group VPO, which the paper does not have: the vector, m = 1, s > 1.

Where this file departs from the paper or its official code:
1. The standard deviation of a group is the population's (correction 0) for every method; TRL and veRL use correction 1.
2. `sampler="sobol"` gives every prompt its own digital shift of one scrambled net: same expectation, less noise."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

SAMPLERS = ("iid", "sobol")
ALPHAS = (
    1e-6,
    1e6,
)  # beyond them every weighting is a corner of the simplex, or its centre, to float32's last digit
BITS = 23  # of a uniform draw: plus a half, float32 holds it exactly and it never rounds to 0 or 1


def sample_weights(
    n: int,
    k: int,
    *,
    alpha: float = 1.0,
    sampler: str = "iid",
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """n weightings of k objectives, w ~ Dirichlet(alpha): (n, k), non-negative, each row sums to 1.
    alpha = 1 is uniform on the simplex, smaller favours its corners, larger its centre. `iid` draws independently,
    `sobol` takes a scrambled low-discrepancy net (paper section 3, official notes).
    Raises ValueError if n < 1, k < 1, alpha is not within 1e-6 to 1e6, or the sampler is unknown."""
    return _log_weights((1, n), k, alpha, sampler, generator, device)[0].softmax(-1)


def set_scores(
    rewards: Tensor, weights: Tensor, mask: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """u_j(g) = max_{y in S} w_j . r(y), the best answer of every rollout under every weighting.
    rewards (P, G, m, k), weights (P, K, k), mask (P, G, m) of the answers that exist -> (P, G, K).
    A rollout without answers scores `floor`, the least that a component of a reward can be: no silence beats an answer.
    Raises ValueError where the shapes do not fit."""
    P, G, m, k = _check_rewards(rewards, mask)
    if weights.ndim != 3 or weights.shape[0] != P or weights.shape[2] != k:
        raise ValueError(
            f"weights {tuple(weights.shape)}: expected (P, K, k) = ({P}, K, {k}) to fit the rewards"
        )
    rewards, weights = rewards.float(), weights.float()
    scores = torch.bmm(rewards.reshape(P, G * m, k), weights.mT).reshape(
        P, G, m, -1
    )  # (P, G, m, K)
    if mask is None:
        return scores.amax(2)
    best = scores.masked_fill(~mask.bool()[..., None], -math.inf).amax(2)
    return torch.where(mask.bool().any(-1, keepdim=True), best, floor)


def set_reward(
    rewards: Tensor, weights: Tensor, mask: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """R_hat(S) = 1/K sum_j u_j (P, G): the mean is outside, the max inside (paper equation for R); see `set_scores`."""
    return set_scores(rewards, weights, mask, floor).mean(-1)


def subset_best(scores: Tensor, s: int) -> Tensor:
    """B(g): the mean, over the subsets of s rollouts that contain g, of the subset's best (arXiv 2510.23393).
    scores (P, G, ...) -> the same shape, exact: of the C(G-1, s-1) subsets with the i-th lowest, C(i-1, s-1) have it
    as their best, and C(j-2, s-2) the j-th, j > i. Raises ValueError unless 1 <= s < G."""
    G = scores.shape[1]
    if not 1 <= s < G:
        raise ValueError(
            f"subset s = {s}: must be 1 to {G - 1}; as large as the group, G = {G}, it carries no signal"
        )
    if s == 1:
        return scores
    rank = torch.arange(G, dtype=torch.float64)
    logs = [
        torch.lgamma(n + 1) - torch.lgamma(n - c + 1) for n, c in ((rank, s - 1), (rank - 1, s - 2))
    ]  # n! / (n-c)!
    alone, later = ((log - logs[0][-1]).exp() for log in logs)
    share = alone.diag() + (s - 1) * later.expand(G, G).triu(1)  # (G, G)
    first = scores[:, :1]  # as in group_normalize: equal scores must stay equal
    ranked, order = (scores - first).transpose(1, -1).contiguous().sort(-1)  # (P, ..., G)
    best = ranked @ share.to(scores).T  # of the i-th lowest
    return torch.empty_like(best).scatter(-1, order, best).transpose(1, -1) + first


def set_reward_exact(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """R(S) in closed form for k = 2 and alpha = 1: the area under the upper envelope of m lines on [0, 1].
    The score of answer y under w = (u, 1 - u) is a line in u, so the maximum is linear between the points where two
    lines cross: sorted, trapezoids are exact. rewards (P, G, m, 2), mask (P, G, m) -> (P, G); else ValueError."""
    P, G, m, k = _check_rewards(rewards, mask)
    if k != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}: the closed form needs k = 2 objectives, not {k}"
        )
    exists = (
        torch.ones(P, G, m, dtype=torch.bool, device=rewards.device)
        if mask is None
        else mask.bool()
    )
    slope, offset = rewards[..., 0] - rewards[..., 1], rewards[..., 1]  # (P, G, m)
    crossing = (offset[..., None, :] - offset[..., None]) / (
        slope[..., None] - slope[..., None, :]
    )  # (P, G, m, m)
    ends = torch.tensor([0.0, 1.0], device=rewards.device, dtype=rewards.dtype).expand(P, G, 2)
    u = (
        torch.cat([crossing.nan_to_num(0.0).clamp(0, 1).flatten(2), ends], -1).sort(-1).values
    )  # (P, G, m*m + 2)
    lines = slope[..., None] * u[:, :, None] + offset[..., None]  # (P, G, m, m*m + 2)
    envelope = lines.masked_fill(~exists[..., None], -math.inf).amax(2)
    return torch.where(exists.any(-1), torch.trapezoid(envelope, u, dim=-1), 0.0)


def group_normalize(scores: Tensor, eps: float = 1e-6) -> Tensor:
    """A = (R - mean R) / (std R + eps) over each prompt's group, as in GRPO; population std; 0 where std < eps.
    scores (P, G) -> (P, G). Raises ValueError if G < 2: a group of one has nothing to be compared with."""
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(
            f"scores {tuple(scores.shape)}: expected (P, G) with G >= 2, one rollout cannot be normalised"
        )
    scores = (
        scores - scores[:, :1]
    )  # equal scores become exact zeros, so that rounding is never mistaken for signal
    centered = scores - scores.mean(1, keepdim=True)
    std = centered.square().mean(1, keepdim=True).sqrt()
    return torch.where(std < eps, 0.0, centered / (std + eps))


def vpo_advantage(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    objective_mask: Tensor | None = None,
    n_weights: int = 100,
    alpha: float = 1.0,
    sampler: str = "iid",
    floor: float = 0.0,
    subset: int = 1,
    generator: torch.Generator | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The family's advantage in one traceable routine: draw weightings, score, max, mean, normalise in the group.
    rewards (P, G, m, k), mask (P, G, m) of the answers that exist, objective_mask (P, k) of the objectives that a
    prompt has (the others get no weight) -> (P, G). subset = 1 is VPO, s > 1 forms sets of s rollouts (`subset_best`).
    The G rollouts of a prompt share its n_weights draws: only then do the draws' errors cancel in R_g - mean R.
    A rollout without answers scores `floor`, the least that a component of a reward can be, and stays in the group. A
    NaN or an infinity that reaches R makes its whole group's advantages NaN. Under torch.compile it is one graph; leave
    generator at None there (Dynamo cannot trace one), torch.manual_seed rules. Raises ValueError where shapes do not
    fit, G < 2, subset >= G, n_weights < 1, alpha out of range or the sampler is unknown."""
    P, _, _, k = _check_rewards(rewards, mask)
    log_weights = _log_weights(
        (P, n_weights), k, alpha, sampler, generator, rewards.device
    )  # (P, K, k)
    if objective_mask is not None:
        if objective_mask.shape != (P, k):
            raise ValueError(
                f"objective_mask {tuple(objective_mask.shape)}: expected (P, k) = ({P}, {k})"
            )
        absent = ~objective_mask.bool()
        rewards = rewards.masked_fill(absent[:, None, None], 0.0)
        absent = absent & ~absent.all(
            -1, keepdim=True
        )  # a prompt without any objective: its answers are alike
        # A Dirichlet that loses components and is renormalised is the Dirichlet of the others.
        log_weights = log_weights.masked_fill(absent[:, None], -math.inf)
    weights = (log_weights - log_weights.amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(
        -1, keepdim=True
    )  # a softmax, several times faster on a CPU for so few components
    return group_normalize(
        subset_best(set_scores(rewards, weights, mask, floor), subset).mean(-1), eps
    )


# The methods, one function each: (rewards (P, G, m, k), scalars (P, G, m), mask (P, G, m), options) -> (P, G).
# `scalars` are the task scalars of the answers, the worst possible one where there is none; `mask` says which answers
# exist and repeat no other of their rollout; options are vpo_advantage's keyword arguments, subset = None is its own.


def grpo(rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
    """GRPO (arXiv 2402.03300): the task scalar of the one answer, normalised in the group. ValueError if m > 1."""
    return group_normalize(_single(scalars, "grpo"))


def dr_grpo(rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): r - mean r, not divided by the deviation. ValueError if m > 1."""
    r = _single(scalars, "dr_grpo")
    return r - r.mean(1, keepdim=True)


def maxrl(
    rewards: Tensor,
    scalars: Tensor,
    mask: Tensor,
    *,
    floor: float = 0.0,
    eps: float = 1e-6,
    **options,
) -> Tensor:
    """MaxRL (arXiv 2602.02710): (r - mean r) / mean r, with r counted from the floor; 0 where all r are the floor.
    Meant for r in {0, 1}. ValueError if m > 1."""
    r = _single(scalars, "maxrl") - floor
    mean = r.mean(1, keepdim=True)
    return torch.where(mean.abs() < eps, 0.0, (r - mean) / (mean + eps))


def gdpo(
    rewards: Tensor,
    scalars: Tensor,
    mask: Tensor,
    *,
    objective_mask: Tensor | None = None,
    eps: float = 1e-6,
    **options,
) -> Tensor:
    """GDPO (arXiv 2601.05242): every objective normalised in the group, their sum over the batch of rollouts, not of
    tokens, so that long ones do not weigh more. ValueError if m > 1."""
    P, G, _, k = rewards.shape
    _single(scalars, "gdpo")
    each = group_normalize(rewards[:, :, 0].transpose(1, 2).reshape(P * k, G)).view(P, k, G)
    if objective_mask is not None:
        each = each.masked_fill(~objective_mask.bool()[..., None], 0.0)
    return group_normalize(each.sum(1).view(1, P * G)).view(P, G)


def max_at_k(
    rewards: Tensor, scalars: Tensor, mask: Tensor, *, subset: int | None = None, **options
) -> Tensor:
    """Max@K (arXiv 2510.23393): the scalar of the best in subsets of the group, normalised. ValueError if m > 1."""
    return group_normalize(
        subset_best(_single(scalars, "max_at_k"), subset or half_of(scalars.shape[1]))
    )


def random_weighting(rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
    """Random weighting (arXiv 2605.22817, baselines): w . r under one w per prompt and step, which nobody is told."""
    _single(scalars, "random_weighting")
    return vpo_advantage(rewards, mask, **options | {"n_weights": 1, "subset": 1, "sampler": "iid"})


def goal_conditioned(rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
    """Goal-conditioned (arXiv 2605.22817, baselines): random weighting with w written into the prompt (train.ask)."""
    return random_weighting(rewards, scalars, mask, **options)


def multi_rlvr(rewards: Tensor, scalars: Tensor, mask: Tensor, **options) -> Tensor:
    """Multi-RLVR (arXiv 2605.22817, baselines): the sum of all m answers' task scalars, equal ones too, normalised."""
    return group_normalize(scalars.sum(-1))


def vpo(
    rewards: Tensor, scalars: Tensor, mask: Tensor, *, subset: int | None = None, **options
) -> Tensor:
    """VPO (arXiv 2605.22817): the expected best answer under random weightings, normalised in the group."""
    return vpo_advantage(rewards, mask, subset=subset or 1, **options)


def group_vpo(
    rewards: Tensor, scalars: Tensor, mask: Tensor, *, subset: int | None = None, **options
) -> Tensor:
    """Group VPO (ours): VPO with the set across the rollouts of the group, one answer in each."""
    return vpo_advantage(rewards, mask, subset=subset or half_of(rewards.shape[1]), **options)


def half_of(G: int) -> int:
    """s of Max@K and Group VPO where none is given: half the group, at least two."""
    return max(2, G // 2)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    method.__name__: method
    for method in (
        grpo,
        dr_grpo,
        maxrl,
        gdpo,
        max_at_k,
        random_weighting,
        goal_conditioned,
        multi_rlvr,
        vpo,
        group_vpo,
    )
}
SINGLE_ANSWER = set(ADVANTAGES) - {"multi_rlvr", "vpo"}


def answers_per_rollout(method: str, m: int) -> int:
    """m, or 1 for the methods whose rollouts hold one answer whatever m is."""
    return 1 if method in SINGLE_ANSWER else m


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    n_tokens: int | Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    clip: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip with dual clip and the k3 estimate of KL(policy || reference) as a loss term (paper, training details).
    logprobs, old_logprobs, ref_logprobs (B, T) in nats of the sampled tokens; advantages (B,); mask (B, T) of the
    sampled tokens; n_tokens is the token count of the WHOLE batch, so that micro-batches add up to the same gradient.
    Returns the scalar loss and its metrics: sums over these tokens divided by n_tokens, without gradient:
    policy_loss, kl (nats per token), clip_fraction (share of tokens whose gradient is clipped away)."""
    A = advantages[:, None]
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    ratio = log_ratio.clamp_max(
        80
    ).exp()  # finite: an advantage of 0 stays a loss of 0, with a gradient of 0
    unclipped, clipped = -A * ratio, -A * ratio.clamp(1 - clip, 1 + clip)
    token_loss = torch.maximum(unclipped, clipped)
    token_loss = torch.where(A < 0, torch.minimum(token_loss, -A * dual_clip), token_loss)
    policy = token_loss.masked_fill(~mask, 0.0).sum() / n_tokens
    is_clipped = (clipped > unclipped) | ((A < 0) & (ratio > dual_clip))
    metrics = {
        "policy_loss": policy.detach(),
        "clip_fraction": (is_clipped & mask).sum() / n_tokens,
    }
    if ref_logprobs is None:
        return policy, metrics
    log_ratio = (ref_logprobs - logprobs).masked_fill(~mask, 0.0)
    kl = (log_ratio.exp() - log_ratio - 1).sum() / n_tokens
    return policy + kl_coef * kl, metrics | {"kl": kl.detach()}


def _single(scalars: Tensor, method: str) -> Tensor:
    """The scalars (P, G) of the only answers; ValueError if there are several."""
    if scalars.shape[-1] != 1:
        raise ValueError(
            f"{method} takes one answer per rollout, not m = {scalars.shape[-1]}; vpo takes several"
        )
    return scalars[..., 0]


def _check_rewards(rewards: Tensor, mask: Tensor | None) -> torch.Size:
    """The shape (P, G, m, k) of the rewards; ValueError if they or the mask have another."""
    if rewards.ndim != 4 or 0 in rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)}: expected (P, G, m, k), none of them 0")
    if mask is not None and mask.shape != rewards.shape[:3]:
        raise ValueError(
            f"mask {tuple(mask.shape)}: expected (P, G, m) = {tuple(rewards.shape[:3])}"
        )
    return rewards.shape


def _log_weights(
    shape: tuple[int, int],
    k: int,
    alpha: float,
    sampler: str,
    generator: torch.Generator | None,
    device: torch.device | str | None,
) -> Tensor:
    """Logarithms of unnormalised Dirichlet weights, (P, K, k): in logarithms no small alpha underflows."""
    P, K = shape
    if K < 1 or k < 1:
        raise ValueError(f"n_weights = {K}, objectives k = {k}: both must be at least 1")
    if not ALPHAS[0] <= alpha <= ALPHAS[1]:
        raise ValueError(
            f"alpha = {alpha}: must be {ALPHAS[0]:g} to {ALPHAS[1]:g}; 1 is uniform on the simplex"
        )
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler = {sampler!r}: unknown; choose from {', '.join(SAMPLERS)}")
    if device is None and generator is not None:
        device = generator.device
    if sampler == "sobol":
        if alpha == 1:  # the gaps between k - 1 sorted uniforms are uniform on the simplex
            cuts = _sobol(P, K, k - 1, generator, device).sort(-1).values
            edges = (
                torch.nn.functional.pad(cuts, (1, 0), value=0.0),
                torch.nn.functional.pad(cuts, (0, 1), value=1.0),
            )
            return (edges[1] - edges[0]).log().clamp_min(-40)
        return _log_gamma_quantile(_sobol(P, K, k, generator, device).double(), alpha).float()
    log_uniform = (
        (torch.randint(2**BITS, (P, K, k), generator=generator, device=device) + 0.5) / 2**BITS
    ).log()
    if alpha == 1:
        return log_uniform.neg().log()
    # Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha) in distribution, and Gamma(alpha + 1) never comes near 0.
    gamma = torch._standard_gamma(
        torch.full((P, K, k), alpha + 1.0, device=device), generator=generator
    )
    return gamma.log() + log_uniform / alpha


@functools.lru_cache(maxsize=64)
@torch.compiler.assume_constant_result
def _sobol_net(K: int, d: int) -> Tensor:
    """The first K points of one scrambled Sobol net in d dimensions, as integers in [0, 2^23), (K, d)."""
    return (
        torch.quasirandom.SobolEngine(d, scramble=True, seed=0).draw(K, dtype=torch.float64)
        * 2**BITS
    ).long()


def _sobol(
    P: int, K: int, d: int, generator: torch.Generator | None, device: torch.device | str | None
) -> Tensor:
    """P randomised copies (P, K, d) of a Sobol net in (0, 1): a random digital shift (xor) keeps it a net."""
    if d == 0:
        return torch.empty(P, K, 0, device=device)
    shift = torch.randint(2**BITS, (P, 1, d), generator=generator, device=device)
    return ((_sobol_net(K, d).to(shift.device) ^ shift) + 0.5) / 2**BITS


def _log_gamma_quantile(p: Tensor, alpha: float) -> Tensor:
    """log x with P(Gamma(alpha) < x) = p, by Newton's method on t = log x; p (...) in (0, 1), float64.
    log P(alpha, e^t) is concave and lies below its asymptote alpha t - lgamma(alpha + 1), so the steps rise to the root
    from the left. Far down (t < -30) the asymptote is the answer; for a large alpha it lies where the cdf vanishes, so
    the start is raised to Wilson and Hilferty's quantile at 7 standard deviations below the mean."""
    start = (p.log() + math.lgamma(alpha + 1)) / alpha
    cube_root = max(1 - 1 / (9 * alpha) - 7 / (3 * math.sqrt(alpha)), 1e-9)
    a, t = (
        torch.full_like(p, alpha),
        start.clamp_min(max(-30.0, math.log(alpha) + 3 * math.log(cube_root))),
    )
    for _ in range(40):
        cdf = torch.special.gammainc(a, t.exp())
        slope = (alpha * t - t.exp() - math.lgamma(alpha) - cdf.log()).exp()  # d log P / dt
        t = t + (p.log() - cdf.log()) / slope
    return torch.where(start < -30.0, start, t)
