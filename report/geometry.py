"""What a start model's rollouts say of a reward vector: how many objectives it has in effect, and do they conflict?"""

import torch
from torch import Tensor


def geometry(rewards: Tensor, exists: Tensor, scalars: Tensor, G: int) -> dict[str, float]:
    """Measures of rewards (N, n, k), of the objectives that exist (N, k), with task scalars (N, n), in groups of G. The
    first two look at the covariance C of the quarter of answers best by the scalar, which training makes frequent:

    unseen      share of their variance that their mean over the objectives does not see, 1 - 1'C1 / (k tr C)
    effective   participation ratio (tr C)^2 / tr C^2: 1 if all objectives move as one
    scalar      share of groups whose task scalars differ: where GRPO learns
    vector      share of groups whose reward vectors differ: where VPO can learn"""
    N, n, k = rewards.shape
    best = scalars.argsort(dim=1, descending=True, stable=True)[:, : max(2, n // 4)]
    best = rewards.gather(1, best[..., None].expand(-1, -1, k)).double()  # (N, n / 4, k)
    C = torch.stack(
        [centred.T @ centred for centred in best - best.mean(1, keepdim=True)]
    )  # (N, k, k)
    sizes = exists.sum(1)
    if exists.all():  # else objectives of different problems have nothing in common
        C, sizes = C.sum(0, keepdim=True), sizes[:1]
    trace, square = C.diagonal(dim1=1, dim2=2).sum(1), C.square().sum((1, 2))
    groups = rewards[:, : n - n % G].reshape(-1, G, k)
    return {
        "unseen": (1 - C.sum((1, 2)) / (sizes * trace))[trace > 1e-12]
        .mean()
        .nan_to_num(0.0)
        .item(),
        "effective": (trace.square() / square)[trace > 1e-12].mean().nan_to_num(0.0).item(),
        "scalar": (scalars[:, : n - n % G].reshape(-1, G).std(1) > 1e-6).float().mean().item(),
        "vector": (groups != groups[:, :1]).any(2).any(1).float().mean().item(),
    }


def correlations(rewards: Tensor) -> Tensor:
    """Correlation of the objectives around each problem's mean: rewards (N, n, k) -> (k, k); NaN for a constant one."""
    return torch.corrcoef((rewards - rewards.mean(1, keepdim=True)).flatten(0, 1).T).reshape(
        rewards.shape[-1], -1
    )


def verdict(measures: dict[str, float]) -> str:
    if measures["vector"] < 0.05:
        return (
            "Hardly any group has a signal: no method will learn. Start from a model that solves more, take easier "
            "problems, or a larger group."
        )
    if measures["unseen"] < 0.2:
        return (
            "The objectives rise and fall together: expect VPO to do what GRPO does, or a little worse. Keep the "
            "scalar; Max@K if you will search."
        )
    return (
        "Good answers trade one objective for another: expect a vector to keep what a scalar averages away, at a "
        "loss at k = 1 and a gain at large k."
    )


def describe(
    rewards: Tensor, exists: Tensor, scalars: Tensor, G: int, objectives: tuple[str, ...]
) -> str:
    """All of it as text, with the correlation matrix where the objectives have names."""
    measures, lines = geometry(rewards, exists, scalars, G), []
    if objectives:
        width = max(map(len, objectives)) + 2
        lines = [" " * width + "".join(f"{name:>{width}}" for name in objectives)]
        for name, row in zip(objectives, correlations(rewards).tolist(), strict=True):
            lines.append(
                f"{name:{width}}"
                + "".join(f"{value:{width}.2f}".replace("nan", "  -") for value in row)
            )
    lines += [
        f"unseen by the scalar: {measures['unseen']:.0%} of the variance among the better quarter of the answers",
        f"effective number of objectives there: {measures['effective']:.2f} of {exists.sum(1).max()}",
        f"groups of {G} with a signal: {measures['scalar']:.0%} for a scalar, {measures['vector']:.0%} for a "
        "vector",
        verdict(measures),
    ]
    return "\n".join(lines)
