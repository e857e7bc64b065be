"""The algorithm of Vector Policy Optimization (arXiv 2605.22817): pure tensor functions.

    w_1..w_K ~ Dirichlet(alpha)              sample_weights     once per prompt, shared by its G rollouts
    u_j(g) = max_{y in S} w_j . r(y)         set_scores         S = the m answers of rollout g
    R_g = 1/K sum_j u_j(g)                   set_reward
    A_g = (R_g - mean R) / (std R + eps)     group_normalize    over the G rollouts of one prompt
    loss = PPO-clip(A) + c KL(pi || ref)     policy_loss        mean over all sampled tokens

Letters in shapes: P prompts, G rollouts per prompt (the group), m answers per rollout,
k objectives (components of a reward vector), K preference weights, T tokens.

Four methods form one family. They differ in what a set S is and in its utility:

    GRPO        one rollout with one answer        the task scalar (by default the mean of r)
    Max@K       s rollouts of the group            the best task scalar in the set
    VPO         the m answers of one rollout       the best w . r in the set, averaged over w
    Group VPO   s rollouts of the group            the best w . r in the set, averaged over w

Group VPO is not in the paper. It is max@k applied under each random weighting: a set-RL objective
(arXiv 2509.25424) with f(S) = E_w max w . r. We know of no publication of this combination. `subset_best`
forms the sets of s rollouts. Every token of a rollout gets the rollout's advantage, whichever of its
answers it belongs to.

E_w max w . r is known elsewhere as the R2 indicator with linear utilities. It is a monotone submodular
function of the set. An answer that is best under no linear utility, because it lies inside the convex hull
of the others' rewards, adds nothing to it.

docs/reference.md lists the departures from the paper and its official code.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

SAMPLERS = ("iid", "sobol")
ALPHAS = (1e-6, 1e6)  # beyond, every w is a corner or the centre of the simplex in float32
EPS = 1e-6  # a group whose standard deviation is smaller has no signal
UNIFORM_BITS = 23  # float32 holds (i + 0.5) / 2^23 exactly, so a draw is never 0 or 1


def sample_weights(
    n: int,
    k: int,
    *,
    alpha: float = 1.0,
    sampler: str = "iid",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw n preference weights over k objectives, w ~ Dirichlet(alpha).

    `vpo_advantage` draws those of P prompts at once, in the same way.

    Args:
        alpha: 1 is uniform on the simplex, less favours its corners, more its centre.
        sampler: `iid` draws independently. `sobol` takes a scrambled low-discrepancy net and needs
            alpha = 1.
        generator: the weights are on its device. None: torch's default one, on the CPU.

    Returns:
        (n, k), non-negative, every row sums to 1.

    Raises:
        ValueError: n < 1, k < 1, alpha out of range, or the sampler is unknown.
    """
    device = generator.device if generator else None
    log_weights = _log_weights((1, n, k), alpha, sampler, generator, device)  # (1, n, k)
    return log_weights[0].softmax(-1)


def set_scores(
    rewards: Tensor,
    weights: Tensor,
    answer_mask: Tensor | None = None,
    missing_answer_reward: float = 0.0,
) -> Tensor:
    """The utility of every rollout's best answer: u_j(g) = max_{y in S} w_j . r(y).

    Args:
        rewards: (P, G, m, k) reward vectors.
        weights: (P, K, k) preference weights of each prompt.
        answer_mask: (P, G, m) bool, False on a missing answer. A repeated answer may be True or
            False, because it cannot raise the maximum.
        missing_answer_reward: the utility of a rollout without answers. Give the least that a
            component of a reward can be, so that silence never beats an answer.

    Returns:
        (P, G, K).

    Raises:
        ValueError: the shapes do not fit.
    """
    P, G, m, k = _check_rewards(rewards, answer_mask)
    if weights.ndim != 3 or weights.shape[0] != P or weights.shape[2] != k:
        raise ValueError(
            f"weights {tuple(weights.shape)}: expected (P, K, k) = ({P}, K, {k}) to fit the rewards"
        )
    answers = rewards.float().reshape(P, G * m, k)
    utilities = torch.bmm(answers, weights.float().mT)  # (P, G * m, K)
    utilities = utilities.reshape(P, G, m, -1)  # (P, G, m, K)
    if answer_mask is None:
        return utilities.amax(2)
    answer_mask = answer_mask.bool()
    best = utilities.masked_fill(~answer_mask[..., None], -math.inf).amax(2)  # (P, G, K)
    return torch.where(answer_mask.any(-1, keepdim=True), best, missing_answer_reward)


def set_reward(
    rewards: Tensor,
    weights: Tensor,
    answer_mask: Tensor | None = None,
    missing_answer_reward: float = 0.0,
) -> Tensor:
    """R_g = 1/K sum_j u_j(g), (P, G): the mean over w is outside, the max over answers inside.

    Two specialists, r = (1, 0) and (0, 1), are worth E max(w_1, w_2) = 3/4 together. Two equal
    compromises, r = (1/2, 1/2), are worth 1/2. With the mean inside both sets would be worth 1/2.

    `vpo_advantage` takes the same two steps, and forms sets of rollouts in between.

    The arguments are those of `set_scores`.
    """
    return set_scores(rewards, weights, answer_mask, missing_answer_reward).mean(-1)


def set_reward_exact(rewards: Tensor) -> Tensor:
    """R in closed form, for k = 2 objectives and alpha = 1.

    The utility of an answer under w = (u, 1 - u) is a line in u. The best of m answers is the upper
    envelope of m lines, and R is the area under it on [0, 1]. The envelope is straight between the
    points where two lines cross, so the trapezoidal rule is exact. Training samples R instead: this is
    a check.

    Args:
        rewards: (P, G, m, 2).

    Returns:
        (P, G).

    Raises:
        ValueError: k is not 2.
    """
    P, G, _, k = _check_rewards(rewards)
    if k != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}: the closed form needs k = 2 objectives, not {k}"
        )
    offset = rewards[..., 1]  # (P, G, m)
    slope = rewards[..., 0] - offset  # (P, G, m)
    rise = offset[..., None, :] - offset[..., None]  # (P, G, m, m)
    run = slope[..., None] - slope[..., None, :]
    crossings = (rise / run).nan_to_num(0.0).clamp(0, 1).flatten(2)  # (P, G, m * m)
    ends = torch.tensor([0.0, 1.0], device=rewards.device, dtype=rewards.dtype).expand(P, G, 2)
    u = torch.cat([crossings, ends], -1).sort(-1).values  # (P, G, m * m + 2)
    lines = slope[..., None] * u[:, :, None] + offset[..., None]  # (P, G, m, m * m + 2)
    return torch.trapezoid(lines.amax(2), u, dim=-1)


def subset_best(scores: Tensor, s: int) -> Tensor:
    """B(g): the best score in a subset of s rollouts, averaged over all subsets that contain g.

    As the reward of g it maximises the expected best of s rollouts (arXiv 2505.15201, 2510.23393). The
    average is exact: sort the group and count ranks from 0. Of the C(G-1, s-1) subsets that contain rank
    i, rank i is the best of C(i, s-1), and a higher rank j is the best of C(j-1, s-2).

    Centring B in the group is a leave-one-out baseline, so the gradient is unbiased up to a constant
    factor: B(g) - mean B = (1 - s/G) (B(g) - the mean of the best over the s-subsets without g).

    Args:
        scores: (P, G, ...).
        s: rollouts per subset, 1 <= s < G; 1 changes nothing.

    Returns:
        The same shape as `scores`.

    Raises:
        ValueError: s is out of range. A subset as large as the group gives every rollout the same.
    """
    if s == 1:
        return scores
    G = scores.shape[1]
    if not 1 <= s < G:
        raise ValueError(
            f"subset s = {s}: must be 1 to {G - 1}; as large as the group, G = {G}, it carries no signal"
        )
    # C(i, s-1) / C(G-1, s-1) and C(j-1, s-2) / C(G-1, s-1). In logarithms they cannot overflow. Both
    # are ratios of permutations, C(n, c) c!: in the first (s-1)! cancels, in the second s - 1 is left.
    rank = torch.arange(G, dtype=torch.float64)
    log_all = _log_permutations(rank[-1], s - 1)
    own = (_log_permutations(rank, s - 1) - log_all).exp()  # (G)
    higher = (s - 1) * (_log_permutations(rank - 1, s - 2) - log_all).exp()  # (G), NaN at rank 0
    # Row i: how often each rank is the best. Ranks above i alone count, so triu drops the NaN, too.
    share = own.diag() + higher.expand(G, G).triu(1)  # (G, G)

    first = scores[:, :1]  # subtracted so that equal scores stay equal after rounding
    ranked, order = (scores - first).transpose(1, -1).contiguous().sort(-1)  # (P, ..., G)
    best_by_rank = ranked @ share.to(scores).T
    best = torch.empty_like(best_by_rank).scatter(-1, order, best_by_rank)
    return best.transpose(1, -1) + first


def group_normalize(scores: Tensor, eps: float = EPS) -> Tensor:
    """A_g = (R_g - mean R) / (std R + eps) over each prompt's group, as in GRPO.

    Args:
        scores: (P, G).
        eps: groups whose population standard deviation is smaller get advantages of exactly 0.

    Returns:
        (P, G).

    Raises:
        ValueError: G < 2. A group of one has nothing to be compared with.
    """
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(
            f"scores {tuple(scores.shape)}: expected (P, G) with G >= 2, one rollout cannot be normalised"
        )
    scores = scores - scores[:, :1]  # equal scores become exact zeros, not rounding noise
    centered = scores - scores.mean(1, keepdim=True)
    std = centered.square().mean(1, keepdim=True).sqrt()
    return torch.where(std < eps, 0.0, centered / (std + eps))


def vpo_advantage(  # noqa: PLR0913 - the public estimator: every argument is one symbol of the paper
    rewards: Tensor,
    answer_mask: Tensor | None = None,
    *,
    objective_mask: Tensor | None = None,
    n_weights: int = 100,
    alpha: float = 1.0,
    sampler: str = "iid",
    missing_answer_reward: float = 0.0,
    subset: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The advantage of VPO, and of Group VPO where subset > 1.

    The G rollouts of a prompt share its preference weights. Only then do the errors of the random
    weights cancel in R_g - mean R. A NaN in a reward makes its whole group's advantages NaN. Under
    torch.compile the function is one graph; leave `generator` at None there.

    Args:
        rewards: (P, G, m, k) reward vectors.
        answer_mask: (P, G, m) bool, see `set_scores`.
        objective_mask: (P, k) bool, which objectives a prompt has. The others get no weight.
        n_weights: K, preference weights per prompt.
        alpha: of their Dirichlet distribution.
        sampler: of `sample_weights`.
        missing_answer_reward: the utility of a rollout without answers, see `set_scores`.
        subset: s, rollouts that form a set together, with all their answers. 1 is VPO.
        generator: of the preference weights, on the device of `rewards`. None: torch's default one.

    Returns:
        (P, G).

    Raises:
        ValueError: shapes do not fit, G < 2, subset >= G, or an argument of `sample_weights` is wrong.
    """
    P, _, _, k = _check_rewards(rewards, answer_mask)
    # `sample_weights` for P prompts. It is done in logarithms, so that absent objectives can be left out.
    log_weights = _log_weights((P, n_weights, k), alpha, sampler, generator, rewards.device)
    if objective_mask is not None:
        rewards, log_weights = _without_absent(rewards, log_weights, objective_mask)
    weights = (log_weights - log_weights.amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(-1, keepdim=True)  # (P, K, k), faster than softmax on a CPU

    utilities = set_scores(rewards, weights, answer_mask, missing_answer_reward)  # (P, G, K)
    utilities = subset_best(utilities, subset)  # (P, G, K), unchanged if subset = 1
    set_rewards = utilities.mean(-1)  # (P, G)
    return group_normalize(set_rewards)  # (P, G)


# One function per method: (rewards (P, G, m, k), scalars (P, G, m), answer_mask (P, G, m)) -> (P, G).
#   scalars       the task scalars of the answers
#   answer_mask   True on the first of equal answers of a rollout, False on a repeated or missing one
#   options       the keyword arguments of `vpo_advantage`; a method ignores those that it does not need
# subset = None stands for the method's own default.


def grpo(rewards: Tensor, scalars: Tensor, answer_mask: Tensor, **options) -> Tensor:
    """GRPO (arXiv 2402.03300): the task scalar, normalised in the group."""
    return group_normalize(_single(scalars, "grpo"))


def dr_grpo(rewards: Tensor, scalars: Tensor, answer_mask: Tensor, **options) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): r - mean r, not divided by the standard deviation."""
    r = _single(scalars, "dr_grpo")
    return r - r.mean(1, keepdim=True)


def maxrl(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    missing_answer_reward: float = 0.0,
    **options,
) -> Tensor:
    """MaxRL (arXiv 2602.02710): (r - mean r) / mean r, meant for r in {0, 1}, here with the task scalar.

    r is counted from `missing_answer_reward`. The advantages are 0 where the mean is.
    """
    r = _single(scalars, "maxrl") - missing_answer_reward
    mean = r.mean(1, keepdim=True)
    return torch.where(mean.abs() < EPS, 0.0, (r - mean) / (mean + EPS))


def gdpo(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    objective_mask: Tensor | None = None,
    **options,
) -> Tensor:
    """GDPO (arXiv 2601.05242): normalise each objective in the group, add them up, normalise over the batch.

    The batch is one of rollouts, not of tokens, so that long rollouts do not weigh more.
    """
    P, G, _, k = rewards.shape
    _single(scalars, "gdpo")
    by_objective = rewards[:, :, 0].transpose(1, 2)  # (P, k, G)
    normalized = group_normalize(by_objective.reshape(P * k, G)).view(P, k, G)
    if objective_mask is not None:
        normalized = normalized.masked_fill(~objective_mask.bool()[..., None], 0.0)
    total = normalized.sum(1)  # (P, G)
    return group_normalize(total.view(1, P * G)).view(P, G)


def max_at_k(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    subset: int | None = None,
    **options,
) -> Tensor:
    """Max@K (arXiv 2510.23393, 2505.15201): the best task scalar in subsets of the group, normalised."""
    r = _single(scalars, "max_at_k")
    return group_normalize(subset_best(r, subset or default_subset(r.shape[1])))


def random_weighting(rewards: Tensor, scalars: Tensor, answer_mask: Tensor, **options) -> Tensor:
    """Random weighting (arXiv 2605.22817, baselines): w . r under one w per prompt and step."""
    _single(scalars, "random_weighting")
    options |= {"n_weights": 1, "subset": 1, "sampler": "iid"}
    return vpo_advantage(rewards, answer_mask, **options)


def goal_conditioned(rewards: Tensor, scalars: Tensor, answer_mask: Tensor, **options) -> Tensor:
    """Goal-conditioned (arXiv 2605.22817, baselines): random weighting, and the prompt tells w.

    `train.build_batch` writes w into the prompt. It seeds its generator as `train.step_advantages` does
    and draws one w for each prompt, so it is the same w.
    """
    return random_weighting(rewards, scalars, answer_mask, **options)


def multi_rlvr(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    missing_answer_reward: float = 0.0,
    **options,
) -> Tensor:
    """Multi-RLVR (arXiv 2605.22817, baselines): the sum of the task scalars of the distinct answers.

    The paper sums over all m answers. Its official code pays nothing for an answer that repeats
    an earlier one, and so does this function: a repeated answer is worth as much as a missing one.
    """
    paid = torch.where(answer_mask.bool(), scalars, missing_answer_reward)  # (P, G, m)
    return group_normalize(paid.sum(-1))


def vpo(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    subset: int | None = None,
    **options,
) -> Tensor:
    """VPO (arXiv 2605.22817): `vpo_advantage`, as a method beside the others."""
    return vpo_advantage(rewards, answer_mask, subset=subset or 1, **options)


def group_vpo(
    rewards: Tensor,
    scalars: Tensor,
    answer_mask: Tensor,
    *,
    subset: int | None = None,
    **options,
) -> Tensor:
    """Group VPO (ours): the sets are formed across the group's rollouts, which hold one answer each.

    Under each w a rollout is paid the mean utility of all sets of s rollouts that contain it.
    """
    return vpo_advantage(
        rewards, answer_mask, subset=subset or default_subset(rewards.shape[1]), **options
    )


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "max_at_k": max_at_k,
    "random_weighting": random_weighting,
    "goal_conditioned": goal_conditioned,
    "multi_rlvr": multi_rlvr,
    "vpo": vpo,
    "group_vpo": group_vpo,
}
SEVERAL_ANSWERS = ("multi_rlvr", "vpo")  # the methods whose rollouts hold m answers


def answers_per_rollout(method: str, m: int) -> int:
    """m for the methods whose rollouts hold several answers, 1 for the others."""
    return m if method in SEVERAL_ANSWERS else 1


def default_subset(G: int) -> int:
    """The default s of Max@K and Group VPO in a group of G rollouts: half of it, at least two."""
    return max(2, G // 2)


def policy_loss(  # noqa: PLR0913 - the public loss: every argument is one symbol of the paper
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    n_tokens: int | Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    clip: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip with dual clip, plus kl_coef times an estimate of KL(policy || reference policy).

    `train.train_step` makes one update per batch of rollouts, so its ratios are 1 up to rounding and
    nothing is clipped. The clips are for trainers that make several. Dual clip (arXiv 1912.09729) bounds
    the loss where the advantage is negative. The estimate of KL, called k3, is x - log x - 1 with
    x = reference / policy.

    Args:
        logprobs, old_logprobs, ref_logprobs: (B, T) of the sampled tokens, in nats.
        advantages: (B,).
        token_mask: (B, T) bool, which tokens were sampled. A row may have none.
        n_tokens: sampled tokens in the WHOLE batch, so that micro-batches add up to one gradient.

    Returns:
        The scalar loss, and metrics without gradient, sums over these tokens divided by n_tokens:
        policy_loss, clip_fraction (tokens whose gradient is clipped away), kl (nats per token).
    """
    A = advantages[:, None]
    log_ratio = (logprobs - old_logprobs).masked_fill(~token_mask, 0.0)
    ratio = log_ratio.clamp_max(80).exp()  # finite, so that an advantage of 0 gives a loss of 0
    unclipped = -A * ratio
    clipped = -A * ratio.clamp(1 - clip, 1 + clip)
    token_loss = torch.maximum(unclipped, clipped)
    token_loss = torch.where(A < 0, torch.minimum(token_loss, -A * dual_clip), token_loss)
    loss = token_loss.masked_fill(~token_mask, 0.0).sum() / n_tokens

    is_clipped = (clipped > unclipped) | ((A < 0) & (ratio > dual_clip))
    clip_fraction = (is_clipped & token_mask).sum() / n_tokens
    metrics = {"policy_loss": loss.detach(), "clip_fraction": clip_fraction}
    if ref_logprobs is None:
        return loss, metrics
    log_x = (ref_logprobs - logprobs).masked_fill(~token_mask, 0.0)
    kl = (log_x.exp() - log_x - 1).sum() / n_tokens
    metrics["kl"] = kl.detach()
    return loss + kl_coef * kl, metrics


# A first reading can stop here.


def _single(scalars: Tensor, method: str) -> Tensor:
    """The task scalars (P, G) of rollouts that hold one answer each."""
    if scalars.shape[-1] != 1:
        raise ValueError(
            f"{method} takes one answer per rollout, not m = {scalars.shape[-1]}; vpo takes several"
        )
    return scalars[..., 0]


def _check_rewards(rewards: Tensor, answer_mask: Tensor | None = None) -> torch.Size:
    """The shape (P, G, m, k) of the rewards. Raises ValueError if they or the mask have another.

    Raises TypeError for what is no tensor, such as a numpy array.
    """
    for name, value in (("rewards", rewards), ("answer_mask", answer_mask)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{name}: expected a torch.Tensor, not {type(value).__name__}; take torch.as_tensor"
            )
    if rewards.ndim != 4 or 0 in rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)}: expected (P, G, m, k), none of them 0")
    if answer_mask is not None and answer_mask.shape != rewards.shape[:3]:
        raise ValueError(
            f"answer_mask {tuple(answer_mask.shape)}: expected (P, G, m) = {tuple(rewards.shape[:3])}"
        )
    return rewards.shape


def _without_absent(
    rewards: Tensor, log_weights: Tensor, objective_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards (P, G, m, k) and log weights (P, K, k) without the objectives that a prompt lacks."""
    P, _, _, k = rewards.shape
    if objective_mask.shape != (P, k):
        raise ValueError(
            f"objective_mask {tuple(objective_mask.shape)}: expected (P, k) = ({P}, {k})"
        )
    absent = ~objective_mask.bool()  # (P, k), for instance of a program with fewer tests
    rewards = rewards.masked_fill(absent[:, None, None], 0.0)
    # A Dirichlet that loses some components and is rescaled is the Dirichlet of the others.
    # A prompt without any objective keeps all weights: its answers earn 0 under each.
    no_weight = absent & ~absent.all(-1, keepdim=True)
    return rewards, log_weights.masked_fill(no_weight[:, None], -math.inf)


def _log_permutations(n: Tensor, c: int) -> Tensor:
    """log n! / (n - c)! elementwise: C(n, c) times c!."""
    return torch.lgamma(n + 1) - torch.lgamma(n - c + 1)


def _log_weights(
    shape: tuple[int, int, int],
    alpha: float,
    sampler: str,
    generator: torch.Generator | None,
    device: torch.device | str | None,
) -> Tensor:
    """Logarithms of unnormalised Dirichlet weights (P, K, k). In logarithms no small alpha underflows."""
    _, K, k = shape
    if K < 1 or k < 1:
        raise ValueError(f"n_weights = {K}, objectives k = {k}: both must be at least 1")
    if not ALPHAS[0] <= alpha <= ALPHAS[1]:
        raise ValueError(
            f"alpha = {alpha}: must be {ALPHAS[0]:g} to {ALPHAS[1]:g}; 1 is uniform on the simplex"
        )
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler = {sampler!r}: unknown; choose from {', '.join(SAMPLERS)}")
    if sampler == "sobol" and alpha != 1:
        raise ValueError(f"alpha = {alpha}: sampler = 'sobol' needs alpha = 1; take 'iid'")
    if sampler == "sobol":
        return _log_sobol_weights(shape, generator, device)
    draws = torch.randint(2**UNIFORM_BITS, shape, generator=generator, device=device)
    log_uniform = ((draws + 0.5) / 2**UNIFORM_BITS).log()
    if alpha == 1:
        return log_uniform.neg().log()  # -log U is exponential, which is Gamma(1)
    # In distribution Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha), and Gamma(alpha + 1) is never near 0.
    concentration = torch.full(shape, alpha + 1.0, device=device)
    gamma = torch._standard_gamma(concentration, generator=generator)
    return gamma.log() + log_uniform / alpha


def _log_sobol_weights(
    shape: tuple[int, int, int],
    generator: torch.Generator | None,
    device: torch.device | str | None,
) -> Tensor:
    """Log weights (P, K, k) uniform on the simplex: the gaps between k - 1 sorted uniforms."""
    P, K, k = shape
    if k == 1:
        return torch.zeros(shape, device=device)
    # A random digital shift (xor) of a net is a net. Every prompt gets its own.
    shift = torch.randint(2**UNIFORM_BITS, (P, 1, k - 1), generator=generator, device=device)
    points = _sobol_net(K, k - 1).to(shift.device) ^ shift  # (P, K, k - 1)
    cuts = ((points + 0.5) / 2**UNIFORM_BITS).sort(-1).values
    left = torch.nn.functional.pad(cuts, (1, 0), value=0.0)  # (P, K, k)
    right = torch.nn.functional.pad(cuts, (0, 1), value=1.0)
    return (right - left).log().clamp_min(-40)  # two cuts may coincide


@functools.lru_cache(maxsize=64)
@torch.compiler.assume_constant_result
def _sobol_net(K: int, d: int) -> Tensor:
    """The first K points of one scrambled Sobol net in d dimensions, (K, d), integers in [0, 2^23)."""
    net = torch.quasirandom.SobolEngine(d, scramble=True, seed=0)
    return (net.draw(K, dtype=torch.float64) * 2**UNIFORM_BITS).long()
