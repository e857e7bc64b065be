"""Reward geometry: what the numbers are for rewards whose geometry is known, and the words that they lead to."""

import pytest
import torch
from test_train import QUICK, fails, in_an_empty_folder  # noqa: F401 - the fixture applies by its name

import eval as evaluation
import train
from report.geometry import correlations, describe, geometry, verdict


def measures(
    rewards: torch.Tensor, exists: torch.Tensor | None = None, G: int = 4
) -> dict[str, float]:
    exists = (
        torch.ones(rewards.shape[0], rewards.shape[2], dtype=torch.bool)
        if exists is None
        else exists
    )
    return geometry(
        rewards, exists, (rewards * exists[:, None]).sum(-1) / exists.sum(1)[:, None], G
    )


def random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_copies_of_one_number_are_one_objective():
    found = measures(random(20, 32, 1).expand(-1, -1, 4))
    assert found["unseen"] == pytest.approx(0, abs=1e-6) and found["effective"] == pytest.approx(1)
    assert found["scalar"] == found["vector"] == 1 and "rise and fall together" in verdict(found)


def test_what_one_gains_the_other_loses_is_unseen():
    """The scalar is constant, so that GRPO has no signal at all where a vector has one."""
    one = random(20, 32, 1)
    found = measures(torch.cat([one, 1 - one], -1))
    assert found["unseen"] == pytest.approx(1) and found["effective"] == pytest.approx(1)
    assert found["scalar"] == 0 and found["vector"] == 1 and "trade one objective" in verdict(found)


def test_independent_objectives():
    """Better quarter: what is left of independent normals above a threshold of their mean is seen the less for it."""
    rewards = torch.randn(400, 32, 4, generator=torch.Generator().manual_seed(1))
    found = measures(rewards)
    assert 0.75 < found["unseen"] < 1 and 3 < found["effective"] <= 4
    torch.testing.assert_close(correlations(rewards), torch.eye(4), atol=0.05, rtol=0)


def test_objectives_that_a_problem_lacks_count_for_nothing():
    """Two problems with 2 objectives padded to 4, and the same without padding."""
    rewards = random(2, 32, 2)
    padded = torch.nn.functional.pad(rewards, (0, 2))
    exists = torch.tensor([[True, True, False, False]] * 2)
    each = [measures(rewards[i : i + 1])["unseen"] for i in range(2)]
    assert measures(padded, exists)["unseen"] == pytest.approx(sum(each) / 2)


def test_no_signal_is_said():
    rewards = torch.zeros(5, 16, 3)
    found = measures(rewards)
    assert found == {
        "unseen": 0,
        "effective": 0,
        "scalar": 0,
        "vector": 0,
    } and "no method will learn" in verdict(found)
    text = describe(
        rewards, torch.ones(5, 3, dtype=torch.bool), rewards.mean(-1), 4, ("a", "b", "c")
    )
    assert "nan" not in text and "0.00 of 3" in text


def test_of_a_run_and_of_a_model(capsys):
    """Before any training of a method, and for a bare model with --task; a folder that is neither is named."""
    train.main(["--task", "toy", "--out", "run", *QUICK, "--eval-problems", "0", "--steps", "1"])
    evaluation.main(["run", "--reward-geometry", "--problems", "3"])
    own = capsys.readouterr().out
    assert (
        "run: the start model on 3 validation problems, 12 answers each" in own and "block_1" in own
    )
    evaluation.main(["run/start", "--reward-geometry", "--task", "toy", "--problems", "2"])
    assert "of 3" in capsys.readouterr().out
    fails(["nothing", "--reward-geometry"], capsys, "--model nothing", command=evaluation.main)
    for name in ("tiny", "runs/none"):
        fails(
            [name, "--reward-geometry"],
            capsys,
            f"--reward-geometry {name}: no run",
            command=evaluation.main,
        )
    fails(
        ["run/start", "--reward-geometry", "--task", "tou"],
        capsys,
        "--task tou",
        command=evaluation.main,
    )
