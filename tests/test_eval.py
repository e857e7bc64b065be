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
from engine.evaluations import Evaluation, Settings, check_comparable, output_folders
from eval import (
    EvalFlags,
    Pool,
    Report,
    best_at_k,
    half_width,
    measure,
    pass_at_k,
)
from report.statistics import bootstrap_interval
from rewards import Fence, Problem, Task, UserError
from rollout import load_policy


def random_rewards(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# The measures.


@pytest.mark.parametrize("k", range(1, 8))
def test_best_at_k_is_the_mean_over_all_subsets(k):
    """Guards against the max of the first k, which depends on order, and a bootstrap, which is biased low."""
    scores = random_rewards(0, 3, 7)
    for row in range(3):
        subsets = itertools.combinations(scores[row].tolist(), k)
        best = [max(subset) for subset in subsets]
        assert best_at_k(scores, k)[row].item() == pytest.approx(sum(best) / len(best))


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


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: pass_at_k(5, 6, 1), "c=6"),
        (lambda: pass_at_k(5, 1, 6), "k=6"),
        (lambda: best_at_k(torch.zeros(2, 5), 6), "k=6"),
        (lambda: best_at_k(torch.zeros(2, 5), 0), "k=0"),
    ],
)
def test_impossible_budgets_are_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


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
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rewards[1, :, 2] = 0.0
    values = evaluation.weighted_best_at_k(rewards, 2, mask)
    for i, k in enumerate((3, 2)):
        own = evaluation.weighted_best_at_k(rewards[i : i + 1, :, :k], 2)
        assert values[i].item() == pytest.approx(own.item())


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_spread_weights_are_uniform_on_the_simplex(k):
    """Mean 1/k and variance (k - 1) / k^2 / (k + 1); guards against sorted weights, and a net that repeats."""
    weights = evaluation.spread_weights(k, 4096)
    assert weights.shape == (4096, k)
    torch.testing.assert_close(weights.sum(1), torch.ones(4096).double())
    assert (weights >= 0).all()
    expected = torch.full((k,), 1 / k).double()
    torch.testing.assert_close(weights.mean(0), expected, atol=2e-3, rtol=0)
    variance = torch.full((k,), (k - 1) / k**2 / (k + 1)).double()
    torch.testing.assert_close(weights.var(0), variance, atol=1e-3, rtol=0)
    assert torch.equal(evaluation.spread_weights(k), evaluation.spread_weights(k))


def test_diversity_is_the_mean_over_pairs():
    """Guards against dividing by n squared, which makes pools of different sizes incomparable."""
    rewards = random_rewards(3, 2, 5, 4)
    for i in range(2):
        distances = [(a - b).abs().sum() for a, b in itertools.combinations(rewards[i], 2)]
        expected = sum(distances).item() / 10
        assert evaluation.diversity(rewards)[i].item() == pytest.approx(expected)
    assert evaluation.diversity(torch.ones(1, 5, 4)).item() == 0
    assert evaluation.diversity(torch.ones(1, 1, 4)).item() == 0


def test_pareto_share_and_coverage():
    """A vector that is repeated counts once, and one that another is as good as counts not at all."""
    pool = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]]])
    assert evaluation.pareto_share(pool).item() == pytest.approx(2 / 4)
    assert evaluation.coverage(pool, 2).item() == pytest.approx((0.5 + 0.75) / 2)
    assert evaluation.coverage(pool, 1).item() == pytest.approx(pool.mean().item())
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


def test_an_interval_of_several_runs_is_one_over_seeds():
    """Guards against 600 problems that make three seeds look certain."""
    values = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 200)
    assert half_width(values) == pytest.approx(4.30 * 0.3 / 3**0.5)
    assert half_width(values[:1]) == 0


@pytest.mark.parametrize("n", [2, 3, 5, 11, 20])
def test_intervals_of_a_few_runs_cover(n):
    """With 1.96 standard errors they hold the truth in 71% of the cases for two runs, in 81% for three."""
    draws = torch.randn(2000, n, 1, generator=torch.Generator().manual_seed(5))
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
    assert pool.rewards[1, 0].tolist() == [0, 1, 0]
    assert pool.scalars[1].tolist() == [0.5, 0.75, 0.75, -1, 0.5]
    values = measure(pool, Kinds(), m=2)
    assert {"best@1", "best@5", "pass@3", "W@2", "diversity", "pareto", "coverage"} <= values.keys()
    assert "best@8" not in values
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


def report_of(seed: int = 0) -> Report:
    """GRPO has collapsed onto an answer that is best on average; VPO has kept its variety."""
    means = {"start": (0.3, 0.5, 1.0), "start_sets": (0.3, 0.5, 1.2)}
    means |= {"grpo": (0.8, 0.8, 0.1), "vpo": (0.7, 0.9, 1.1)}
    measures = {}
    for policy, (one, all_of_them, diversity) in means.items():
        by_name = dict.fromkeys(["best@1", "W@1"], one) | dict.fromkeys(["best@3", "W@3"], 0.6)
        by_name |= dict.fromkeys(["best@8", "W@8"], all_of_them) | {"diversity": diversity}
        by_name |= dict.fromkeys(
            ["pass@1", "pass@3", "pass@8", "pareto", "coverage", "earned"], 0.0
        )
        noise = 0.01 * (random_rewards(seed, 20) - 0.5)
        measures[policy] = {
            name: mean + (noise - noise.mean()) * mean for name, mean in by_name.items()
        }
    return Report([f"runs/fence-seed{seed}"], Settings("test", 20, 8, 0.7), measures)


def test_the_table_says_in_words_what_it_shows(capsys):
    """A row per policy; nothing of pass@k where nobody passes; diversity against what a method was asked for."""
    report = report_of()
    report.print_table()
    out = capsys.readouterr().out
    assert "runs/fence-seed0: 20 test problems, pool of 8 candidates, temperature 0.7" in out
    rows = [line.split() for line in out.splitlines()]
    assert [
        "best@1",
        "best@3",
        "best@8",
        "W@8",
        "diversity",
        "earned",
        "pareto",
        "coverage",
    ] in rows
    assert ["VPO", "0.700", "0.600", "0.900", "0.900", "1.100", "0.000", "0.000", "0.000"] in rows
    assert "GRPO 10% (collapsed), VPO 92% (kept)" in out
    assert re.search(r"best@1: GRPO 0.800 ± [\d.]+, VPO 0.700 ± [\d.]+, start model 0.300 ±", out)
    assert re.search(
        r"W@8: VPO 0.900 ± [\d.]+, GRPO 0.800 ± [\d.]+, start model 0.500 ± [\d.]+, start model, sets",
        out,
    )
    report.measures["vpo"]["pass@8"][3] = 1.0
    report.print_table()
    assert " pass@1     pass@8" in capsys.readouterr().out


def test_a_table_of_nothing_says_so(capsys):
    report = report_of()
    for values in report.measures.values():
        values["diversity"] = torch.zeros(20)
    report.print_table()
    assert "all candidates of all policies earned the same" in capsys.readouterr().out


def evaluation_with(name: str, seed: int, **flags: object) -> Evaluation:
    """A run of two steps of GRPO, as config, checkpoint and log."""
    config = Config(task="toy", method=["grpo"], seed=seed, **flags)
    run = Path(name)
    (run / "grpo/checkpoint-000002").mkdir(parents=True)
    lines = [json.dumps({"step": step, "lr": step / config.steps}) + "\n" for step in (1, 2)]
    (run / "grpo/metrics.jsonl").write_text("".join(lines))
    return Evaluation(run, config, Settings("test", 20, 8, 0.7), run)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"lr": ["1e-3"]}, "b: has --lr grpo=0.001, and a has 0.0012; their mean says nothing"),
        ({"kl": 0.0}, "b: has --kl 0.0, and a has 0.001"),
        ({"steps": 100}, "b: has --steps 100, and a has 200"),
        ({"group_size": 4}, "b: has --group-size 4, and a has 8"),
        ({"prompts_per_step": 4}, "b: has --prompts-per-step 4"),
        ({"model": "m"}, "b: has --model m, and a has tiny"),
        ({"alpha": 0.5}, "b: has --alpha 0.5"),
        ({"temperature": 0.9}, "b: has --temperature 0.9"),
        ({"warm_steps": 9}, "b: has --warm-steps 9"),
        ({"lora_rank": 9}, "b: has --lora-rank 9"),
        ({"seed": 0}, "b: has --seed 0, as a has; a mean is one over seeds"),
    ],
)
def test_runs_that_do_not_belong_together_have_no_mean(flags, message, tmp_path, monkeypatch):
    """Guards against a mean over learning rates, and against one seed that counts twice."""
    monkeypatch.chdir(tmp_path)
    first = evaluation_with("a", 0)
    check_comparable([first, evaluation_with("alike", 1, jobs=3, lr=["0.0012"])])
    with pytest.raises(UserError, match=f"^{message}"):
        check_comparable([first, evaluation_with("b", **{"seed": 1} | flags)])


def test_runs_that_are_not_equally_far_have_no_mean(tmp_path, monkeypatch):
    """Guards against a mean with a run that has just begun, or that was made longer later."""
    monkeypatch.chdir(tmp_path)
    first = evaluation_with("a", 0)
    longer = evaluation_with("longer", 1)
    log = Path("longer/grpo/metrics.jsonl")
    log.write_text(log.read_text().replace("0.01", "0.02"))
    with pytest.raises(UserError, match="^longer: grpo has --lr 0.02 in step 2, and in a 0.01,"):
        check_comparable([first, longer])
    begun = evaluation_with("begun", 1)
    Path("begun/grpo/checkpoint-000002").rename("begun/grpo/checkpoint-000001")
    with pytest.raises(UserError, match="^begun: grpo has done 1 steps, and in a 2; finish both"):
        check_comparable([first, begun])


def test_a_method_that_a_run_lacks_is_named(capsys):
    """Guards against a mean that lacks a method without a word."""
    policies_of = {"a": ["start", "grpo"], "b": ["start", "vpo"], "c": ["start", "vpo"]}
    evaluation.print_left_out(policies_of)
    assert capsys.readouterr().out == (
        "GRPO is left out of the mean: not trained in b, c\n"
        "VPO is left out of the mean: not trained in a\n"
    )


def test_means_of_several_runs(tmp_path, capsys):
    """Of the policies that all runs have; the interval is one over the runs."""
    reports = [report_of(seed) for seed in range(3)]
    del reports[1].measures["grpo"]
    for i, report in enumerate(reports):
        report.measures["vpo"]["best@1"] += 0.1 * i
    means = evaluation.mean_of(reports)
    assert list(means.measures) == ["start", "start_sets", "vpo"]
    means.print_table()
    assert "mean of 3 runs" in capsys.readouterr().out
    means.write(tmp_path, "cpu")
    stored = json.loads((tmp_path / "eval.json").read_text())
    best = stored["policies"]["vpo"]["best@1"]
    assert best["mean"] == pytest.approx(0.8)
    half = 4.30 * 0.1 / 3**0.5
    assert best["interval"] == pytest.approx([0.8 - half, 0.8 + half])
    expected = {"split": "test", "problems": 20, "pool": 8, "temperature": 0.7, "device": "cpu"}
    assert stored["settings"] == expected | {
        "runs": [f"runs/fence-seed{seed}" for seed in range(3)]
    }


@pytest.mark.draws
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_of_best_at_k(suffix, tmp_path):
    """A curve per policy; equal numbers give equal files."""
    files = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.{suffix}"
        report_of().draw_best_at_k(path)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    if suffix == "svg":
        text = files[0].decode()
        for words in ("GRPO", "VPO", "start model", "bands: 95% over problems"):
            assert f"<!-- {words}" in text or words in text


# The command.


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"task": "maze"}, "--task maze: only used with --reward-geometry"),
        ({"page": True, "pool": 5}, "--pool 5: not used by --page and --film"),
        (
            {"film": True, "split": "validation"},
            "--split validation: not used by --page and --film",
        ),
        ({"reward_geometry": True, "out": "x"}, "--out x: not used by --reward-geometry"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        evaluation.check_used(EvalFlags(**flags))


def test_what_is_written_goes_to_a_folder_of_each_run(tmp_path):
    """Guards against runs that overwrite one another's figures."""
    runs = [Path("runs/a"), Path("runs/b")]
    assert output_folders(runs, None) == [None, None]
    assert output_folders(runs[:1], tmp_path) == [tmp_path]
    assert output_folders(runs, tmp_path) == [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(UserError, match="two runs are named a"):
        output_folders([*runs, Path("other/a")], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="must be a folder, and is a file"):
        output_folders(runs, tmp_path / "file")
