"""Vector Policy Optimization in one file: a small network paints fences, taught by GRPO and by VPO.

    python examples/micro_vpo.py         some seconds on one core, with torch alone
    python examples/micro_vpo.py 3       the same with seed 3

A fence has six boards. Ann likes red boards, Bob blue ones and Cid green ones. A grey board pleases
each of them a little. So on average a grey fence is best, but nobody's favorite. A user who is
shown thirty fences takes the one that they like most. Which painter serves the users better?
"""

import sys
import time

import torch
from torch import Tensor, nn

COLORS = ["red", "blue", "green", "grey"]
PAINT = ["\033[41mr", "\033[44mb", "\033[42mg", "\033[100m."]  # a letter on its color in a terminal
BOARDS = 6
GREY = 0.35  # the joy in a grey board; a board of one's own color gives 1

m = 3  # answers, here fences, of a rollout of VPO; GRPO writes one
G = 8  # rollouts per group
P = 12  # groups per step of VPO; GRPO has m times as many, so both paint equally many fences
K = 100  # preference weights per group
STEPS = 150


# 1. The reward. It is a vector: a number for each of the d = 3 people, not their mean.


def reward_vectors(boards: Tensor) -> Tensor:
    """Boards (..., 6) -> the joys of Ann, Bob and Cid (..., 3), each the mean over the boards."""
    painted = nn.functional.one_hot(boards, len(COLORS)).float()  # (..., 6, 4)
    shares = painted.mean(-2)  # (..., 4)
    return shares[..., :3] + GREY * shares[..., 3:]


# 2. The advantages. GRPO averages the vector first. VPO lets each user choose first.


def group_normalize(scores: Tensor) -> Tensor:
    """(P, G) -> (P, G): how much better than its group a rollout is, in standard deviations."""
    scores = scores - scores[:, :1]  # so that rounding cannot make equal scores differ
    centered = scores - scores.mean(1, keepdim=True)
    return centered / (centered.square().mean(1, keepdim=True).sqrt() + 1e-6)


def grpo_advantage(rewards: Tensor) -> Tensor:
    """The mean of the reward vector (P, G, 1, d), normalised in the group: (P, G)."""
    return group_normalize(rewards.mean((2, 3)))


def vpo_advantage(rewards: Tensor, weights: Tensor) -> Tensor:
    """The set reward, normalised in the group: (P, G, m, d), (P, K, d) -> (P, G).

    A user with preference weights w gets the utility w . r from an answer with reward vector r, and
    takes the best answer of the set: R = mean over w of (max over the m answers of w . r).
    """
    utilities = torch.einsum("pgmd,pkd->pgmk", rewards, weights)  # (P, G, m, K)
    set_rewards = utilities.amax(2).mean(-1)  # (P, G): the maximum inside, the mean outside
    return group_normalize(set_rewards)


def random_users(P: int, K: int) -> Tensor:
    """Preference weights (P, K, 3), uniform among those that add up to 1: Dirichlet(1)."""
    draws = torch.empty(P, K, 3).exponential_()
    return draws / draws.sum(-1, keepdim=True)


# 3. The policy. It writes boards one after another, as a language model writes tokens.


class Painter(nn.Module):
    """A recurrent network that sees the board before, and the number of the next one."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.colors = nn.Embedding(len(COLORS) + 1, width)  # the last one: nothing is painted yet
        self.places = nn.Embedding(m * BOARDS, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, len(COLORS))

    def paint(self, n: int, fences: int) -> tuple[Tensor, Tensor]:
        """n rollouts of some fences: boards (n, T), and log-probabilities (n, T) with gradient."""
        board = torch.full((n,), len(COLORS))
        state = torch.zeros(n, self.cell.hidden_size)
        boards = []
        logprobs = []
        for place in self.places.weight[: fences * BOARDS]:
            state = self.cell(self.colors(board) + place, state)
            distribution = torch.distributions.Categorical(logits=self.head(state))
            board = distribution.sample()
            boards.append(board)
            logprobs.append(distribution.log_prob(board))
        return torch.stack(boards, 1), torch.stack(logprobs, 1)


# 4. The training: paint, pay, make what was paid better than its group likelier (REINFORCE).


def train(painter: Painter, method: str) -> None:
    optimizer = torch.optim.Adam(painter.parameters(), lr=3e-3)
    fences = m if method == "VPO" else 1
    groups = P * m // fences
    for _ in range(STEPS):
        boards, logprobs = painter.paint(groups * G, fences)  # (P * G, m * 6)
        rewards = reward_vectors(boards.view(groups, G, fences, BOARDS))  # (P, G, m, d)
        if method == "VPO":
            advantages = vpo_advantage(rewards, random_users(groups, K))  # (P, G)
        else:
            advantages = grpo_advantage(rewards)
        loss = -(advantages.view(-1, 1) * logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# 5. The outcome: thirty fences of each painter, what one is worth, and the users' best of thirty.


def show(name: str, painter: Painter, fences: int) -> None:
    """Print thirty fences, best@1 and W@30."""
    with torch.no_grad():
        boards, _ = painter.paint(30 // fences, fences)
    boards = boards.view(30, BOARDS)
    rewards = reward_vectors(boards)  # (30, 3)
    best_1 = rewards.mean().item()
    utilities = random_users(1, 10_000)[0] @ rewards.T  # (10000 users, 30 fences)
    W_30 = utilities.amax(1).mean().item()
    print(f"\n{name}: best@1 {best_1:.3f}, W@30 {W_30:.3f}")
    for row in boards.view(3, 10, BOARDS).tolist():
        painted = ["".join(PAINT[board] for board in fence) for fence in row]
        print("".join(f"  {fence}\033[0m" for fence in painted))


def main(seed: int = 0) -> None:
    began = time.perf_counter()
    for method, fences in (("untrained", 1), ("GRPO", 1), ("VPO", m)):
        torch.manual_seed(seed)
        painter = Painter()  # all from the same start
        if method != "untrained":
            train(painter, method)
        show(method, painter, fences)
    print(f"\nseed {seed}, {time.perf_counter() - began:.0f} seconds")


if __name__ == "__main__":
    main(*[int(seed) for seed in sys.argv[1:]])
