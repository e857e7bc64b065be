"""Search: the population, goals, the log from which a search goes on, and mistakes of the user."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_train import change_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import search
import train
from engine.tasks import load_task, take_problems
from rewards import Problem, Task, UserError
from rollout import Policy, build_prompt
from search import Candidate, Population

ROOT = Path(__file__).resolve().parent.parent
QUICK = "--problems 3 --among 3 --screen 0 --budget 26 --temperature 1"
LOGS = Path("out/toy-seed0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A toy run whose start writes bits, and whose methods have hardly moved from it."""
    folder = tmp_path_factory.mktemp("runs") / "toy-seed0"
    flags = (
        "--task toy --m 2 --warm-steps 60 --steps 2 --method grpo vpo --eval-problems 0 "
        f"--prompts-per-step 2 --snapshots 0 --out {folder}"
    )
    train.main(flags.split())
    return folder


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read_log(log: Path) -> tuple[dict, list[dict]]:
    """The header of a log, and its candidates."""
    header, *candidates = [json.loads(line) for line in log.read_text().splitlines()]
    return header, candidates


def run_search(run: Path, flags: str) -> None:
    search.main([str(run), *flags.split()])


def fails(run: Path, flags: str, capsys, *parts: str) -> None:
    with pytest.raises(SystemExit) as stop:
        run_search(run, flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    for part in parts:
        assert part in error
    assert error.strip().count("\n") <= 1 or "%" in error  # a progress bar may stand before it


def routes(task, grid: str, route: list[int], left: int) -> Iterator[list[int]]:
    """Every way to the exit of a maze that continues a route by at most `left` steps."""
    if left == 0:
        return
    for cell in task.moves[route[-1]].values():
        if grid[cell] == "E":
            yield [*route, cell]
        elif grid[cell] != "#":
            yield from routes(task, grid, [*route, cell], left - 1)


def test_maze_knows_what_can_be_reached():
    """Against every route through mazes of size 5, one by one, with two steps to spare."""
    task = load_task("maze", size=5)
    for problem in task.problems("test", 6):
        grid = "".join(problem.data["grid"])
        start = grid.index("S")
        shortest = task.distances(grid, start)[grid.index("E")]
        problem.data["budget"] = shortest + 2
        expected = set()
        for route in routes(task, grid, [start], shortest + 2):
            answer = " ".join(task.cells[cell] for cell in route[1:])
            expected.add(tuple(task.reward(problem, answer)))
        assert {tuple(vector) for vector in task.reachable(problem)} == expected


def test_a_maze_with_other_rewards_does_not_know_what_can_be_reached():
    Path("one_number.py").write_text(
        "from tasks.maze import Maze\n\n\nclass Blended(Maze):\n"
        "    def reward(self, problem, answer):\n"
        "        return [sum(super(Blended, self).reward(problem, answer))]\n"
    )
    task = load_task("one_number.py")
    assert task.reachable(task.problems("test", 1)[0]) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1.0, 0, 0]", "1.0, must be a list of numbers"),
        ("[[1, 0]]", "[1, 0], has 2 numbers for 3 objectives"),
    ],
)
def test_what_can_be_reached_is_checked(value, message):
    """Guards against a vector without its list, with which no problem would ever be solved."""
    task = fence_that_reaches(value)
    with pytest.raises(UserError, match=f"^task fence: reachable .*{re.escape(message)}"):
        search.make_goal("scalar", task).target_of(task.problems("test", 1)[0])


def fence_that_reaches(value: str) -> Task:
    source = f"    def reachable(self, problem):\n        return {value}\n"
    Path("reach.py").write_text(f"from rewards import Fence\n\n\nclass Mine(Fence):\n{source}")
    return load_task("reach.py")


@pytest.mark.parametrize("goal", ["scalar", "ann"])
@pytest.mark.parametrize("vector", ["[1, 0, 0]", "[100.1, 0.3, 33.3]", "[1 / 3, 2 / 3, 1 / 7]"])
def test_the_best_that_can_be_reached_solves_a_problem(vector, goal):
    """Guards against a target that rounding puts above every score."""
    task = fence_that_reaches(f"[{vector}]")
    problem = task.problems("test", 1)[0]
    goal = search.make_goal(goal, task)
    population = Population(problem, goal.target_of(problem))
    rewards = search.as_logged(torch.tensor(eval(vector), dtype=torch.float32).tolist())
    found = Candidate(0, problem.id, 1, 0, 0, "answer", rewards, goal.score(rewards, "answer"))
    population.add(found)
    assert population.solved_after() == 1


def population_of(target: float = 0.0) -> Population:
    return Population(Problem("problem", {}), target)


def candidate(order: int, rewards: list[float], answer: str = "answer") -> Candidate:
    return Candidate(0, "problem", order, 0, 0, answer, rewards, sum(rewards))


def test_a_population_keeps_the_best_of_every_behaviour():
    """Guards against a grid that one good answer takes over, which leaves no choice of parents."""
    population = population_of(target=1.2)
    vectors = [[1.0, 0.0], [0.0, 0.9], [0.0, 1.0], [0.0, 0.95], [0.6, 0.6]]
    for order, rewards in enumerate(vectors, 1):
        population.add(candidate(order, rewards))
    population.settle(candidate(6, [9.0, 9.0], answer=""), 0)  # an empty slot settles nowhere
    first, second, third = population.islands
    assert [c.order for c in first.values()] == [1, 3, 5]
    assert not second
    population.migrate()
    assert [c.order for c in first.values()] == [1, 3, 5]
    assert [c.order for c in second.values()] == [5]
    assert not third
    assert population.solved_after() == 5
    population.target = 30
    assert population.solved_after() == 0


@pytest.mark.parametrize(
    "selection, expected", [("tournament", {5}), ("lexicase", {1, 3}), ("weighting", {1, 3, 5})]
)
def test_parents_are_selected(selection, expected):
    population = population_of()
    for order, rewards in ((1, [1.0, 0.0]), (3, [0.0, 1.0]), (5, [0.6, 0.6])):
        population.settle(candidate(order, rewards), 0)
    parents = [population.parent(0, selection, random.Random(seed)) for seed in range(1000)]
    assert {parent.order for parent in parents if parent} == expected
    assert 150 < parents.count(None) < 250  # a fifth of the children have no parent
    assert population.parent(2, selection, random.Random(0)) is None


@pytest.mark.parametrize("strategy", ["evolve", "best_of_n"])
def test_a_search_and_its_log(trained, strategy, capsys):
    """Every candidate is counted, and scored as the task scores it."""
    run_search(trained, f"{QUICK} --goal all --strategy {strategy} --out out")
    table = capsys.readouterr().out
    for part in ("start model", "GRPO", "VPO", "3 problems, 26 candidates each"):
        assert part in table
    assert Path("out/search.png").exists()

    report = json.loads(Path("out/search.json").read_text())
    task = load_task("toy")
    problems = take_problems(task, "test", 3)
    assert report["problems"] == [problem.id for problem in problems]
    assert report["ticks"][-1] == 26
    weights = set()
    parents = set()
    for name, (results,) in report["policies"].items():
        header, candidates = read_log(LOGS / f"{name}.jsonl")
        weights.add(header["weights"])
        parents |= {record["parent"] for record in candidates}
        assert {record["island"] for record in candidates} == {0, 1, 2}
        for problem, solved in zip(problems, results["solved"], strict=True):
            own = [record for record in candidates if record["problem"] == problem.id]
            assert [record["order"] for record in own] == list(range(1, len(own) + 1))
            solutions = [record["order"] for record in own if record["rewards"] == [1.0] * 3]
            assert solved == min(solutions, default=0)
            assert len(own) == 26 or 0 < solved <= len(own) <= 26
            for record in own:
                expected = task.reward(problem, record["answer"])
                assert record["rewards"] == pytest.approx(expected, abs=1e-6)
                assert not record["parent"] or own[record["parent"] - 1]["answer"]
    assert len(weights) == 3
    assert (len(parents) > 1) == (strategy == "evolve")


@pytest.mark.parametrize("strategy", ["evolve", "best_of_n"])
def test_a_killed_search_goes_on_to_the_same_log(trained, strategy, capsys):
    """Wherever the log was cut. Other flags leave the log alone."""
    flags = f"{QUICK} --goal all --strategy {strategy} --policies vpo --out out"
    run_search(trained, flags)
    log = LOGS / "vpo.jsonl"
    complete = log.read_text()
    after_a_line = complete.index("\n", len(complete) // 3) + 1
    for cut in (len(complete) // 2, len(complete) - 3, after_a_line):
        log.write_text(complete[:cut])
        run_search(trained, flags)
        assert log.read_text() == complete

    error = "vpo.jsonl: the log of another search"
    for flag in ("--seed 1", "--budget 30", "--temperature 0.5"):
        fails(trained, f"{flags} {flag}", capsys, error, "name another folder with --out")
    assert log.read_text() == complete


def test_islands_exchange_their_best(trained, monkeypatch):
    moved = []
    monkeypatch.setattr(Population, "migrate", lambda population: moved.append(population))
    monkeypatch.setattr(search, "MIGRATE_EVERY", 2)
    run_search(trained, f"{QUICK} --goal all --policies vpo --out out")
    assert len(moved) == len(set(moved)) == 3  # three problems, once each in their second batch


def test_a_child_begins_as_its_parent(trained, monkeypatch):
    """The first answer of a tiny set keeps a part of the parent; the policy writes the rest."""
    children = []
    child_prompt = search.child_prompt

    def recorded(policy, task, problem, m, parent, rng):
        prompt, prefix = child_prompt(policy, task, problem, m, parent, rng)
        children.append((parent, prompt, prefix.split()))
        return prompt, prefix

    monkeypatch.setattr(search, "child_prompt", recorded)
    run_search(trained, f"{QUICK} --goal all --policies vpo --out out")
    _, candidates = read_log(LOGS / "vpo.jsonl")
    firsts = candidates[::2]  # of each rollout of two answers
    lengths = []
    for (parent, prompt, prefix), first in zip(children, firsts, strict=True):
        answer = first["answer"].split()
        assert prompt.startswith("answers=2 bits")
        if parent:
            tag, *kept = prefix
            lengths.append(len(kept))
            words = parent.answer.split()
            assert tag == "<answer_1>"
            assert kept == words[: len(kept)]
            assert len(kept) < len(words)
            assert prompt.endswith(" ".join(prefix))
            assert not answer or answer[: len(kept)] == kept
            assert first["parent"] == parent.order
        else:
            assert not prefix
            assert first["parent"] == 0
    assert len(lengths) > 5
    assert max(lengths) > 0
    assert not any(second["parent"] for second in candidates[1::2])


HARD = "target = 2.5\ndef score(rewards, answer):\n    return sum(rewards)\n"
EASY = "target = 0\ndef score(rewards, answer):\n    return 1\n"


def easy_problems(run: str) -> set[str]:
    """What the policies solved in the screening of a run."""
    easy = set()
    for name in ("start", "grpo", "vpo"):
        _, candidates = read_log(Path(f"out/screen/{run}/{name}.jsonl"))
        easy |= {record["problem"] for record in candidates if record["score"] >= 2.5}
    return easy


def test_problems_are_hard_for_every_policy(trained, capsys):
    """What any policy solves in independent pools is left out, whichever policies are searched."""
    goal = Path("goal.py")
    goal.write_text(HARD)
    flags = "--among 3 --budget 12 --goal goal.py --policies grpo"
    run_search(trained, f"{flags} --screen 2 --out out")
    hard = set(json.loads(Path("out/search.json").read_text())["problems"])
    easy = easy_problems("toy-seed0")
    assert f"{len(hard)} of 3" in capsys.readouterr().out
    assert hard.isdisjoint(easy)
    assert len(hard | easy) == 3

    fails(trained, f"{flags} --screen 1 --out out1", capsys, "--screen 1: less than", "vpo holds")
    goal.write_text(EASY)
    error = "--screen 30: every problem is solved by then"
    fails(trained, f"{flags} --out out2", capsys, error)


def test_two_runs_are_searched(trained, capsys):
    """With one list of problems; the pools of the screening are not those of the search."""
    shutil.copytree(trained, "toy-seed1")
    change_config(Path("toy-seed1"), seed=1)
    Path("goal.py").write_text(HARD)
    flags = "--among 3 --budget 12 --policies grpo --goal goal.py --problems 1 --screen 2"
    run_search(trained, f"toy-seed1 {flags} --strategy best_of_n --out out")
    report = json.loads(Path("out/search.json").read_text())
    easy = easy_problems("toy-seed0") | easy_problems("toy-seed1")
    hard = [name for name in ("toy-test-0", "toy-test-1", "toy-test-2") if name not in easy]
    assert report["problems"] == hard[:1]
    assert len(report["policies"]["grpo"]) == 2
    printed = capsys.readouterr().out
    assert "1 problems, 12 candidates each, 2 runs" in printed
    head, row = [
        line for line in printed.splitlines() if "solved by 12" in line or line.startswith("GRPO ")
    ]
    assert "|" not in printed and len(row) < len(head)  # nobody to compare GRPO with
    for folder, seed in (("screen/toy-seed0", 1), ("screen/toy-seed1", 1), ("toy-seed0", 0)):
        header, _ = read_log(Path(f"out/{folder}/grpo.jsonl"))
        assert header["seed"] == seed


@pytest.mark.parametrize(
    "text, parts",
    [
        ("score = 1 / 0", ["ZeroDivisionError"]),
        ("x = 1", ["KeyError: 'score'"]),
        ("def score(rewards, answer):\n    return 'many'", ["failed", "ValueError"]),
        (
            "def score(rewards, answer):\n    return rewards[9]",
            ["score([", "failed", "IndexError"],
        ),
        ("def score(rewards, answer):\n    return float('nan')", ["nan is not a finite number"]),
        (
            "def score(rewards, answer):\n    raise SystemExit('one\\ntwo')",
            ["SystemExit: one two"],
        ),
        ("raise SystemExit(3)", ["SystemExit: 3"]),
    ],
)
def test_a_scorer_that_fails_is_named(trained, text, parts, capsys):
    Path("own.py").write_text(text)
    fails(trained, f"{QUICK} --goal own.py --out out", capsys, "--goal own.py", *parts)


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--goal own.py", ["--goal own.py: there is no such file"]),
        ("--budget 1", ["--budget 1: less than a rollout of vpo holds, 2 answers"]),
        ("--goal gold", ["--goal gold: take scalar, all", "block_1"]),
        ("--goal block_1=a", ["--goal block_1=a"]),
        ("--goal block_1=-1,block_2=2", ["none negative"]),
        ("--strategy hope", ["--strategy hope", "evolve"]),
        ("--policies vpo none", ["--policies none", "choose from start, start_sets, grpo, vpo"]),
    ],
)
def test_wrong_flags_are_named(trained, flags, parts, capsys):
    fails(trained, f"{QUICK} --out out {flags}", capsys, *parts)
    assert not Path("out").exists()


def test_a_run_without_checkpoints_is_refused(trained, capsys):
    fails(Path("nowhere"), "", capsys, "nowhere: no config.json")
    empty = Path("empty")
    empty.mkdir()
    shutil.copy(trained / "config.json", empty)
    fails(empty, "", capsys, "empty: holds no checkpoint yet")


def test_a_language_model_reads_the_parent_in_its_prompt():
    """It reads the answer, its rewards and the request. The rollout begins with no given words."""
    words = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    policy = Policy(None, PreTrainedTokenizerFast(tokenizer_object=words))
    task = load_task("maze")
    problem = task.problems("test", 1)[0]
    plain = build_prompt(policy, task, problem, 1)
    assert search.child_prompt(policy, task, problem, 1, None, random.Random(0)) == (plain, "")

    parent = candidate(1, [1.0, 0.5, 0.0, 1.0], answer="UP UP")
    prompt, prefix = search.child_prompt(policy, task, problem, 1, parent, random.Random(0))
    assert prefix == ""
    assert "An earlier answer was:\nUP UP\n" in prompt
    assert "completion 1, gold 0.5, diamond 0, avoid_lava 1" in prompt
    assert prompt.startswith(plain.rstrip()[:200])
    assert build_prompt(policy, task, problem, 1) == plain  # the task itself is as before


def test_the_scorer_of_the_documentation(trained, capsys):
    """The snippet is run as it stands."""
    documentation = (ROOT / "docs/own.md").read_text()
    snippet = re.search(r"```python\n(# my_goal.py.*?)```", documentation, re.DOTALL)[1]
    Path("my_goal.py").write_text(snippet)
    run_search(trained, f"{QUICK} --goal my_goal.py --policies vpo --out out")
    assert "VPO" in capsys.readouterr().out


@pytest.mark.parametrize("orders", [(1, 3, 4), (2, 3)])
def test_a_log_without_a_line_is_refused(orders, tmp_path):
    log = tmp_path / "vpo.jsonl"
    lines = [json.dumps(vars(Candidate(0, "a", order, 0, 0))) for order in orders]
    log.write_text("\n".join(["header", *lines]) + "\n")
    with pytest.raises(UserError, match="vpo.jsonl: damaged .a line is missing.*delete it"):
        search.read_batches(log, "header")


def test_a_damaged_log_is_one_clear_line(tmp_path):
    log = tmp_path / "vpo.jsonl"
    log.write_text('header\n{"batch": 0}\n{"ba\n')
    with pytest.raises(UserError, match="vpo.jsonl: damaged .*delete it"):
        search.read_batches(log, "header")


def test_other_weights_are_another_search(trained, capsys):
    """Guards against a log that goes on with a policy that was trained again in the same folder."""
    shutil.copytree(trained, "toy-seed0")
    flags = f"{QUICK} --goal all --policies vpo --out out"
    run_search(Path("toy-seed0"), flags)
    run_search(Path("toy-seed0"), flags)
    newest = sorted(Path("toy-seed0/vpo").glob("checkpoint-*"))[-1]
    shutil.copy("toy-seed0/start/model.safetensors", newest)
    fails(Path("toy-seed0"), flags, capsys, "vpo.jsonl: the log of another search")


def test_a_parent_without_room_in_the_context_is_not_shown(trained, monkeypatch):
    """Guards against a search that fails when its programs have grown long."""
    encode, sample = search.encode_prompts, search.Search.sample
    asked, sampled = [], []

    def encode_short(policy, prompts, max_new_tokens):
        asked.append(len(prompts[0].split()))
        if asked[-1] > 3:
            raise UserError("too long")
        return encode(policy, prompts, max_new_tokens)

    def record(self, children, G):
        sampled.extend(len(child.prompt.split()) for child in children)
        return sample(self, children, G)

    monkeypatch.setattr(search, "encode_prompts", encode_short)
    monkeypatch.setattr(search.Search, "sample", record)
    run_search(trained, f"{QUICK} --goal all --policies vpo --out out")
    assert max(asked) > 3 and max(sampled) == 3


def test_another_reward_is_another_search(capsys):
    """Guards against a log in which old scores stand beside new ones."""
    source = "from rewards import Fence\n\n\nclass Mine(Fence):\n    name = 'mine'\n"
    Path("mine.py").write_text(source)
    flags = "--task mine.py --warm-steps 5 --steps 1 --method vpo --eval-problems 0 --snapshots 0"
    train.main([*flags.split(), "--prompts-per-step", "1", "--out", "run"])
    flags = "--problems 2 --among 2 --budget 9 --policies vpo --out out"
    run_search(Path("run"), flags)
    reward = "return [2 * r for r in super(Mine, self).reward(problem, answer)]"
    Path("mine.py").write_text(
        f"{source}\n    def reward(self, problem, answer):\n        {reward}\n"
    )
    fails(Path("run"), flags, capsys, "vpo.jsonl: the log of another search")


def test_a_task_that_does_not_say_what_can_be_reached(trained, tmp_path_factory, capsys):
    """The table has a dash for what is unknown and says why; no problem is screened out."""
    folder = tmp_path_factory.mktemp("runs") / "fence-seed0"
    flags = "--task fence --warm-steps 20 --steps 1 --method vpo --eval-problems 0 --snapshots 0"
    train.main([*flags.split(), "--prompts-per-step", "1", "--out", str(folder)])
    capsys.readouterr()
    flags = "--problems 2 --among 3 --budget 9 --out out"
    run_search(folder, flags)
    printed = capsys.readouterr().out
    [row] = [line for line in printed.splitlines() if line.startswith("VPO ")]
    assert row.split()[1:3] == ["-", "-"]
    assert "task fence does not say what can be reached (Task.reachable)" in printed
    assert json.loads(Path("out/search.json").read_text())["targets"] == [None, None]
    assert not Path("out/screen").exists()

    Path("own.py").write_text("def score(rewards, answer):\n    return rewards[0]\n")
    run_search(folder, f"{flags} --goal own.py --out own")
    assert "-: own.py sets no target, so" in capsys.readouterr().out
    error = "--goal red: take scalar, all or a Python file, one of ann, bob, cid, or a weighting"
    fails(folder, f"{flags} --goal red", capsys, error, "as ann=2,cid=1")


def test_goals_of_a_task_without_names_of_objectives():
    task = Task()
    with pytest.raises(UserError, match="--goal gold: take scalar, all or a Python file$"):
        search.make_goal("gold", task)
    parent = candidate(1, [0.5, 1.0])
    task.prompt = lambda problem, m: "Write."
    text = search.task_with_parent(task, parent).prompt(Problem("1", None), 1)
    assert "objective 1 0.5, objective 2 1" in text


def test_two_runs_with_other_evaluations_share_the_first_ones_problems(trained, capsys):
    """Guards against a refusal for the runs' own --pool and --eval-problems, which do not matter here."""
    shutil.copytree(trained, "toy-seed1")
    change_config(Path("toy-seed1"), seed=1, pool=9, eval_problems=7)
    flags = "--among 3 --problems 2 --screen 0 --budget 12 --policies vpo --out out"
    search.main([str(trained), "toy-seed1", *flags.split()])
    assert "2 problems, 12 candidates each, 2 runs" in capsys.readouterr().out
    change_config(Path("toy-seed1"), m=1)
    with pytest.raises(SystemExit):
        search.main([str(trained), "toy-seed1", *flags.split()])
    assert "has --m 1, and" in capsys.readouterr().err
