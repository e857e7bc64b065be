"""Reward geometry: what the numbers are for rewards whose geometry is known, and the words that they lead to."""

from pathlib import Path

import pytest
import torch
from helpers import fails, random_rewards

from report.__main__ import main
from report.geometry import NO_CONFLICT, geometry, geometry_report, model_of
from rewards import Fence, Task


def measures(rewards: torch.Tensor, mask: torch.Tensor | None = None, G: int = 4) -> dict:
    """Of rewards (N, n, d) whose task scalar is the mean, in groups of G."""
    if mask is None:
        mask = torch.ones(len(rewards), rewards.shape[-1], dtype=torch.bool)
    scalars = (rewards * mask[:, None]).sum(-1) / mask.sum(1, keepdim=True)
    return geometry(rewards, mask, scalars, G)


@pytest.mark.parametrize(
    ("table", "regret", "share", "signal"),  # of the scalar
    [
        ([[0.2, 0.4], [0.5, 0.4], [1.0, 0.4]], 0, 0, 1),  # one objective is constant
        ([[0.0, 0.0], [0.5, 0.15], [1.0, 0.3]], 0, 0, 1),  # b = .3 a
        ([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0]], 0, 0, 1),  # one answer has all
        ([[1.0, 0.0], [0.0, 1.0]], 1 / 4, 1, 0),  # E max(w, 1 - w) = 3/4, and level scalars
        ([[0.6, 0.6], [1.0, 0.0], [0.0, 1.0]], 0.16, 0.16 / (0.76 - 1.6 / 3), 1),  # as in the fence
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], 5 / 18, 1, 0),  # E max w = 11/18
    ],
)
def test_the_geometry_of_rewards_where_it_is_known(table, regret, share, signal):
    """Guards against a conflict seen where objectives differ in size alone. A trade is no signal to the scalar."""
    rewards = torch.tensor([table] * 20)  # (20 problems, n, d)
    result = measures(rewards, G=len(table))
    assert result["regret"] == pytest.approx(regret, abs=1e-3)
    assert result["regret_share"] == pytest.approx(share, abs=5e-3)
    assert (result["regret_share"] < NO_CONFLICT) == (regret == 0)
    assert (result["scalar_signal"], result["vector_signal"]) == (signal, 1)
    larger = measures(7 - 3 * (1 - rewards), G=len(table))["regret"]
    assert larger == pytest.approx(3 * regret, abs=3e-3)


def test_objectives_that_a_problem_lacks_count_for_nothing():
    """Two problems with 2 objectives padded to 4, and the same without padding."""
    rewards = random_rewards(0, 2, 32, 2)
    padded = torch.nn.functional.pad(rewards, (0, 2))
    objective_mask = torch.tensor([[True, True, False, False]] * 2)
    single = [measures(rewards[i : i + 1])["regret"] for i in range(2)]
    assert measures(padded, objective_mask)["regret"] == pytest.approx(sum(single) / 2)


def test_no_signal_is_said():
    rewards = torch.zeros(5, 16, 3)
    assert not any(measures(rewards).values())
    mask = torch.ones(5, 3, dtype=torch.bool)
    text = geometry_report(rewards, mask, rewards.mean(-1), 4, Task())
    assert "nan" not in text and "objective 1" not in text


@pytest.mark.parametrize("task", [Fence(), Task()])
@pytest.mark.parametrize("trade", [False, True])
def test_an_objective_that_hardly_anything_earns_is_named(task, trade):
    """Guards against a verdict about an objective that 1 of 32 answers to one problem earns, and that the others lack."""
    rewards = torch.zeros(25, 32, 3)
    rewards[:, ::2, 0] = 1
    rewards[:, trade::2, 1] = 1
    rewards[0, 0, 2] = 1
    mask = torch.tensor([[True, True, i == 0] for i in range(25)])
    text = geometry_report(rewards, mask, rewards.mean(-1), 4, task)
    name = task.objectives[2] if task.objectives else "objective 3"
    assert f"Hardly any answer earns {name} (3%): this tells nothing" in text
    assert "Keep the scalar" not in text and ("Good answers trade" in text) == trade
    rewards[:, ::2, 2] = 1
    text = geometry_report(rewards, mask, rewards.mean(-1), 4, task)
    assert ("Keep the scalar" in text) != trade and "Hardly" not in text


def test_of_a_run_and_of_a_model(toy_run, capsys):
    """Where a finite data set wraps around, each problem is sampled once, and the heading says how many there are."""
    code = "from rewards import Problem, Toy\nclass Few(Toy):\n    def problems(self, split, n, *rest):"
    code += "\n        return [Problem(f'{split}-{i % 2}', None) for i in range(n)]\n"
    Path("few.py").write_text(code, "utf-8")
    main(["geometry", "run", "--problems", "5"])
    own = capsys.readouterr().out
    assert "on 5 validation problems, 16 answers each" in own and "regret" in own
    main(["geometry", "run/start", "--task", "few.py", "--problems", "5"])
    assert "on all 2 validation problems, 32 answers each" in capsys.readouterr().out
    fails(["geometry", "runs/none"], capsys, "--model runs/none: cannot be loaded", command=main)


def test_a_model_is_asked_with_the_defaults_of_a_language_model_and_its_task():
    """Guards against a model that is asked for rollouts of 0 new tokens, as long as the tiny one's."""
    config, task, model = model_of("folder", "headline", "cpu")
    assert model == "folder" and task.form == "lines"
    assert config.max_new_tokens == task.language_defaults["max_new_tokens"]
    assert config.sampling_batch == 96
    assert config.dtype == "float32"
