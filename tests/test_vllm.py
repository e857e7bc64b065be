"""TRL with rollouts from vLLM, in one process. Skipped where vLLM is missing: see vllm_cpu.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_rollout import save_random_model

from engine.tasks import load_task, take_problems
from rewards import parse_answers
from rollout import StopRule, load_policy, random_generator, rollout_length, score
from vpo import ADVANTAGES, Options, answers_per_rollout

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("vllm") or not importlib.util.find_spec("trl"),
    reason="vllm or trl is not installed",
)
TESTS = Path(__file__).resolve().parent
EXAMPLES = TESTS.parent / "examples"
G = 4  # rollouts per prompt
P = 2  # prompts per step
STEPS = 3

# Every word of a rollout is an answer, so that a random model earns something.
TASK = """
from rewards import Problem, Task

class Words(Task):
    name, ends, minimum = "words", " ", -0.5
    language_defaults = {"max_new_tokens": 16}

    def problems(self, split, n, seed=0, start=0):
        return [Problem(f"{split}-{i}", i) for i in range(start, start + n)]

    def prompt(self, problem, m):
        return f"Write words. {problem.data}"

    def find_answers(self, text, m, finished):
        return text.split(" ")[: None if finished else -1]

    def reward(self, problem, answer):
        return [answer.count(x) - 0.5 for x in "aei"[:2 + problem.data % 2]]
"""

WORKER = f"""
import json, sys
from pathlib import Path

folder, examples, method = sys.argv[1:]
sys.path.insert(0, examples)
import trl_vpo
import vllm_cpu  # weights that can be replaced

config = trl_vpo.VPOConfig(
    output_dir=folder + "/out", task=folder + "/words.py", model=folder + "/start", method=method,
    max_steps={STEPS}, num_generations={G}, per_device_train_batch_size={P * G}, shuffle_dataset=False,
    save_strategy="no", report_to="none", logging_steps=1, learning_rate=3e-3, use_vllm=True,
    vllm_mode="colocate", vllm_max_model_length=512,
)
trainer = trl_vpo.build_trainer(config)
compute_loss = trainer._compute_loss
steps = []


def spy(model, inputs):
    rows = []
    for prompt, ids, mask, advantage in zip(*(inputs[x] for x in ("prompt_ids", "completion_ids", "completion_mask", "advantages"))):
        text = trainer.processing_class.decode(prompt)
        rows.append([int(text.split()[-1]), ids[mask.bool()].tolist(), advantage.item()])
    steps.append(rows)
    return compute_loss(model, inputs)


def sampled():
    engine = trainer.vllm_generation
    engine.sync_weights()
    kwargs, engine.generation_kwargs = engine.generation_kwargs, engine.generation_kwargs | {{"seed": 0}}
    ids = engine.generate(prompts=[trainer.processing_class("Write words. 7")["input_ids"]], images=None, num_generations=1)[1]
    engine.generation_kwargs = kwargs
    return ids


trainer._compute_loss = spy
samples = [sampled(), sampled()]
trainer.train()
samples.append(sampled())
difference = [row["sampling/sampling_logp_difference/mean"] for row in trainer.state.log_history if "loss" in row]
Path(folder, method + ".json").write_text(json.dumps([steps, samples, difference]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The task, a random model and the worker."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.py").write_text(TASK)
    (folder / "worker.py").write_text(WORKER)
    save_random_model(folder / "start", "llama", head_dim=64, dtype=torch.float32)
    return folder


@pytest.mark.parametrize("method", ["vpo", "group_vpo"])
def test_rollouts_from_vllm(folder, method):
    """The advantages that reach the loss are ours, rollouts end with the m-th answer, new weights
    arrive, and the log-probabilities of both engines agree."""
    environment = {
        "ACCELERATE_USE_CPU": "true",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
    }
    words = [sys.executable, folder / "worker.py", folder, EXAMPLES, method]
    done = subprocess.run(
        words, env=os.environ | environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps, (before, again, after), difference = json.loads((folder / f"{method}.json").read_text())
    assert before == again != after
    assert len(difference) == STEPS and max(difference) < 0.05, difference

    task = load_task(str(folder / "words.py"), "a language model")
    policy = load_policy(str(folder / "start"), task)
    m = answers_per_rollout(method, 3)
    stop = StopRule(policy, task, m)
    room = rollout_length(task, m, 16)
    n_cut = 0
    for step, rows in enumerate(steps):
        rows.sort(key=lambda row: row[0])
        assert [row[0] for row in rows] == [P * step + i // G for i in range(P * G)]
        answers = []
        for _, ids, _ in rows:
            has_ended = len(ids) < room or ids[-1] in policy.eos_ids
            answers.append(parse_answers(policy.decode(torch.tensor(ids)), task, m, has_ended))
            is_alive = torch.tensor([True])
            ends = range(1, len(ids) + 1)
            stops = [bool(stop(torch.tensor([ids[:end]]), is_alive)) for end in ends]
            assert not any(stops[:-1])  # nothing follows the m-th answer
            n_cut += stops[-1]
        scored = score(task, take_problems(task, "train", P, start=P * step), answers, m)
        generator = random_generator(42, P * step, "weights")
        expected = ADVANTAGES[method](scored, Options(generator=generator))
        actual = torch.tensor([row[2] for row in rows]).view(P, G)
        assert torch.allclose(actual, expected, atol=1e-5, rtol=0)
    assert n_cut > 0
