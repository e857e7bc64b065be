"""The bridges to other trainers and searches. What needs trl or openevolve is skipped where they are not installed."""

import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from engine.models import load_policy, save_policy
from rewards import Problem, UserError, load_task, take_problems
from rollout import score_texts, write_answers
from tasks.code import Code
from tasks.code_files import read_problems
from vpo import ADVANTAGES, sample_weights, set_reward, vpo_advantage

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
INSTALL = "not installed: pip install -r examples/requirements.txt"
needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason=f"trl is {INSTALL}")
needs_openevolve = pytest.mark.skipif(
    not importlib.util.find_spec("openevolve"), reason=f"openevolve is {INSTALL}"
)
G, STEPS, METHODS = 4, 2, ("vpo", "group_vpo", "max_at_k", "gdpo", "maxrl")

# Whatever an untrained model writes holds answers; two or three objectives, and a reward below 0.
TASK = """
from rewards import Problem, Task

class Letters(Task):
    name, minimum, answer_words, m, eval_problems = "letters", -0.5, 4, 3, 4
    words = ("a", "b", "c", *(f"p{i}" for i in range(40)))

    def problems(self, split, n, seed=0, start=0):
        return [Problem(f"{split}-{i}", i) for i in range(start, start + n)]

    def prompt(self, problem, m):
        return "Write letters."

    def tiny_prompt(self, problem):
        return f"p{problem.data}"

    def find_answers(self, text, m):
        words = [word for word in text.split() if word in "abc"]
        return [" ".join(words[i::m]) for i in range(m) if words[i::m]]

    def reward(self, problem, answer):
        return [answer.split().count(x) - 0.5 * (x in "bc") for x in "abc"[:2 + problem.data % 2]]
"""

# One training of each method, which writes what reached the loss: prompts, completions, advantages, a row per step.
WORKER = """
import json, sys
from pathlib import Path
folder, examples, methods = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
sys.path.insert(0, examples)
import trl_vpo
for method in methods:
    config = trl_vpo.VPOConfig(
        output_dir=str(folder / "out"), task=str(folder / "letters.py"), model=str(folder / "start"), method=method,
        steps=STEPS, num_generations=G, per_device_train_batch_size=int(sys.argv[4]), shuffle_dataset=False, seed=3,
        max_new_tokens=8, save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=1e-3)
    trainer = trl_vpo.trainer_of(config)
    seen, loss = [], trainer._compute_loss
    def spy(model, inputs):
        read = lambda ids: trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        seen.append([read(inputs["prompt_ids"]), read(inputs["completion_ids"]), inputs["advantages"].tolist()])
        return loss(model, inputs)
    trainer._compute_loss = spy
    trainer.train()
    rank = trainer.accelerator.process_index
    (folder / f"{method}-{trainer.accelerator.num_processes}-{rank}.json").write_text(json.dumps(seen))
""".replace("STEPS", str(STEPS)).replace("=G,", f"={G},")


def example(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
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
    save_policy(*load_policy("tiny", load_task(str(folder / "letters.py"))), folder / "start")
    return folder


@needs_trl
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_advantages_that_reach_the_loss_are_ours(letters, ranks):
    """Guards against weightings that differ between ranks, groups torn apart, and rewards normalised twice. Of three
    groups of four on two ranks the middle one is split. Stock TRL: ours with its eps, times its standard deviation."""
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        2,
        "--main_process_port",
        0,
    ]
    done = command(
        sys.executable,
        *launch[: 0 if ranks == 1 else None],
        letters / "worker.py",
        letters,
        EXAMPLES,
        ",".join(METHODS),
        3 * G // ranks,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    task, factor = load_task(str(letters / "letters.py")), math.sqrt((G - 1) / G)
    for method in METHODS:
        seen = [
            json.loads((letters / f"{method}-{ranks}-{rank}.json").read_text())
            for rank in range(ranks)
        ]
        assert ranks == 1 or {*seen[0][0][0]} & {*seen[1][0][0]}  # a group is split
        for step in range(STEPS):
            rows = sorted(row for rank in seen for row in zip(*rank[step], strict=True))
            rows.sort(key=lambda row: int(row[0].split("p")[-1]))
            numbers = [int(row[0].split("p")[-1]) for row in rows[::G]]
            assert numbers == [3 * step, 3 * step + 1, 3 * step + 2] and len(rows) == 3 * G
            m = 3 if method == "vpo" else 1
            problems = take_problems(task, "train", 3, start=3 * step)
            scored = score_texts(task, problems, [text for _, text, _ in rows], m)
            seed = 3 * 1_000_003 + 3 * step
            if method == "vpo":
                expected = torch.cat(
                    [
                        factor
                        * vpo_advantage(
                            scored.vectors[p : p + 1, ..., : int(scored.objective_mask[p].sum())],
                            scored.mask[p : p + 1],
                            floor=task.minimum,
                            eps=1e-4 * factor,
                            generator=torch.Generator().manual_seed(seed + p),
                        )
                        for p in range(3)
                    ]
                )
            else:
                expected = ADVANTAGES[method](
                    scored.vectors,
                    scored.scalars,
                    scored.mask,
                    objective_mask=scored.objective_mask,
                    floor=task.minimum,
                    generator=torch.Generator().manual_seed(seed),
                    n_weights=100,
                )
            got = torch.tensor([advantage for _, _, advantage in rows]).view(3, G)
            assert expected.abs().max() > 0.5 and torch.allclose(
                got, expected, atol=1e-5, rtol=0
            ), (method, step)


@needs_trl
@pytest.mark.parametrize(
    "flags, named",
    [
        ({"scale_rewards": "batch"}, "--scale_rewards batch"),
        ({"scale_rewards": False}, "--scale_rewards none"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "--multi_objective_aggregation normalize_then_sum",
        ),
        ({"remove_unused_columns": True}, "--remove_unused_columns True"),
        (
            {"generation_kwargs": {"stop_strings": ["</answer_1>"]}},
            "--generation_kwargs stop_strings",
        ),
        ({"generation_kwargs": {"max_time": 1}}, "--generation_kwargs max_time"),
        ({"data": "x.jsonl"}, "--data x.jsonl"),
        (
            {"generation_kwargs": {"do_sample": False}},
            "--generation_kwargs do_sample: a group must be sampled",
        ),
        ({"reward_weights": [-1.0]}, "--reward_weights"),
        ({"num_generations": 0}, "--num_generations 0: must be"),
        (
            {"resume_from_checkpoint": "/nowhere"},
            "--resume_from_checkpoint /nowhere: no such folder",
        ),
        (
            {"method": "group_vpo", "num_generations_eval": 2, "eval_strategy": "steps"},
            "--num_generations_eval 2: subset",
        ),
        ({"max_completion_length": 18}, "--max_completion_length 18: cuts a set of m = 3"),
        ({"method": "goal_conditioned"}, "--method goal_conditioned: choose from grpo"),
        ({"task": "mazes"}, "--task mazes: unknown"),
        ({"model": "tiny"}, "--model tiny: no checkpoint"),
        ({"model": "./nowhere"}, "--model ./nowhere: no such folder"),
        ({"steps": 0}, "--steps 0"),
        ({"alpha": 0.0}, "alpha = 0"),
        ({"subset": 8, "num_generations": 8}, "subset s = 8"),
        (
            {"per_device_train_batch_size": 10},
            r"generation_batch_size \(10\) must be divisible by num_generations",
        ),
    ],
)
def test_settings_that_would_undo_vpo_are_refused_by_name(letters, tmp_path, flags, named):
    trl_vpo = example("trl_vpo")
    given = {
        "output_dir": str(tmp_path),
        "task": str(letters / "letters.py"),
        "model": str(letters / "start"),
    }
    with pytest.raises((UserError, ValueError), match=named):
        trl_vpo.trainer_of(trl_vpo.VPOConfig(**given | flags))


@needs_trl
@pytest.mark.parametrize(
    "flags, named",
    [
        ("--scale_rewards none", "--scale_rewards none"),
        ("--lr 1", "--lr"),
        ("--n_weights 0", "n_weights = 0"),
        ("--steps few", "--steps"),
        ("--max_completion_length 18", "--max_completion_length 18"),
    ],
)
def test_a_mistake_is_one_line(letters, capsys, flags, named):
    given = [
        "--task",
        str(letters / "letters.py"),
        "--model",
        str(letters / "start"),
        *flags.split(),
    ]
    with pytest.raises(SystemExit) as stop:
        example("trl_vpo").main(given)
    (error,) = (line for line in capsys.readouterr().err.splitlines() if ": error: " in line)
    assert stop.value.code == 2 and named in error


def test_verl_gets_scalars_and_a_group_the_same_weightings():
    """As NaiveRewardManager of veRL 0.9.1 calls it: by keyword, extra_info with fields of its own, in any process."""
    verl = example("verl_reward")
    assert [*inspect.signature(verl.compute_score).parameters][:4] == [
        "data_source",
        "solution_str",
        "ground_truth",
        "extra_info",
    ]
    row = json.loads(json.dumps(verl.rows("maze", "train", 2, 3)))[1]
    task = load_task("maze")
    problem, other = take_problems(task, "train", 2)[::-1]
    routes = [task.demonstration(problem, random.Random(i)) for i in range(3)]
    assert row["prompt"][0]["content"] == task.prompt(problem, 3)

    def score(text: str, **extra) -> dict:
        return verl.compute_score(
            data_source=row["data_source"],
            solution_str=text,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"] | {"num_turns": None, "rollout_reward_scores": {}},
            **extra,
        )

    sets = [write_answers(task, routes), write_answers(task, [routes[0]] * 3), "nothing"]
    results = [score(text) for text in sets]
    scored = score_texts(task, [problem], sets, 3)
    weights = sample_weights(
        100,
        4,
        generator=torch.Generator().manual_seed(
            zlib.crc32(row["reward_model"]["ground_truth"].encode())
        ),
    )
    expected = set_reward(scored.vectors, weights[None], scored.mask)[0].tolist()
    assert [result["score"] for result in results] == pytest.approx(expected) and expected[
        0
    ] >= expected[1] > 0
    assert all(type(value) is float for result in results for value in result.values())
    assert {tuple(result) for result in results} == {
        ("score", "scalar", "best_in_rollout", "answers", "set_diversity")
    } and results[2]["score"] == 0
    assert score(sets[0], n_weights=7)["score"] != expected[0] and other.id != problem.id
    for truth, m in (
        ("72", 3),
        (row["reward_model"]["ground_truth"], -1),
        (row["reward_model"]["ground_truth"], "3"),
    ):
        with pytest.raises(UserError, match=f"m = {m}: no row of maze"):
            verl.compute_score("maze", "", truth, {"m": m})
    assert (
        "actor.use_dynamic_bsz=True" in verl.__doc__
    )  # veRL's defaults set no size of a micro-batch, and it stops


@needs_openevolve
def test_openevolve_keeps_a_cell_per_set_of_passed_tests(tmp_path):
    """Its own search with our evaluator against a recorded model; what it made of them is read from its database."""
    vectors = {
        "def qualifiers(scores, places):\n    " + body: vector
        for body, vector in (
            ("return []", "00000000"),
            ("return sorted(scores)[::-1]", "00000010"),
            ("return sorted(", "00000000"),
            (
                "s = sorted(scores)[::-1]\n    return [x for x in s if x >= s[places - 1]]",
                "11111111",
            ),
        )
    }
    answers, asked = itertools.cycle(vectors), []

    class Model(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send({"object": "list", "data": []})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] != "m":
                return self.send_error(404, "no such model")
            if body["max_tokens"] > 1:  # else the evaluator asks whether anybody is there
                asked.append(body)
            text = f"Here it is:\n```python\n{next(answers)}\n```"
            self.send(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": "stop",
                            "message": {"role": "assistant", "content": text},
                        }
                    ],
                }
            )

        def send(self, reply: dict):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done, unknown = (search(tmp_path, server.server_address[1], model) for model in ("m", "n"))
        server.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        unknown.returncode == 1
        and "/v1: refuses the model n (HTTP Error 404: no such model" in unknown.stderr
    )
    database = tmp_path / "checkpoints" / "checkpoint_20"
    found = [json.loads(path.read_text()) for path in (database / "programs").iterdir()]
    kept, tests = (
        json.loads((database / "metadata.json").read_text()),
        [f"test_{i}" for i in range(1, 9)],
    )
    known = vectors | {
        (EXAMPLES / "openevolve/initial_program.py").read_text(): "11111000"
    }  # the obvious reading
    for program in found:
        passed = [program["metrics"][test] for test in tests]
        assert "".join(f"{x:.0f}" for x in passed) == known[program["code"]]
        assert program["metrics"] == {"combined_score": sum(passed) / 8} | dict(
            zip(tests, passed, strict=True)
        )
    metrics = {program["id"]: program["metrics"] for program in found}
    for cell, id in (
        (cell, id) for island in kept["island_feature_maps"] for cell, id in island.items()
    ):
        pairs = zip(
            cell.split("-"), tests, strict=True
        )  # 0 failed, 2 passed, 1 where all had been alike so far
        assert all(int(bin) in (1, 2 * metrics[id][test]) for bin, test in pairs)
    assert (
        len(kept["island_feature_maps"][0]) >= 3
        and metrics[kept["best_program_id"]]["combined_score"] == 1
    )
    assert all(
        {test: (x["min"], x["max"]) for test, x in kept["feature_stats"].items()}[test] == (0, 1)
        for test in tests
    )
    assert all("seed" not in body and body["temperature"] == 1.0 for body in asked)
    assert all(body["messages"][0]["content"] == prompt_of("lists-045") for body in asked)


def prompt_of(id: str) -> str:
    """What a policy was trained on: the problem's prompt for one answer."""
    problem = next(x for x in read_problems(str(ROOT / "tasks/open_cases.jsonl")) if x["id"] == id)
    return Code.prompt(None, Problem(id, problem), 1)


def search(out: Path, port: int, model: str = "m") -> subprocess.CompletedProcess:
    """OpenEvolve's own command, as the evaluator's first lines give it."""
    return command(
        Path(sys.executable).with_name("openevolve-run"),
        "initial_program.py",
        "evaluator.py",
        "--config",
        "config.yaml",
        "--primary-model",
        model,
        "--api-base",
        f"http://127.0.0.1:{port}/v1",
        "--iterations",
        20,
        "--output",
        out,
        cwd=EXAMPLES / "openevolve",
    )


@needs_openevolve
def test_a_server_that_does_not_answer_is_named(tmp_path):
    done = search(tmp_path, 9)  # the discard port: nobody listens
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(
        r"^http://127.0.0.1:9/v1: no model answers there \(.*refused.*\); start vllm serve or ",
        done.stderr,
        re.MULTILINE,
    )
