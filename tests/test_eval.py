"""Measures against brute force over all subsets and by hand; pools, the table, and the picture."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import LargestTensor, change_config, generator, random_rewards, table_of

import eval as evaluation
from engine.config import Config
from engine.evaluations import Evaluation, Pool, Row, Settings, check_comparable, evaluated, rows_of
from eval import best_at_k, measure, pass_at_k
from report.looks import looks_of
from report.statistics import half_width
from report.table import Table, clusters_of, joint_table, write_table
from rewards import Fence, Problem, Task, UserError
from rollout import load_policy

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


@pytest.mark.parametrize("k", range(1, 13))
def test_specialists_are_worth_what_theory_says(k):
    """All k of them H_k / k, the mean of the largest weight; W@1 is the mean objective, W@k of one objective best@k."""
    best = evaluation.weighted_best_at_k(torch.eye(k)[None], k).item()
    assert best == pytest.approx(sum(1 / i for i in range(1, k + 1)) / k, abs=1e-3)
    rewards = random_rewards(4, 3, 12, k)
    one = evaluation.weighted_best_at_k(rewards, 1)
    torch.testing.assert_close(one, rewards.double().mean((1, 2)), atol=2e-4, rtol=0)
    alone = evaluation.weighted_best_at_k(rewards[..., :1], k)
    torch.testing.assert_close(alone, best_at_k(rewards[..., 0], k))


def test_weights_fit_the_objectives_of_a_problem():
    """Guards against weight on objectives that a problem lacks, which would pay it less."""
    rewards = random_rewards(3, 2, 6, 3)
    rewards[1, :, 2] = 0.0
    mask = torch.tensor([[True, True, True], [True, True, False]])
    full, narrow = evaluation.weighted_best_at_k(rewards, 2, mask)
    assert full == evaluation.weighted_best_at_k(rewards[:1], 2)
    assert narrow == evaluation.weighted_best_at_k(rewards[1:, :, :2], 2)


@pytest.mark.parametrize("k", range(1, 13))
def test_spread_weights_are_uniform_on_the_simplex(k):
    """Mean 1/k and variance (k - 1) / k^2 / (k + 1); guards against sorting, which destroys the net."""
    weights = evaluation.spread_weights(k)
    assert weights.shape == (4096, k) and weights.isfinite().all()
    assert weights.sum(1).tolist() == pytest.approx([1] * 4096)
    assert weights.mean(0).tolist() == pytest.approx([1 / k] * k, rel=1e-3)
    assert weights.var(0).tolist() == pytest.approx([(k - 1) / k**2 / (k + 1)] * k, abs=1e-4)
    assert torch.equal(weights, evaluation.spread_weights(k))


def test_diversity_is_the_mean_over_pairs():
    """Guards against dividing by n squared, which makes pools of different sizes incomparable."""
    rewards = random_rewards(3, 2, 5, 4)
    distances = [(a - b).abs().sum() for a, b in itertools.combinations(rewards[1], 2)]
    assert evaluation.diversity(rewards)[1].item() == pytest.approx(sum(distances).item() / 10)
    doubled = evaluation.diversity(rewards.repeat(1, 2, 1))[1].item()
    assert doubled == pytest.approx(sum(distances).item() * 4 / 45)  # equal candidates have no gap
    pool = torch.arange(3000.0).flip(0)[None, :, None]
    assert evaluation.diversity(pool).item() == pytest.approx(3001 / 3)
    assert evaluation.diversity(torch.ones(1, 5, 4)).item() == 0
    assert evaluation.diversity(torch.ones(1, 1, 4)).item() == 0


def share_of_false_intervals(draws: torch.Tensor, truth: float, clusters=None) -> float:
    """The share of draws (N) or (runs, N) whose interval does not hold the truth. None is not false."""
    false = 0
    for draw in draws:
        half = half_width(draw, clusters)
        false += half is not None and abs(draw.double().mean().item() - truth) > half
    return false / len(draws)


@pytest.mark.parametrize("n_few, times, n_once", [(0, 1, 40), (1, 20, 180), (4, 40, 40)])
def test_intervals_over_problems_hold_the_truth(n_few, times, n_once):
    """In 93 to 97% of the cases. Guards against 83% where four problems come 40 times each, 40 once."""
    sizes = torch.tensor([times] * n_few + [1] * n_once)
    clusters = torch.arange(len(sizes)).repeat_interleave(sizes)
    draws = torch.randn(2000, len(sizes), generator=generator(5))[:, clusters]
    assert 0.03 <= share_of_false_intervals(draws, 0.0, clusters) <= 0.07


@pytest.mark.parametrize("n", [2, 3, 11, 50])
def test_intervals_over_runs_hold_the_truth(n):
    """With 1.96 standard errors they hold it in 71% of the cases for two runs, in 81% for three."""
    draws = torch.randn(1000, n, 1, generator=generator(5))
    assert half_width(draws[0, :1]) is None
    assert 0.03 <= share_of_false_intervals(draws, 0.0) <= 0.07


@pytest.mark.parametrize("N", [40, 200])
def test_rare_events_have_no_false_interval(N):
    """Guards against intervals of which 57% hold p = .02 of 40 problems. All of p = .5 have one."""
    chances = torch.rand(1000, N, generator=generator(6))
    assert share_of_false_intervals(chances < 0.02, 0.02) <= 0.07
    assert 0.03 <= share_of_false_intervals(chances < 0.5, 0.5) <= 0.07
    assert all(half_width(draw) for draw in chances[:100] < 0.5)


def test_a_problem_that_comes_twice_tells_nothing_new():
    """Guards against an interval that shrinks with copies: 40 problems, each five times, are 40."""
    values = random_rewards(6, 40)
    clusters = clusters_of([Problem(str(i), {"maze": i % 40}) for i in range(200)])
    assert half_width(values.repeat(5), clusters) == pytest.approx(half_width(values))
    assert half_width(values.repeat(5)) < 0.6 * half_width(values)
    numbers = torch.arange(200)
    for n_equal, is_given in ((40, True), (41, False), (181, False)):
        half = half_width(values.repeat(5), (numbers - n_equal + 1).clamp(min=0))
        assert (half is not None) == is_given


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
    pool = evaluation.pool_of(Kinds(), problems, answers, m=2, size=4)
    assert pool.answers[0] == ["good", "good", None, None]
    assert pool.answers[1] == ["bad", "good", "good", None]
    assert pool.rewards[0].tolist() == [[1, 0.5, 0]] * 2 + [[-1] * 3] * 2
    assert pool.scalars[1].tolist() == [0.5, 0.75, 0.75, -1]
    values = measure(pool, Kinds())
    assert values["best@4"].tolist() == pytest.approx([0.5, 0.75])
    assert values["rewarded"].tolist() == pytest.approx([2 / 4, 3 / 4])


def test_no_place_of_a_rollout_is_preferred():
    """Of 10 candidates in rollouts of 3 the first place gave .40. Answers and rewards are of one candidate."""
    problems = [Problem(str(i), 3) for i in range(2000)]
    answers = [["good", "bad"]] * 4 * len(problems)
    pool, again = [evaluation.pool_of(Kinds(), problems, answers, m=3, size=10) for _ in range(2)]
    for answer, reward in (("good", 1.0), ("bad", 0.0), (None, -1.0)):
        counts = [own.count(answer) for own in pool.answers]
        assert set(counts) == {3, 4}
        assert sum(counts) / len(counts) == pytest.approx(10 / 3, abs=0.03)
        assert [own.count(reward) for own in pool.rewards[..., 0].tolist()] == counts
    assert again.answers == pool.answers


def test_a_large_pool_takes_little_memory(monkeypatch):
    """Guards against tensors (N, n, n), and against all candidates of a pool under all weights at a time."""
    monkeypatch.setattr(evaluation, "UTILITIES_AT_ONCE", 1000)
    rewards = random_rewards(8, 8, 200, 3)
    mask = torch.ones(8, 3, dtype=torch.bool)
    with LargestTensor() as largest:
        values = measure(Pool([], [], rewards, rewards.mean(-1), mask), Kinds())
    assert largest.n <= 4096 * 3, "more than the weights themselves"
    alone = evaluation.weighted_best_at_k(rewards[-1:], 5)
    torch.testing.assert_close(values["W@5"][-1:], alone)


def test_a_problem_is_passed_in_its_own_objectives():
    """Guards against objectives that a problem lacks, which nobody could pass."""
    rewards = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    pool = Pool([], [], rewards, rewards.mean(-1), mask)
    assert measure(pool, Kinds())["pass@1"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("m, batch", [(1, 0), (3, 0), (3, 2)])
def test_a_pool_is_sampled_in_rollouts_of_m(m, batch):
    """Ten candidates a problem, whatever m is and however few rollouts go at a time."""
    task = Fence()
    task.reads_untagged = False
    policy = load_policy("tiny", task)
    config = Config(sampling_batch=batch, group_size=2, eval_temperature=1.0)
    problems = task.problems("test", 2)
    pool = evaluation.sample_pool(policy, task, problems, config, m=m, size=10)
    assert [len(own) for own in pool.answers] == [10, 10]
    assert pool.rewards.shape == (2, 10, 3)
    config.temperature = 9.0  # that of the training
    again = evaluation.sample_pool(policy, task, problems, config, m=m, size=10)
    assert again.answers == pool.answers


# The table and the picture.


def printed(table: Table, capsys) -> list[str]:
    evaluation.print_table(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    return [" ".join(line.split()) for line in lines]


def test_the_table_says_what_has_collapsed(capsys):
    """Below a third of the diversity of the start model asked for as many answers. No pass@k where nobody passes."""
    table = table_of()
    lines = printed(table, capsys)
    assert "best@1 ± best@3 best@8 W@8 ± diversity x start" in lines
    assert "GRPO 0.800 ±0.001 0.600 0.800 0.800 ±0.001 0.100 0.10x collapsed" in lines
    assert "VPO 0.700 ±0.001 0.600 0.900 0.900 ±0.001 1.100 0.92x" in lines
    assert lines[-1] == "collapsed: the diversity is below a third of the start model's"
    (sets,) = [line for line in lines if line.startswith("start model, sets 0.300 ")]
    assert sets.endswith(" 1.200")
    table.measures[Row("multi_rlvr", 1)] = table.measures[Row("grpo")] | {"pass@8": torch.ones(20)}
    lines = printed(table, capsys)
    assert "best@1 ± best@3 best@8 pass@8 W@8 ± diversity x start" in lines
    (one,) = [line for line in lines if line.startswith("Multi-RLVR, one answer 0.800 ")]
    assert one.endswith(" 1.000 0.800 ±0.001 0.100 0.10x collapsed")
    for values in table.measures.values():
        values["diversity"] = torch.zeros(20)
    assert printed(table, capsys)[-1].endswith(" 0.000")  # no multiple of nothing


def test_what_does_not_vary_has_no_interval(capsys):
    """Guards against "±0.000" where all problems gave 0, or one problem was asked twenty times."""
    table = table_of()
    assert "?" not in "".join(printed(table, capsys))
    table.measures[Row("grpo")]["W@8"] *= 0
    lines = printed(table, capsys)
    assert "GRPO 0.800 ±0.001 0.600 0.800 0.000 ±? 0.100 0.10x collapsed" in lines
    assert "±?: too few problems or seeds differ for an interval" in lines
    table.clusters = torch.zeros(20, dtype=torch.long)
    lines = printed(table, capsys)
    assert "the same test problem 20 times" in lines[1] and "±" not in "".join(lines)
    for values in table.measures.values():
        values |= {name: value[:1] for name, value in values.items()}
    table.settings = Settings("test", 1, 8, 0.7)
    table.clusters = table.clusters[:1]
    assert "±" not in "".join(printed(table, capsys))
    write_table(table, Path("eval.json"), "cpu")
    policies = json.loads(Path("eval.json").read_text("utf-8"))["policies"]
    assert policies["vpo"]["W@8"]["interval"] is None


def test_means_of_several_runs(capsys):
    """The interval of a mean is one over the runs, and a row says of how many."""
    evaluations = [evaluation_with(f"seed{seed}", seed, methods=("grpo", "vpo")) for seed in (0, 1)]
    evaluations.append(evaluation_with("seed2", 2, methods=("vpo",)))
    tables = {each.run: table_of(each.config.seed) for each in evaluations}
    for i, table in enumerate(tables.values()):
        table.measures[Row("vpo")]["best@1"] += 0.1 * i
        table.measures[Row("vpo", 1)] = dict(table.measures[Row("grpo")])
    means = joint_table(tables, rows_of(evaluations))
    lines = printed(means, capsys)
    assert lines[1].startswith("3 runs: ") and lines[2].endswith(" x start seeds")
    seeds = {line.split()[0]: line.split()[-1] for line in lines[3:]}
    assert seeds["GRPO"] == "2" and seeds["VPO"] == "3"
    write_table(means, Path("eval.json"), "cpu")
    best = json.loads(Path("eval.json").read_text("utf-8"))["policies"]["vpo"]["best@1"]
    half = 4.30 * 0.1 / 3**0.5
    assert best["mean"] == pytest.approx(0.8)
    assert best["interval"] == pytest.approx([0.8 - half, 0.8 + half])


def test_several_runs_print_one_table(toy_run, capsys, monkeypatch):
    """Guards against a table that many others hide. Each run has its own in eval.json, and is loaded once."""
    loaded = []
    monkeypatch.setattr("engine.runs.check_files", lambda config, _: loaded.append(config.seed))
    change_config(shutil.copytree(toy_run, Path("other")), seed=1)
    evaluation.main(["run", "other", "--problems", "1"])
    printed = capsys.readouterr().out
    assert printed.startswith("\n2 runs: ") and printed.count(" x start") == 1
    assert loaded == [0, 1]
    for name in ("eval.json", "best_at_k.png"):
        assert len([*Path().glob(f"*/eval-test-1x4-T0.7/{name}")]) == 3, "and one of both"


def evaluation_with(
    name: str, seed: int, methods: tuple = ("grpo",), steps: int = 2, **flags: object
) -> Evaluation:
    """A run of two steps, as config and checkpoints."""
    config = Config(**{"task": "toy", "method": list(methods), "seed": seed, "steps": 2} | flags)
    for method in methods:
        Path(f"{name}/{method}/checkpoint-{steps:06}").mkdir(parents=True)
    run = Path(name)
    stored = evaluated(run, config.m, mix=(1.0,))
    return Evaluation(run, config, Settings("test", 20, 8, 0.7), run, stored)


def test_runs_stand_side_by_side_named_by_what_differs():
    """Another rate, --kl, --steps or --m, or an end that is not reached. The start model is one, but for --m."""
    first = evaluation_with("a", 0)
    cases = {
        "grpo, --lr 0.001": evaluation_with("b", 0, lr=["1e-3"]),
        "grpo, --kl 0.0": evaluation_with("c", 1, kl=0.0),
        "grpo, --entropy-coef 0.1": evaluation_with("bonus", 1, entropy_coef=0.1),
        "grpo, --steps 4": evaluation_with("longer", 0, steps=4),
        "grpo, at step 1": evaluation_with("begun", 1, steps=1),
        "grpo, --m 2": evaluation_with("m", 0, m=2),
    }
    cases["grpo, --steps 4"].config.steps = 4
    for title, other in cases.items():
        rows = {row.title: runs for row, runs in rows_of([first, other]).items()}
        assert title in rows and list(rows[title].values()) == [other.run]
        starts = [name for name in rows if name.startswith("start,") or name == "start"]
        assert len(starts) == 1 + ("--m" in title)
        with pytest.raises(UserError, match="must differ in the seed, and in nothing else"):
            check_comparable([first, other])
    same = evaluation_with("alike", 1, jobs=3, lr=["0.0012"])
    check_comparable([first, same])
    rows = rows_of([first, same])
    assert [row.title for row in rows] == ["start", "start_sets", "grpo"]
    assert rows[Row("grpo")] == {0: Path("a"), 1: Path("alike")}
    own_rows = [Row("grpo", differing=(f"--kl {kl}",)) for kl in (0, 1)]
    looks = looks_of([*own_rows, Row("vpo")]).values()
    assert len({look.color for look in looks}) == 3 and len({look.title for look in looks}) == 3
