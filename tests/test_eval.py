"""Measures against brute force over all subsets and by hand; pools, the table, and the picture."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eval as evaluation
from engine.config import Config
from engine.evaluations import Evaluation, Pool, Settings, check_comparable
from eval import best_at_k, half_width, measure, pass_at_k
from report.statistics import bootstrap_interval
from report.table import Table, mean_of, write_table
from rewards import Fence, Problem, Task, UserError
from rollout import load_policy


def random_rewards(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# The measures.


@pytest.mark.parametrize("k", range(1, 8))
def test_best_at_k_is_the_mean_over_all_subsets(k):
    """Guards against the max of the first k, which depends on order, and a bootstrap, which is biased low."""
    scores = random_rewards(0, 3, 7)
    for row, value in zip(scores.tolist(), best_at_k(scores, k).tolist(), strict=True):
        best = [max(subset) for subset in itertools.combinations(row, k)]
        assert value == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("n, c", [(6, 0), (6, 2), (6, 6), (5, 1)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [1, 300, 600])
def test_a_large_pool_does_not_overflow(k):
    """Guards against binomial coefficients that no float holds."""
    scores = torch.arange(600.0)
    assert best_at_k(scores, k).item() == pytest.approx(k * 601 / (k + 1) - 1)
    assert pass_at_k(600, 1, k) == pytest.approx(k / 600)


def test_weighted_best_at_k():
    """One objective: best@k itself. Two specialists: E max(u, 1 - u) = 3/4 for both, 1/2 for one of them."""
    scores = random_rewards(2, 4, 6, 1)
    alone = evaluation.weighted_best_at_k(scores, 3)
    torch.testing.assert_close(alone, best_at_k(scores[..., 0], 3))
    specialists = torch.eye(2)[None]
    for k, expected in ((1, 0.5), (2, 0.75)):
        value = evaluation.weighted_best_at_k(specialists, k).item()
        assert value == pytest.approx(expected, abs=0.01)


def test_weights_fit_the_objectives_of_a_problem():
    """Guards against weight on objectives that a problem lacks, which would pay it less."""
    rewards = random_rewards(3, 2, 6, 3)
    rewards[1, :, 2] = 0.0
    mask = torch.tensor([[True, True, True], [True, True, False]])
    full, narrow = evaluation.weighted_best_at_k(rewards, 2, mask)
    assert full == evaluation.weighted_best_at_k(rewards[:1], 2)
    assert narrow == evaluation.weighted_best_at_k(rewards[1:, :, :2], 2)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_spread_weights_are_uniform_on_the_simplex(k):
    """Mean 1/k and variance (k - 1) / k^2 / (k + 1); guards against sorted weights, and a net that repeats."""
    weights = evaluation.spread_weights(k, 4096)
    torch.testing.assert_close(weights.sum(1), torch.ones(4096).double())
    expected = torch.full((k,), 1 / k).double()
    torch.testing.assert_close(weights.mean(0), expected, atol=2e-3, rtol=0)
    variance = torch.full((k,), (k - 1) / k**2 / (k + 1)).double()
    torch.testing.assert_close(weights.var(0), variance, atol=1e-3, rtol=0)
    assert torch.equal(evaluation.spread_weights(k), evaluation.spread_weights(k))


def test_diversity_is_the_mean_over_pairs():
    """Guards against dividing by n squared, which makes pools of different sizes incomparable."""
    rewards = random_rewards(3, 2, 5, 4)
    distances = [(a - b).abs().sum() for a, b in itertools.combinations(rewards[1], 2)]
    assert evaluation.diversity(rewards)[1].item() == pytest.approx(sum(distances).item() / 10)
    assert evaluation.diversity(torch.ones(1, 5, 4)).item() == 0
    assert evaluation.diversity(torch.ones(1, 1, 4)).item() == 0


def test_pareto_share_and_coverage():
    """A vector that is repeated counts once, and one that another is as good as counts not at all."""
    pool = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]]])
    assert evaluation.pareto_share(pool).item() == pytest.approx(2 / 4)
    assert evaluation.coverage(pool, 2).item() == pytest.approx((0.5 + 0.75) / 2)
    assert evaluation.coverage(pool, 3).item() == pytest.approx(1.0)  # the fourth is no set


@pytest.mark.parametrize("interval", ["ours", "bootstrap"])
def test_intervals_cover(interval):
    """95% intervals of 300 samples of 50 normals: about 94% hold the truth; below 88% has odds of one in 10,000."""
    held = 0
    for sample in torch.randn(300, 50, generator=torch.Generator().manual_seed(4)):
        low, high = bootstrap_interval(sample)
        if interval == "ours":
            low, high = sample.mean() - half_width(sample), sample.mean() + half_width(sample)
        held += bool(low <= 0 <= high)
    assert 0.88 < held / 300 < 0.99


@pytest.mark.parametrize("n", [2, 3, 5, 11, 20])
def test_intervals_of_a_few_runs_cover(n):
    """With 1.96 standard errors they hold the truth in 71% of the cases for two runs, in 81% for three."""
    draws = torch.randn(2000, n, 1, generator=torch.Generator().manual_seed(5))
    assert half_width(draws[0, :1]) == 0
    held = sum(bool(draw.mean().abs() <= half_width(draw)) for draw in draws)
    assert 0.93 < held / 2000 < 0.975


# Pools.


class Kinds(Task):
    """Objectives without names, of which a problem may have two or three."""

    name = "kinds"
    minimum = -1.0

    def reward(self, problem: Problem, answer: str) -> list[float]:
        own = [1.0, 0.5, 0.0] if answer == "good" else [0.0, 1.0, 1.0]
        return own[: problem.data]


def test_a_pool_counts_what_was_paid_for():
    """An empty slot is a candidate with the least reward, a duplicate one like any other; the rest is cut."""
    problems = [Problem("a", 3), Problem("b", 2)]
    answers = [["good", "good"], [], ["bad"], ["bad", "good"], ["good"], ["bad"]]
    pool = evaluation.pool_of(Kinds(), problems, answers, m=2, size=5)
    assert pool.answers[0] == ["good", "good", None, None, "bad"]
    assert pool.answers[1] == ["bad", "good", "good", None, "bad"]
    assert pool.rewards[0].tolist() == [[1, 0.5, 0]] * 2 + [[-1] * 3] * 2 + [[0, 1, 1]]
    assert pool.scalars[1].tolist() == [0.5, 0.75, 0.75, -1, 0.5]
    values = measure(pool, Kinds(), m=2)
    assert values["best@5"].tolist() == pytest.approx([2 / 3, 0.75])
    assert values["earned"].tolist() == pytest.approx([3 / 5, 4 / 5])
    assert values["coverage"].tolist() == pytest.approx([(0.5 - 1) / 2, (1 + 0.75) / 2])


def test_a_problem_is_passed_in_its_own_objectives():
    """Guards against objectives that a problem lacks, which nobody could pass."""
    rewards = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    pool = Pool([], [], rewards, rewards.mean(-1), mask)
    assert measure(pool, Kinds(), m=1)["pass@1"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("m, batch", [(1, 0), (3, 0), (3, 2)])
def test_a_pool_is_sampled_in_rollouts_of_m(m, batch):
    """Ten candidates a problem, whatever m is and however few rollouts go at a time."""
    task = Fence()
    task.reads_untagged = False
    policy = load_policy("tiny", task)
    config = Config(sampling_batch=batch, group_size=2)
    problems = task.problems("test", 2)
    pool = evaluation.sample_pool(policy, task, problems, config, m=m, size=10, temperature=1.0)
    assert [len(own) for own in pool.answers] == [10, 10]
    assert pool.rewards.shape == (2, 10, 3)
    again = evaluation.sample_pool(policy, task, problems, config, m=m, size=10, temperature=1.0)
    assert again.answers == pool.answers


# The table and the picture.


def table_of(seed: int = 0) -> Table:
    """GRPO has collapsed onto an answer that is best on average; VPO has kept its variety."""
    means = {  # best@1, best@8, diversity
        "start": (0.3, 0.5, 1.0),
        "start_sets": (0.3, 0.5, 1.2),
        "grpo": (0.8, 0.8, 0.1),
        "vpo": (0.7, 0.9, 1.1),
    }
    noise = 0.01 * random_rewards(seed, 20)
    noise -= noise.mean()
    measures = {}
    for policy, (one, many, diversity) in means.items():
        levels = {"best@1": one, "best@3": 0.6, "best@8": many, "W@8": many, "diversity": diversity}
        levels |= dict.fromkeys(("pass@1", "pass@8", "earned", "pareto", "coverage"), 0.0)
        measures[policy] = {name: level * (1 + noise) for name, level in levels.items()}
    return Table([f"runs/fence-seed{seed}"], Settings("test", 20, 8, 0.7), measures)


def test_the_table_says_in_words_what_it_shows(capsys):
    """A row per policy; nothing of pass@k where nobody passes; diversity against what a method was asked for."""
    table = table_of()
    evaluation.print_table(table)
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "best@1 best@3 best@8 W@8 diversity earned pareto coverage" in rows
    assert "VPO 0.700 0.600 0.900 0.900 1.100 0.000 0.000 0.000" in rows
    assert "GRPO 10% (collapsed), VPO 92% (kept)" in out
    assert re.search(r"best@1: GRPO 0.800 ± [\d.]+, VPO 0.700 ± [\d.]+, start model 0.300 ±", out)
    assert re.search(r"W@8: VPO 0.900 ± [\d.]+, GRPO 0.800", out)
    table.measures["vpo"]["pass@8"][3] = 1.0
    evaluation.print_table(table)
    assert " pass@1     pass@8" in capsys.readouterr().out


def test_means_of_several_runs(tmp_path, capsys):
    """Of the policies that all runs have, the others are named; the interval is one over the runs."""
    tables = [table_of(seed) for seed in range(3)]
    del tables[1].measures["grpo"]
    for i, table in enumerate(tables):
        table.measures["vpo"]["best@1"] += 0.1 * i
    means = mean_of(tables)
    assert list(means.measures) == ["start", "start_sets", "vpo"]
    evaluation.print_left_out({table.runs[0]: list(table.measures) for table in tables})
    expected = "GRPO is left out of the mean: not trained in runs/fence-seed1\n"
    assert capsys.readouterr().out == expected
    write_table(means, tmp_path / "eval.json", "cpu")
    stored = json.loads((tmp_path / "eval.json").read_text())
    best = stored["policies"]["vpo"]["best@1"]
    half = 4.30 * 0.1 / 3**0.5
    assert best["mean"] == pytest.approx(0.8)
    assert best["interval"] == pytest.approx([0.8 - half, 0.8 + half])
    assert stored["settings"]["runs"] == [f"runs/fence-seed{seed}" for seed in range(3)]


@pytest.mark.draws
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_of_best_at_k(suffix, tmp_path):
    """Guards against files that change with the date, so that equal numbers look like new ones."""
    paths = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for path in paths:
        evaluation.draw_best_at_k(table_of(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def evaluation_with(name: str, seed: int, **flags: object) -> Evaluation:
    """A run of two steps of GRPO, as config, checkpoint and log."""
    config = Config(task="toy", method=["grpo"], seed=seed, **flags)
    run = Path(name)
    (run / "grpo/checkpoint-000002").mkdir(parents=True)
    lines = [json.dumps({"step": step, "lr": step / config.steps}) + "\n" for step in (1, 2)]
    (run / "grpo/metrics.jsonl").write_text("".join(lines))
    return Evaluation(run, config, Settings("test", 20, 8, 0.7), run)


def test_runs_that_do_not_belong_together_have_no_mean(tmp_path, monkeypatch):
    """Guards against a mean over learning rates, one seed that counts twice, and a run that has just begun or was made
    longer later."""
    monkeypatch.chdir(tmp_path)
    first = evaluation_with("a", 0)
    check_comparable([first, evaluation_with("alike", 1, jobs=3, lr=["0.0012"])])
    others = {
        "has --lr grpo=0.001, and a has 0.0012": evaluation_with("b", 1, lr=["1e-3"]),
        "has --kl 0.0, and a has 0.001": evaluation_with("c", 1, kl=0.0),
        "has --seed 0, as a has": evaluation_with("d", 0),
        "grpo has done 1 steps, and in a 2": evaluation_with("begun", 1),
    }
    Path("begun/grpo/checkpoint-000002").rename("begun/grpo/checkpoint-000001")
    for message, other in others.items():
        with pytest.raises(UserError, match=message):
            check_comparable([first, other])
