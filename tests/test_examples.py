"""The bridges to other trainers and searches. Tests are skipped where trl or openevolve is missing."""

import importlib.util
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_rollout import load_random_model
from test_vpo import scored_of

from engine.answers import write_answers
from engine.models import save_model
from engine.tasks import load_task, take_problems
from rewards import Fence, Problem, Task, parse_answers
from rollout import load_policy, random_generator, score
from tasks.code import Code
from tasks.code_files import read_problems
from vpo import (
    ADVANTAGES,
    Estimator,
    answers_per_rollout,
    group_normalize,
    sample_weights,
    set_reward,
)

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
INSTALL = "not installed: pip install -r examples/requirements.txt"
needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason=f"trl is {INSTALL}")
needs_openevolve = pytest.mark.skipif(
    not importlib.util.find_spec("openevolve"), reason=f"openevolve is {INSTALL}"
)
G = 4  # rollouts per prompt
P = 3  # prompts per step
STEPS = 2
SEED = 3
METHODS = ("vpo", "multi_rlvr", "group_vpo", "max_at_k", "gdpo", "maxrl")

# A task on which an untrained model finds answers, with two or three objectives and rewards below 0.
TASK = """
from rewards import Problem, Task

class Letters(Task):
    name, minimum, answer_words = "letters", -0.5, 4
    defaults = {"eval_problems": 4}
    words = ("a", "b", "c", *(f"p{i}" for i in range(40)))

    def problems(self, split, n, seed=0, start=0):
        return [Problem(f"{split}-{i}", i) for i in range(start, start + n)]

    def prompt(self, problem, m):
        return "Write letters."

    def tiny_prompt(self, problem):
        return f"p{problem.data}"

    def without_thoughts(self, text):
        words = [word for word in text.split() if word in "abc"]
        answers = [f"<answer_{i}> {' '.join(words[i - 1 :: 3])} </answer_{i}>" for i in (1, 2, 3)]
        return " ".join(answers[: len(words)])

    def reward(self, problem, answer):
        return [answer.split().count(x) - 0.5 * (x in "bc") for x in "abc"[:2 + problem.data % 2]]
"""

# Trains with each method. It writes what reached the loss: a list per step of prompts, completions
# and advantages.
WORKER = f"""
import json, sys
from pathlib import Path

folder, examples, methods, batch_size = sys.argv[1:]
folder = Path(folder)
sys.path.insert(0, examples)
import trl_vpo

for method in methods.split(","):
    config = trl_vpo.VPOConfig(
        output_dir=str(folder / "out"), task=str(folder / "letters.py"), model=str(folder / "start"),
        method=method, steps={STEPS}, num_generations={G}, per_device_train_batch_size=int(batch_size),
        shuffle_dataset=False, seed={SEED}, max_new_tokens=8, save_strategy="no", report_to="none",
        disable_tqdm=True, learning_rate=1e-3,
    )
    trainer = trl_vpo.build_trainer(config)
    compute_loss = trainer._compute_loss
    steps = []

    def read(ids):
        return trainer.processing_class.batch_decode(ids, skip_special_tokens=True)

    def spy(model, inputs):
        texts = [read(inputs["prompt_ids"]), read(inputs["completion_ids"])]
        steps.append([*texts, inputs["advantages"].tolist()])
        return compute_loss(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    accelerator = trainer.accelerator
    name = f"{{method}}-{{accelerator.num_processes}}-{{accelerator.process_index}}.json"
    (folder / name).write_text(json.dumps(steps))
accelerator.wait_for_everyone()  # a rank that ends first can abort the other
accelerator.end_training()
"""


def script(name: str, folder: Path = EXAMPLES):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def command(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """A command in a process of its own, with one thread and no network."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    """A folder with the task, an untrained model that knows its words, and the worker."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "letters.py").write_text(TASK)
    (folder / "worker.py").write_text(WORKER)
    policy = load_policy("tiny", load_task(str(folder / "letters.py")))
    save_model(policy.model, policy.tokenizer, folder / "start")
    return folder


def test_the_advantages_of_micro_vpo_are_ours():
    micro = script("micro_vpo")
    rewards = torch.rand(4, 8, 3, 3, generator=torch.Generator().manual_seed(0))  # (P, G, m, k)
    weights = micro.random_users(4, 100)  # (P, K, k)
    expected = group_normalize(set_reward(rewards, weights))
    torch.testing.assert_close(micro.vpo_advantage(rewards, weights), expected)
    expected = ADVANTAGES["grpo"](scored_of(rewards[:, :, :1]), Estimator())
    torch.testing.assert_close(micro.grpo_advantage(rewards[:, :, :1]), expected)


@pytest.mark.parametrize("method", ADVANTAGES)
def test_the_mean_of_a_groups_advantages_is_0(method):
    """What the reward function for TRL relies on: TRL subtracts the mean of a group."""
    m = answers_per_rollout(method, 3)
    rewards = torch.rand(5, G, m, 3, generator=torch.Generator().manual_seed(0))
    answer_mask = rewards[..., 0] > 0.1
    objective_mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    scored = scored_of(rewards, answer_mask, objective_mask=objective_mask, minimum=-0.5)
    A = ADVANTAGES[method](scored, Estimator())
    assert A.abs().max() > 0.1
    assert A.mean(1).abs().max() < 1e-6


@needs_trl
def test_the_reward_function_returns_advantages_and_logs_rewards():
    """Two fences of one color are paid once, and R is the mean over users of the better fence. Only a rollout that has
    ended is an answer as a whole."""
    trl_vpo = script("trl_vpo")
    policy = load_random_model("llama")
    problems = Fence().problems("train", 1)

    def called(method: str, m: int, room: int, prompts: list[str], ids: list) -> tuple[list, dict]:
        logged = {}
        config = SimpleNamespace(method=method, n_weights=9, alpha=1.0, subset=0, seed=0)
        config.max_completion_length = room
        reward = trl_vpo.AdvantageReward(config, policy, Fence(), problems, m)
        return reward(prompts, ids, [0, 0], [2, 2], log_metric=logged.__setitem__), logged

    red, grey = " ".join(["red"] * 6), " ".join(["grey"] * 6)
    texts = [f"1. {red}\n2. {red}", f"1. {red}</think>1. {grey}"]
    ids = policy.tokenizer(texts)["input_ids"]
    advantages, logged = called("multi_rlvr", 2, 500, ["Paint!", "Paint!<think>"], ids)
    assert advantages == pytest.approx([-1, 1], abs=0.001)
    assert logged["R"] == pytest.approx((1 / 3 + 0.35) / 2, abs=0.005)
    assert logged["best_in_rollout"] == pytest.approx((1 / 3 + 0.35) / 2)
    assert logged["scalar"] == pytest.approx((1 / 3 + 1 / 3 + 0.35 + 0) / 4)

    ids = policy.tokenizer(red, add_special_tokens=False)["input_ids"]
    for room, scalar in ((len(ids), 0), (len(ids) + 1, 1 / 3)):
        _, logged = called("grpo", 1, room, ["Paint!"] * 2, [ids] * 2)
        assert logged["scalar"] == pytest.approx(scalar)


@needs_trl
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_advantages_that_reach_the_loss_are_ours(letters, ranks):
    """Guards against preference weights that differ between ranks and rewards normalised twice. Of
    three groups of four, two ranks split the second one."""
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0"
    launcher = launch.split() if ranks == 2 else []
    arguments = [letters, EXAMPLES, ",".join(METHODS), P * G // ranks]
    done = command(sys.executable, *launcher, letters / "worker.py", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]

    task = load_task(str(letters / "letters.py"))
    for method in METHODS:
        logs = []
        for rank in range(ranks):
            logs.append(json.loads((letters / f"{method}-{ranks}-{rank}.json").read_text()))
        if ranks == 2:
            prompts, other_prompts = (set(log[0][0]) for log in logs)
            assert prompts & other_prompts, "no group is split"
        for step in range(STEPS):
            check_advantages(task, method, step, [log[step] for log in logs])


def check_advantages(task: Task, method: str, step: int, logs: list) -> None:
    """Compare what reached the loss of one step, a log per rank, with the estimator of vpo.py."""
    rows = []  # (number of the problem, prompt, completion, advantage), those of a group side by side
    for prompts, completions, advantages in logs:
        for prompt, *rest in zip(prompts, completions, advantages, strict=True):
            rows.append((int(prompt.split("p")[-1]), prompt, *rest))
    rows.sort()
    first = P * step
    assert [row[0] for row in rows] == [first + i // G for i in range(P * G)]

    m = 3 if method in ("vpo", "multi_rlvr") else 1
    problems = take_problems(task, "train", P, start=first)
    answers = [parse_answers(row[2], task, m) for row in rows]
    scored = score(task, problems, answers, m)
    generator = random_generator(SEED, first, "weights")
    expected = ADVANTAGES[method](scored, Estimator(generator=generator))
    actual = torch.tensor([row[3] for row in rows]).view(P, G)
    assert expected.abs().max() > 0.5
    assert torch.allclose(actual, expected, atol=1e-5, rtol=0), (method, step)


@needs_trl
@pytest.mark.parametrize(
    "flags",
    [
        "--scale_rewards batch",
        "--multi_objective_aggregation normalize_then_sum",
        '--generation_kwargs {"stop_strings":["</answer_1>"]}',
        '--generation_kwargs {"seed":1}',
        "--reward_weights -1.0",
        "--max_completion_length 18",
        "--method goal_conditioned",
        "--subset 8",
        "--per_device_train_batch_size 10",
    ],
)
def test_settings_that_would_undo_vpo_are_refused_by_name(letters, tmp_path, capsys, flags):
    files = f"--task {letters / 'letters.py'} --model {letters / 'start'} --output_dir {tmp_path}"
    with pytest.raises(SystemExit) as stop:
        script("trl_vpo").main([*files.split(), *flags.split()])
    lines = capsys.readouterr().err.splitlines()
    (error,) = (line for line in lines if ": error: " in line)
    named = {"--subset": "a set of s = 8", "--per_device_train_batch_size": "divisible"}
    name = flags.split()[0]
    assert stop.value.code == 2 and named.get(name, name) in error


def test_verl_gets_scalars_and_a_group_the_same_weights():
    """The reward function is called as veRL 0.9.1 calls it: by keyword, with fields of its own."""
    verl = script("verl_reward")
    parameters = list(inspect.signature(verl.compute_score).parameters)
    assert parameters[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
    # In veRL's defaults no size of a micro-batch is set, and it stops.
    assert "actor.use_dynamic_bsz=True" in verl.__doc__

    task = load_task("maze", "a language model")
    _, problem = take_problems(task, "train", 2)
    row = json.loads(json.dumps(verl.rows("maze", "train", 2, 3)[1]))
    assert row["prompt"][0]["content"] == task.prompt(problem, 3)
    truth = row["reward_model"]["ground_truth"]

    def score_text(text: str, **options) -> dict:
        return verl.compute_score(
            data_source=row["data_source"],
            solution_str=text,
            ground_truth=truth,
            extra_info=row["extra_info"] | {"num_turns": None, "rollout_reward_scores": {}},
            **options,
        )

    routes = [task.demonstration(problem, random.Random(i)) for i in range(3)]
    texts = [write_answers(task, routes), write_answers(task, routes[:1] * 3), "nothing"]
    results = [score_text(text) for text in texts]
    scored = score(task, [problem], [routes, routes[:1] * 3, []], 3)
    generator = torch.Generator().manual_seed(zlib.crc32(truth.encode()))
    weights = sample_weights(1, 100, 4, generator=generator)
    expected = set_reward(scored.vectors, weights, scored.answer_mask)[0].tolist()
    assert [result["score"] for result in results] == pytest.approx(expected)
    assert expected[0] >= expected[1] > 0
    assert [result["answers"] for result in results] == pytest.approx([1, 1 / 3, 0])
    assert results[2]["score"] == 0
    for result in results:
        assert list(result) == ["score", "scalar", "best_in_rollout", "answers", "set_diversity"]
        assert {type(value) for value in result.values()} == {float}
    assert score_text(texts[0], n_weights=7)["score"] != expected[0]


def test_verl_reads_answers_of_a_language_model():
    """Guards against the rules of the tiny model, which reads no numbered lines."""
    verl = script("verl_reward")
    truth = verl.rows("fence", "train", 1, 2)[0]["reward_model"]["ground_truth"]
    text = "1. red red red red red red\n2. blue blue blue blue blue blue"
    result = verl.compute_score("fence", text, truth, {"m": 2})
    assert result["scalar"] == pytest.approx(1 / 3)
    assert result["score"] == pytest.approx(0.5, abs=0.05)  # E max(w_1, w_2) of three weights
    # veRL's prompt does not end with "1.", as that of train.py does.
    assert verl.compute_score("fence", f"Two fences:\n{text}", truth, {"m": 2}) == result


# What the recorded model answers in turn, and which of the eight tests each program passes.
BODIES = {
    "return []": "00000000",
    "return sorted(scores)[::-1]": "00000010",
    "return sorted(": "00000000",
    "s = sorted(scores)[::-1]\n    return [x for x in s if x >= s[places - 1]]": "11111111",
}
PROGRAMS = {
    f"def qualifiers(scores, places):\n    {body}": passed for body, passed in BODIES.items()
}
TESTS = [f"test_{number}" for number in range(1, 9)]


class RecordedModel(BaseHTTPRequestHandler):
    """A server of the model `m`, which answers with the programs in turn and keeps the requests."""

    answers = itertools.cycle(PROGRAMS)
    requests: list[dict] = []

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "m":
            self.send_error(404, "no such model")
            return
        if body["max_tokens"] > 1:  # else the evaluator asks whether anybody is there
            self.requests.append(body)
        text = f"Here it is:\n```python\n{next(self.answers)}\n```"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        self.reply(completion | {"choices": [choice]})

    def reply(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args) -> None:
        pass


@needs_openevolve
def test_openevolve_keeps_a_cell_per_set_of_passed_tests(tmp_path):
    """OpenEvolve's own search with our evaluator against a recorded model."""
    with ThreadingHTTPServer(("127.0.0.1", 0), RecordedModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = search(tmp_path, server.server_port)
        unknown = search(tmp_path, server.server_port, "n")
        server.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    nobody = search(tmp_path, 9)  # the discard port: nobody listens
    assert unknown.returncode == nobody.returncode == 1
    assert "/v1: refuses the model n (HTTP Error 404: no such model" in unknown.stderr
    assert "http://127.0.0.1:9/v1: no model answers there" in nobody.stderr
    assert "Traceback" not in nobody.stderr
    for request in RecordedModel.requests:
        assert "seed" not in request
        assert request["temperature"] == 1.0
        assert request["messages"][0]["content"] == prompt_of("lists-045")

    database = tmp_path / "checkpoints/checkpoint_20"
    initial = (EXAMPLES / "openevolve/initial_program.py").read_text()
    passed_by = PROGRAMS | {initial: "11111000"}  # the obvious reading of the problem
    metrics_of = {}
    for path in (database / "programs").iterdir():
        program = json.loads(path.read_text())
        metrics = dict(program["metrics"])
        metrics_of[program["id"]] = program["metrics"]
        mean = metrics.pop("combined_score")
        assert list(metrics) == TESTS
        assert mean == sum(metrics.values()) / 8
        assert [f"{metric:.0f}" for metric in metrics.values()] == list(passed_by[program["code"]])
    check_cells(json.loads((database / "metadata.json").read_text()), metrics_of)


def check_cells(metadata: dict, metrics_of: dict[str, dict]) -> None:
    """The database has a cell per set of passed tests, and the best program passes all of them."""
    for island in metadata["island_feature_maps"]:
        for cell, program in island.items():
            for bin, test in zip(cell.split("-"), TESTS, strict=True):
                # 0: failed, 2: passed, 1: until then all programs were alike.
                assert int(bin) in (1, 2 * metrics_of[program][test])
    assert len(metadata["island_feature_maps"][0]) >= 3
    assert metrics_of[metadata["best_program_id"]]["combined_score"] == 1
    for test in TESTS:
        stats = metadata["feature_stats"][test]
        assert (stats["min"], stats["max"]) == (0, 1)


def prompt_of(id: str) -> str:
    """What a policy was trained on: the problem's prompt for one answer."""
    problems = read_problems(str(ROOT / "tasks/open_cases.jsonl"))
    (problem,) = (problem for problem in problems if problem["id"] == id)
    return Code.prompt(None, Problem(id, problem), 1)


def search(out: Path, port: int, model: str = "m") -> subprocess.CompletedProcess:
    """OpenEvolve's own command, as the evaluator's first lines give it."""
    openevolve_run = Path(sys.executable).with_name("openevolve-run")
    words = "initial_program.py evaluator.py --config config.yaml --iterations 20"
    server = ["--primary-model", model, "--api-base", f"http://127.0.0.1:{port}/v1"]
    folder = EXAMPLES / "openevolve"
    return command(openevolve_run, *words.split(), *server, "--output", out, cwd=folder)
