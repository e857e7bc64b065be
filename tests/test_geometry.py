"""Reward geometry: what the numbers are for rewards whose geometry is known, and the words that they lead to."""

import shlex
from pathlib import Path

import pytest
import torch

import train
from report.__main__ import main
from report.geometry import correlations, geometry, geometry_report, start_of, verdict

QUICK = shlex.split(
    "--method grpo --m 2 --warm-steps 20 --steps 1 --group-size 3 --prompts-per-step 1 "
    "--eval-problems 0 --snapshots 0 --out run"
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def measures(rewards: torch.Tensor, objective_mask: torch.Tensor | None = None) -> dict[str, float]:
    """Of rewards (N, n, k) whose task scalar is the mean, in groups of 4."""
    N, _, k = rewards.shape
    if objective_mask is None:
        objective_mask = torch.ones(N, k, dtype=torch.bool)
    sums = (rewards * objective_mask[:, None]).sum(-1)
    scalars = sums / objective_mask.sum(1, keepdim=True)
    return geometry(rewards, objective_mask, scalars, 4)


def random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_rewards_whose_geometry_is_known():
    """Copies of one number are one objective. Of a trade the scalar is constant: GRPO has no signal where a vector has
    one. Independent normals are near the number of objectives."""
    one = random(20, 32, 1)
    copies = measures(one.expand(-1, -1, 4))
    trade = measures(torch.cat([one, 1 - one], -1))
    for result, unseen, scalar_signal in ((copies, 0, 1), (trade, 1, 0)):
        assert result["unseen_variance_share"] == pytest.approx(unseen, abs=1e-6)
        assert result["effective_objectives"] == pytest.approx(1)
        assert (result["scalar_signal"], result["vector_signal"]) == (scalar_signal, 1)
    assert "rise and fall together" in verdict(copies)
    assert "trade one objective" in verdict(trade)
    normals = torch.randn(400, 32, 4, generator=torch.Generator().manual_seed(1))
    result = measures(normals)
    assert 0.75 < result["unseen_variance_share"] < 1
    assert 3 < result["effective_objectives"] <= 4
    torch.testing.assert_close(correlations(normals), torch.eye(4), atol=0.05, rtol=0)


def test_objectives_that_a_problem_lacks_count_for_nothing():
    """Two problems with 2 objectives padded to 4, and the same without padding."""
    rewards = random(2, 32, 2)
    padded = torch.nn.functional.pad(rewards, (0, 2))
    objective_mask = torch.tensor([[True, True, False, False]] * 2)
    single = [measures(rewards[i : i + 1])["unseen_variance_share"] for i in range(2)]
    mean = sum(single) / 2
    assert measures(padded, objective_mask)["unseen_variance_share"] == pytest.approx(mean)


def test_no_signal_is_said():
    rewards = torch.zeros(5, 16, 3)
    result = measures(rewards)
    assert not any(result.values())
    assert "no method will learn" in verdict(result)
    objective_mask = torch.ones(5, 3, dtype=torch.bool)
    text = geometry_report(rewards, objective_mask, rewards.mean(-1), 4, ("a", "b", "c"))
    assert "nan" not in text and "0.00 of 3" in text


def test_equal_best_answers_are_no_sign_of_agreement():
    """Guards against "keep the scalar" where half the answers trade one objective for the other."""
    pool = torch.tensor([[0.6, 0.6]] * 8 + [[1.0, 0.0]] * 12 + [[0.0, 1.0]] * 12)
    result = measures(pool[torch.randperm(32, generator=torch.Generator().manual_seed(0))][None])
    assert result["effective_objectives"] == 0 and result["vector_signal"] > 0.9
    assert "it cannot tell" in verdict(result)


def test_a_finite_data_set_counts_once(capsys):
    """Where it wraps around, each problem is sampled once, and the heading says how many there are."""
    Path("few.py").write_text(
        "from rewards import Problem, Toy\n\n\nclass Few(Toy):\n"
        "    def problems(self, split, n, seed=0, start=0):\n"
        "        return [Problem(f'{split}-{i % 2}', None) for i in range(start, start + n)]\n"
    )
    train.main([*QUICK, "--task", "few.py"])
    main(["geometry", "run", "--problems", "5"])
    assert "on 2 validation problems" in capsys.readouterr().out


def test_of_a_run_and_of_a_model(capsys):
    """Before any training of a method, and for a bare model with --task."""
    train.main([*QUICK, "--task", "toy"])
    capsys.readouterr()
    main(["geometry", "run", "--problems", "3"])
    own = capsys.readouterr().out
    assert "on 3 validation problems, 12 answers each" in own and "block_1" in own
    main(["geometry", "run/start", "--task", "toy", "--problems", "2"])
    assert "on 2 validation problems, 32 answers each" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["geometry", "nothing"])
    assert stop.value.code == 2 and "--model nothing" in capsys.readouterr().err


def test_a_model_is_asked_with_the_defaults_of_a_language_model_and_its_task():
    """Guards against a model that is asked for rollouts of 0 new tokens, as long as the tiny one's."""
    config, task, model = start_of("folder", "headline", "cpu")
    assert model == "folder" and task.form == "lines"
    assert config.max_new_tokens == task.language_defaults["max_new_tokens"]
    assert config.sampling_batch == 96
    assert config.dtype == "float32"
