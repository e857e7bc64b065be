"""Training and evaluation on a pretend device come to what they come to on the CPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from random import Random

import pretend_device
import pytest
import torch
from test_rollout import MarkedWords, save_random_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

import rollout
import train
from engine.config import Config, open_device, resolve
from engine.models import add_adapter, recompute_layers
from engine.optimizer import MasterWeightAdamW
from eval import measure, sample_pool
from rewards import Problem, UserError
from rollout import SamplingOptions, StopRule, load_policy, random_generator

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {
    "dtype": "float32",
    "group_size": 4,
    "prompts_per_step": 3,
    "max_new_tokens": 2,
    "micro_batch_tokens": 100,
    "lr": ["1e-3"],
}
TWO_METHODS = (
    "--task toy --device cpu --method grpo vpo --jobs 2 --steps 1 --warm-steps 1 "
    "--prompts-per-step 5 --group-size 2 --eval-problems 0 --snapshots 0 --out run"
)


class Words(MarkedWords):
    """Prompts of unequal length. Any word is an answer, so that random models earn rewards."""

    objectives = ("long", "e")
    words = ("one", "two")
    answer_words = 1

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        return [Problem(f"{split}-{i}", i) for i in range(start, start + n)]

    def prompt(self, problem: Problem, m: int) -> str:
        return "one two " * (5 + problem.data % 3)

    def tiny_prompt(self, problem: Problem) -> str:
        return self.prompt(problem, 1)

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return [len(answer) % 4 / 3, float("e" in answer)]

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return rng.choice(self.words)


TASK = Words()


def outcome(config: Config) -> tuple[list[dict], list[list[str]], list[Tensor]]:
    """What training and evaluation come to: metrics and measures, answers, weights."""
    policy = load_policy(config.model, TASK, device=config.device, dtype=config.dtype)
    reference = load_policy(config.model, TASK, device=config.device, dtype=config.dtype)
    if config.is_tiny:
        train.warm_up(policy, TASK, config)
    if config.lora_rank:
        torch.manual_seed(0)
        add_adapter(policy.model, config.lora_rank)
        reference = policy
    recompute_layers(policy.model)
    optimizer = MasterWeightAdamW(policy.model)
    state = train.TrainState(policy, reference, optimizer, peak_lr=1e-3, step=0)
    numbers = []
    for config.plain in (True, False):
        metrics, _ = train.train_step("vpo", state, TASK, config)
        numbers.append(metrics)
        saved = tree_map_only(Tensor, Tensor.cpu, state.optimizer.state_dict())
        state.optimizer.load_state_dict(saved)  # as a resumed run does
    problems = TASK.problems("test", 2)
    config.eval_temperature = 1.0
    pool = sample_pool(policy, TASK, problems, config, m=3, size=6)
    numbers.append(measure(pool, TASK, 3))
    weights = [weight.detach().cpu() for weight in policy.model.parameters()]
    return tree_map_only(Tensor, Tensor.cpu, numbers), pool.answers, weights


def compare(config: Config) -> None:
    """Raise AssertionError unless the device and the CPU come to the same."""
    with sdpa_kernel(SDPBackend.MATH):  # what the pretend device computes attention with
        config.device = "cpu"
        numbers, answers, weights = outcome(config)
        config.device = pretend_device.NAME
        with pretend_device.entered():
            our_numbers, our_answers, our_weights = outcome(config)
    if config.dtype == "bfloat16":  # rounding soon draws other tokens
        torch.testing.assert_close(our_numbers[0], numbers[0], atol=0.01, rtol=0.05)
        return
    torch.testing.assert_close(our_numbers, numbers, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(our_weights, weights, atol=1e-4, rtol=1e-4)
    assert our_answers == answers


def count_waits(model: str) -> None:
    """Raise AssertionError if the host waits more than twice per token.

    It waits in transformers, which looks for padding, and for the newest tokens.
    """
    policy = load_policy(model, TASK, device=pretend_device.NAME)
    prompts = [TASK.prompt(problem, 1) for problem in TASK.problems("train", 3)]
    rule = None if policy.is_tiny else StopRule(policy, TASK, 8)
    pretend_device.waits.clear()
    options = SamplingOptions(12, random_generator(0, 0, "rollouts"), stop=rule)
    T = rollout.sample(policy, prompts, 4, options).tokens.shape[1]
    often = {line: n for line, n in pretend_device.waits.items() if n > T / 2}
    assert T > 6
    assert sum(often.values()) <= 2 * (T + 2), often


def program() -> None:
    """What needs a device, in the order in which its parts build on one another."""
    torch.set_num_threads(1)
    pretend_device.register()
    compare(Config(model="tiny", warm_steps=2, **FLAGS))
    for architecture in ("qwen3", "gemma3"):
        compare(Config(model=save_random_model(architecture, architecture), **FLAGS))
    with pretend_device.entered():
        count_waits("tiny")
        count_waits("qwen3")
    if importlib.util.find_spec("peft"):
        compare(Config(model="qwen3", lora_rank=2, **FLAGS | {"dtype": "bfloat16"}))
    train.main(TWO_METHODS.split())


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no _setup_privateuseone_for_python_backend, with which the device is registered",
)
def test_a_pretend_device_comes_to_what_the_cpu_comes_to(tmp_path):
    """Guards against tensors left on the CPU, float64 for MPS, waits, and forks of a process with a device."""
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]; "
    code += "import test_device; test_device.program()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("Torch not compiled with CUDA enabled", "install a torch with CUDA"),
        ("Found no NVIDIA driver on your system.", "install a newer NVIDIA driver"),
        ("CUDA error: no kernel image is available", "install a torch that is built for this card"),
        ("CUDA error: out of memory", "end what fills the card"),
    ],
)
def test_a_card_that_cannot_be_used_is_named(reason, fix, monkeypatch):
    """Guards against a card that is refused without the reason."""

    def fail(*args, **kwargs):
        raise RuntimeError(reason)

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(UserError, match=f"--device cuda: cannot compute .*{reason}.*{fix}"):
        open_device("cuda")


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_card_computes_in_what_it_has(has_bfloat16, dtype, monkeypatch):
    """Guards against bfloat16 that a card emulates, and against cuDNN's plan for each new shape."""

    def is_bf16_supported(including_emulation: bool) -> bool:
        return including_emulation or has_bfloat16

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda n, device, dtype: ones(n, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    torch.backends.cuda.enable_cudnn_sdp(True)
    config, tiny = Config(model="m", warm_steps=0), Config()
    resolve(config)
    resolve(tiny)
    assert (config.device, config.dtype) == ("cuda", dtype)
    assert (tiny.device, tiny.dtype) == ("cpu", "float32")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
