"""The bridges to TRL and OpenEvolve. Tests are skipped where one is missing."""

import importlib.util
import itertools
import json
import os
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LETTERS, ROOT, fails, load_random_model
from transformers import AutoModelForCausalLM

from engine.models import save_model
from engine.tasks import load_task, take_problems
from rewards import Fence, Problem, Task, parse_answers
from rollout import StopRule, load_policy, random_generator, score
from tasks.code import Code
from tasks.code_files import read_problems
from vpo import ADVANTAGES, Options

EXAMPLES = ROOT / "examples"
INSTALL = "not installed: pip install -r examples/requirements.txt"
needs_openevolve = pytest.mark.skipif(
    not importlib.util.find_spec("openevolve"), reason=f"openevolve is {INSTALL}"
)
G = 4  # rollouts per prompt
P = 3  # prompts per step
STEPS = 3
LAUNCH = {
    "two": "--multi_gpu --num_processes 2",
    "fsdp": "--num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP",
}
SEED = 3
METHODS = ("vpo", "group_vpo")

# Trains with each method. It writes what reached the loss: a list per step of prompts, completions
# and advantages; and the trained models. Rollouts are sampled, and those of a script, which is the same
# on one rank and on two, take their place.
WORKER = f"""
import json, random, sys
from pathlib import Path

folder, examples, engine, methods, batch_size = sys.argv[1:]
folder = Path(folder)
sys.path.insert(0, examples)
import trl_vpo


def train(method, name, resume=None):
    config = trl_vpo.VPOConfig(
        output_dir=str(folder / name), task=str(folder / "letters.py"), model=str(folder / "start"),
        method=method, max_steps={STEPS}, num_generations={G}, per_device_train_batch_size=int(batch_size),
        shuffle_dataset=False, seed={SEED}, max_new_tokens=8, save_steps=2, report_to="none",
        disable_tqdm=True, learning_rate=1e-3,
    )
    trainer = trl_vpo.build_trainer(config)
    accelerator = trainer.accelerator
    tokenizer = trainer.processing_class
    generate, compute_loss = trainer._generate_single_turn, trainer._compute_loss
    steps = []

    def from_script(prompt_ids, *rest):
        sampled, _ = generate(prompt_ids, *rest)
        assert len(sampled) == len(prompt_ids)
        first = accelerator.process_index * len(prompt_ids)
        rollouts = []
        for row in range(first, first + len(prompt_ids)):
            rng = random.Random(f"{{trainer.state.global_step}} {{row}}")
            words = rng.choices("abc", k=rng.randint(2, 20))
            rollouts.append(tokenizer.convert_tokens_to_ids(words) + [tokenizer.eos_token_id])
        return rollouts, None

    def spy(model, inputs):
        texts = [tokenizer.batch_decode(inputs[x], skip_special_tokens=True) for x in ("prompt_ids", "completion_ids")]
        steps.append([*texts, inputs["advantages"].tolist()])
        return compute_loss(model, inputs)

    trainer._generate_single_turn, trainer._compute_loss = from_script, spy
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    (folder / f"{{name}}-{{accelerator.process_index}}.json").write_text(json.dumps(steps))
    accelerator.wait_for_everyone()  # a rank that ends first can abort the other
    return accelerator


for method in methods.split(","):
    accelerator = train(method, f"{{engine}}-{{method}}")
train(method, f"{{engine}}-resumed", str(folder / f"{{engine}}-{{method}}/checkpoint-2"))
accelerator.end_training()
"""


def command(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """A command in a process of its own, with one thread and no network."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def trl_vpo():
    """The bridge to TRL."""
    pytest.importorskip("trl", reason=f"trl is {INSTALL}")
    return importlib.import_module("examples.trl_vpo")


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    """A folder with the task, an untrained model that knows its words, and the worker."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "letters.py").write_text(LETTERS)
    (folder / "worker.py").write_text(WORKER)
    policy = load_policy("tiny", load_task(str(folder / "letters.py")))
    save_model(policy.model, policy.tokenizer, folder / "start")
    return folder


def test_the_reward_function_returns_advantages_and_logs_rewards(trl_vpo):
    """Two fences of one color are paid once; R is the mean over users; a rollout cut off is no answer as a whole."""
    policy = load_random_model("llama")
    problems = Fence().problems("train", 1)

    def called(method: str, m: int, room: int, prompts: list[str], ids: list) -> tuple[list, dict]:
        logged = {}
        config = SimpleNamespace(method=method, n_weights=9, alpha=1.0, subset=0, seed=0)
        config.max_completion_length = room
        reward = trl_vpo.AdvantageReward(config, policy, Fence(), problems, m)
        return reward(prompts, ids, [0, 0], log_metric=logged.__setitem__), logged

    red, grey = " ".join(["red"] * 6), " ".join(["grey"] * 6)
    texts = [f"1. {red}\n2. {red}", f"1. {red}</think>1. {grey}"]
    ids = policy.tokenizer(texts)["input_ids"]
    advantages, logged = called("multi_rlvr", 2, 500, ["Paint!", "Paint!<think>"], ids)
    assert advantages == pytest.approx([-1, 1], abs=0.001)
    assert logged["R"] == pytest.approx((1 / 3 + 0.35) / 2, abs=0.005)
    assert logged["scalar"] == pytest.approx((1 / 3 + 1 / 3 + 0.35 + 0) / 4)

    ids = policy.tokenizer(red, add_special_tokens=False)["input_ids"]
    for room, scalar in ((len(ids), 0), (len(ids) + 1, 1 / 3)):
        _, logged = called("grpo", 1, room, ["Paint!"] * 2, [ids] * 2)
        assert logged["scalar"] == pytest.approx(scalar)


def trained(folder: Path, engine: str) -> Path:
    """Train with both methods, STEPS updates, with the worker; the last one is resumed, too."""
    ranks = 2 if engine in LAUNCH else 1
    launch = []
    if ranks == 2:
        words = f"-m accelerate.commands.launch {LAUNCH[engine]} --main_process_port 0"
        launch = words.split()
    arguments = [folder, EXAMPLES, engine, ",".join(METHODS), P * G // ranks]
    done = command(sys.executable, *launch, folder / "worker.py", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    task = load_task(str(folder / "letters.py"))
    for method in METHODS:
        logs = []
        for rank in range(ranks):
            logs.append(json.loads((folder / f"{engine}-{method}-{rank}.json").read_text()))
        prompts = [set(log[0][0]) for log in logs]
        assert prompts[0] & prompts[-1], "no group is split"
        for step in range(STEPS):
            check_advantages(task, method, step, [log[step] for log in logs])
    return folder


@pytest.fixture(scope="module")
def one_rank(letters, trl_vpo) -> Path:
    return trained(letters, "one")


@pytest.mark.parametrize("engine", LAUNCH)
def test_the_advantages_and_the_weights_of_two_ranks_are_those_of_one(one_rank, engine):
    """Data parallel and FSDP2. Guards against preference weights that differ between ranks, rewards normalised twice,
    and checkpoints in shards. Of three groups of four, two ranks split the second one."""
    folder = trained(one_rank, engine)
    start = weights_of(folder / "start")
    for method in METHODS:
        alone = weights_of(folder / f"one-{method}")
        both = weights_of(folder / f"{engine}-{method}")
        moved = max_difference(alone, start)
        assert max_difference(alone, both) < 0.05 * moved, (method, moved)
    resumed = weights_of(folder / f"{engine}-resumed")
    assert max_difference(resumed, both) == 0


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, as everybody loads it."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def max_difference(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


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
    expected = ADVANTAGES[method](scored, Options(generator=generator))
    actual = torch.tensor([row[3] for row in rows]).view(P, G)
    assert expected.abs().max() > 0.5
    assert torch.allclose(actual, expected, atol=1e-5, rtol=0), (method, step)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--scale_rewards batch", "--scale_rewards"),
        ('--generation_kwargs {"stop_strings":["</answer_1>"]}', "--generation_kwargs"),
        ("--max_completion_length 18", "--max_completion_length"),
        ("--method goal_conditioned", "--method"),
        ("--subset 8", "a set of s = 8"),
    ],
)
def test_settings_that_would_undo_vpo_are_refused_by_name(
    trl_vpo, letters, tmp_path, capsys, flags, named
):
    files = f"--task {letters / 'letters.py'} --model {letters / 'start'} --output_dir {tmp_path}"
    arguments = [*files.split(), *flags.split()]
    fails(arguments, capsys, ": error: ", named, command=trl_vpo.main)


# What the recorded model answers in turn, and which of the eight tests each program passes.
HEAD = "def qualifiers(scores, places):\n    "
PROGRAMS = {
    f"{HEAD}return []": "00000000",
    f"{HEAD}return sorted(scores)[::-1]": "00000010",
    f"{HEAD}return sorted(": "00000000",
    f"{HEAD}s = sorted(scores)[::-1]\n    return [x for x in s if x >= s[places - 1]]": "11111111",
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
def test_openevolve_keeps_a_cell_per_set_of_passed_tests(tmp_path, monkeypatch):
    """OpenEvolve's own command, as the evaluator's first lines give it, against a recorded model."""
    words = [Path(sys.executable).with_name("openevolve-run"), "initial_program.py", "evaluator.py"]
    words += ["--config", "config.yaml", "--iterations", "20", "--primary-model", "m"]
    with ThreadingHTTPServer(("127.0.0.1", 0), RecordedModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = command(*words, "--api-base", url, "--output", tmp_path, cwd=EXAMPLES / "openevolve")
        unknown = refused(server.server_port, "n", monkeypatch)
        server.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "/v1: refuses the model n (HTTP Error 404: no such model" in unknown
    nobody = refused(9, "m", monkeypatch)  # the discard port: nobody listens
    assert "http://127.0.0.1:9/v1: no model answers there" in nobody
    (problem,) = [
        problem
        for problem in read_problems(str(ROOT / "tasks/open_cases.jsonl"))
        if problem["id"] == "lists-045"
    ]
    prompt = Code.prompt(None, Problem("lists-045", problem), 1)  # what a policy was trained on
    for request in RecordedModel.requests:
        assert "seed" not in request and request["temperature"] == 1.0
        assert request["messages"][0]["content"] == prompt

    database = tmp_path / "checkpoints/checkpoint_20"
    initial = (EXAMPLES / "openevolve/initial_program.py").read_text()
    passed_by = PROGRAMS | {initial: "11111000"}  # the obvious reading of the problem
    metrics_of = {}
    for path in (database / "programs").iterdir():
        program = json.loads(path.read_text())
        passed = [float(digit) for digit in passed_by[program["code"]]]
        expected = dict(zip(TESTS, passed, strict=True)) | {"combined_score": sum(passed) / 8}
        assert program["metrics"] == expected
        metrics_of[program["id"]] = expected

    metadata = json.loads((database / "metadata.json").read_text())
    for island in metadata["island_feature_maps"]:
        for cell, program in island.items():
            for bin, test in zip(cell.split("-"), TESTS, strict=True):
                # 0: failed, 2: passed, 1: until then all programs were alike.
                assert int(bin) in (1, 2 * metrics_of[program][test])
    assert len(metadata["island_feature_maps"][0]) >= 3
    assert metrics_of[metadata["best_program_id"]]["combined_score"] == 1


def refused(port: int, model: str, monkeypatch) -> str:
    """With what the evaluator ends that command."""
    words = ["--primary-model", model, "--api-base", f"http://127.0.0.1:{port}/v1"]
    monkeypatch.setattr(sys, "argv", ["openevolve-run", *words])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "openevolve/evaluator.py"))
    return str(stop.value)


def test_another_version_of_trl_is_refused(trl_vpo, monkeypatch, capsys):
    monkeypatch.setattr(trl_vpo, "TRL", "0.1")
    fails([], capsys, "this file is for 0.1; pip install trl==0.1", command=trl_vpo.main)


def test_a_rollout_of_trl_ends_with_its_last_answer(trl_vpo):
    """As train.py's own sampler ends it, by the same rule."""
    text = "<answer_1> red </answer_1> <answer_2> blue </answer_2> and more"
    policy = load_random_model("llama")
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    n = trl_vpo.first_stop(StopRule(policy, Fence(), 2), ids)
    kept = policy.decode(torch.tensor(ids[:n]))
    assert text.startswith(kept) and kept.rstrip(" ").endswith("</answer_2>")
    assert parse_answers(kept, Fence(), 2, finished=False) == ["red", "blue"]
    assert trl_vpo.first_stop(StopRule(policy, Fence(), 4), ids) == len(ids)
