"""What rollouts earned, on its way through another trainer: as a text, put together again, as advantages."""

import json

import torch
from torch import Tensor
from torch.nn.functional import pad

from vpo import ADVANTAGES, Options, Scored


def in_groups(parts: list[Scored], G: int) -> Scored:
    """The rollouts of several parts, a `Scored` (B, 1, m, d) of each, as P groups: (P, G, m, d).

    The rollouts of a group stand side by side. Parts may differ in m and d.
    """
    m = max(part.vectors.shape[2] for part in parts)
    d = max(part.vectors.shape[3] for part in parts)
    vectors = torch.cat([widened(part.vectors, m, d) for part in parts])
    objective_mask = torch.cat([widened(part.objective_mask, d) for part in parts])  # (P * G, d)
    missing_scalar = torch.cat([part.missing_scalar for part in parts])  # (P * G, 1)
    return Scored(
        vectors.view(-1, G, m, d),
        torch.cat([widened(part.scalars, m) for part in parts]).view(-1, G, m),
        torch.cat([widened(part.answer_mask, m) for part in parts]).view(-1, G, m),
        torch.cat([widened(part.repeat_mask, m) for part in parts]).view(-1, G, m),
        objective_mask.view(-1, G, d)[:, 0],
        missing_scalar.view(-1, G)[:, :1],
        parts[0].minimum,
    )


def widened(x: Tensor, *sizes: int) -> Tensor:
    """x with zeros at the end of its last dimensions, so that these have the sizes."""
    room = []  # of the last dimension first: none before it, some after it
    for have, size in zip(x.shape[::-1], sizes[::-1], strict=False):
        room += [0, size - have]
    return pad(x, room)


def group_advantages(
    groups: list[dict[str, Scored]], n: int, method: str, options: Options
) -> dict[str, float]:
    """The advantages of rollouts that have names, each with a `Scored` (1, 1, m, d), by name.

    Groups may have lost rollouts. Those of one size go together. One that has become too small, with two
    rollouts or no more than form a set, gets 0.

    Args:
        n: rollouts of a whole group.
    """
    advantage_of = {}
    for G in sorted({len(group) for group in groups}, reverse=True):
        rollouts = {}
        for group in groups:
            rollouts |= group if len(group) == G else {}
        if n > G and max(2, options.subset) >= G:  # a set has fewer rollouts than its group
            advantage_of |= dict.fromkeys(rollouts, 0.0)
            continue
        scored = in_groups(list(rollouts.values()), G)
        advantages = ADVANTAGES[method](scored, options).flatten().tolist()  # P * G
        advantage_of |= zip(rollouts, advantages, strict=True)
    return advantage_of


def as_text(scored: Scored) -> str:
    """A `Scored` as JSON, for trainers that carry no tensors."""
    fields = vars(scored).items()
    return json.dumps({name: x.tolist() if isinstance(x, Tensor) else x for name, x in fields})


def of_text(text: str) -> Scored:
    """The `Scored` that `as_text` wrote."""
    fields = json.loads(text)
    minimum = fields.pop("minimum")
    return Scored(**{name: torch.tensor(x) for name, x in fields.items()}, minimum=minimum)
