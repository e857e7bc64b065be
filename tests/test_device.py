"""Training and evaluation on a pretend device come to what they come to on the CPU."""

import importlib.util
import subprocess
import sys

import pretend_device
import pytest
import torch
from helpers import ROOT, WordProblems, load_random_model, save_random_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

import rollout
import train
from engine.config import AUTO, Config, resolve
from engine.models import add_adapter, recompute_layers
from engine.optimizer import MasterWeightAdamW
from engine.runs import read_config
from engine.training import memory
from engine.training.memory import GIB, fill_card
from eval import measure, sample_pool
from fast import graphs
from rewards import UserError
from rollout import SamplingOptions, StopRule, load_policy, random_generator
from tasks.maze import Maze

FLAGS = {"dtype": "float32", "group_size": 3, "prompts_per_step": 2, "max_new_tokens": 2}
FLAGS |= {"micro_batch_tokens": 50, "lr": ["1e-3"]}


TASK = WordProblems()


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
    pool = sample_pool(policy, TASK, problems, config, m=3, size=3)
    numbers.append(measure(pool, TASK))
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


def compare_graphs(model: str) -> None:
    """Raise AssertionError unless a token that could be a graph draws what the plain way draws."""
    policy = load_policy(model, TASK, device=pretend_device.NAME)
    prompts = [TASK.prompt(problem, 1) for problem in TASK.problems("train", 3)]
    tokens = []
    for decode in (rollout.decode, graphs.decode):
        draws = random_generator(0, 0, "rollouts")
        options = SamplingOptions(12, draws, stop=StopRule(policy, TASK, 8))
        tokens.append(rollout.sample(policy, prompts, 2, options, decode).tokens.cpu())
    assert policy.model not in graphs.refused, graphs.refused[policy.model]
    assert torch.equal(*tokens)


def program() -> None:
    """What needs a device, in the order in which its parts build on one another."""
    pretend_device.register()
    compare(Config(model="tiny", warm_steps=2, **FLAGS))
    compare(Config(model=save_random_model("qwen3", "qwen3"), **FLAGS))
    with pretend_device.entered():
        compare_graphs("qwen3")
    if importlib.util.find_spec("peft"):
        own = save_random_model("gemma3", "gemma3")
        compare(Config(model=own, lora_rank=2, **FLAGS | {"dtype": "bfloat16"}))


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no _setup_privateuseone_for_python_backend, with which the device is registered",
)
def test_a_pretend_device_comes_to_what_the_cpu_comes_to(tmp_path):
    """Guards against tensors left on the CPU, and float64 for MPS."""
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]; "
    code += "import test_device; test_device.program()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    for lora_rank, own in ((0, "float32"), (8, dtype)):  # small steps of all weights
        config = Config(model="m", warm_steps=9, lora_rank=lora_rank)
        resolve(config)
        assert config.dtype == own
    if not has_bfloat16:
        with pytest.raises(UserError, match="--dtype bfloat16: this card only emulates it"):
            resolve(Config(model="m", dtype="bfloat16"))
    assert (tiny.device, tiny.dtype) == ("cpu", "float32")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# What `auto` means on a card.


def test_without_a_card_auto_is_the_default():
    """Guards against a run of a card that goes on elsewhere with one rollout at a time."""
    for model, defaults in (("tiny", (2048, 0)), ("m", (4096, 96))):
        config = Config(model=model, device="cpu", micro_batch_tokens=AUTO, sampling_batch=AUTO)
        resolve(config)
        assert (config.micro_batch_tokens, config.sampling_batch) == defaults


def planned(free: float, **flags) -> Config:
    """The flags of a run of a small random model on a card with this many free bytes."""
    options = {"micro_batch_tokens": AUTO, "sampling_batch": AUTO, "max_new_tokens": 16}
    options["gradient_checkpointing"] = True
    config = Config(model="m", method=["grpo", "vpo"], **options | flags)
    fill_card(config, load_random_model("llama"), Maze(5), int(free))
    return config


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_auto_plans_fits_into_the_memory(jobs):
    """Guards against a plan that grows beyond the card, and layers that are computed again for nothing."""
    policy = load_random_model("llama")
    shape = policy.model.config
    layer = 4 * (12 * shape.hidden_size + 4 * shape.intermediate_size)
    plans = []
    for free in torch.linspace(3.0, 3.6, 13).tolist():
        config = planned(free * GIB, jobs=jobs)
        takes = memory.resident(config, policy) + memory.HEAD + memory.PROCESS_BYTES
        takes += config.sampling_batch * memory.kv_cache(config, policy, Maze(5))
        kept = shape.num_hidden_layers * layer
        if config.gradient_checkpointing:
            kept = 4 * shape.num_hidden_layers * shape.hidden_size + layer
        takes += 2 * config.micro_batch_tokens * kept  # the prompts' tokens, too
        takes += config.sampling_batch * memory.LOGITS * shape.vocab_size
        assert takes * jobs < free * GIB
        plans.append((config.sampling_batch, not config.gradient_checkpointing))
    assert plans == sorted(plans), "more memory, and less at a time"
    if jobs == 2:
        assert {is_fast for _, is_fast in plans} == {False, True}
    largest = planned(80 * GIB)
    assert (largest.micro_batch_tokens, largest.sampling_batch) == (2**15, 512)
    assert largest.jobs == 2
    assert planned(5 * GIB).jobs == 1


def test_a_layer_without_keys_is_planned_with():
    """Guards against a hybrid, such as Qwen3.5, that ends before its first step."""
    config = Config(model="m", max_new_tokens=16)
    usual = memory.kv_cache(config, load_random_model("qwen3_5"), Maze(5))
    longest = memory.kv_cache(config, load_random_model("qwen3_5"), Maze(5), longest=5000)
    assert longest > 4 * usual > 0


def test_what_a_user_sets_is_kept_and_what_does_not_fit_is_told():
    """Guards against --jobs that end in the middle for want of memory."""
    own = planned(80 * GIB, micro_batch_tokens=99, sampling_batch=7, jobs=1)
    assert (own.micro_batch_tokens, own.sampling_batch, own.jobs) == (99, 7, 1)
    assert own.gradient_checkpointing
    assert not planned(3.5 * GIB, gradient_checkpointing=False).gradient_checkpointing
    with pytest.raises(UserError, match="--jobs 2, .* 1.0 GiB of the card are free; take --jobs 1"):
        planned(GIB, jobs=2)
    with pytest.raises(UserError, match="--model m: .*; take --lora-rank 16 or a smaller --model"):
        planned(GIB / 2)


def test_auto_is_the_default_on_a_card_alone(monkeypatch):
    """Guards against runs on a CPU that are rounded in another way than the stored ones."""
    command = ["--task", "headline", "--model", "m"]
    config, _, _ = read_config(command, "")
    assert (config.micro_batch_tokens, config.sampling_batch) == (512, 96)
    assert not config.gradient_checkpointing
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config, _, _ = read_config([*command, "--device", "cpu"], "")
    assert (config.micro_batch_tokens, config.sampling_batch) == (512, 96)
    config, _, _ = read_config([*command, "--sampling-batch", "9"], "")
    assert (config.micro_batch_tokens, config.sampling_batch) == (AUTO, 9)
