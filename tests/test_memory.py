"""The plan against what real tensors take, its advice, and what a user reads when memory runs out."""

import contextlib
import re

import pytest
import torch
from test_rollout import save_random_model
from test_train import QUICK, fails
from test_update import whole_gradient

import train
from engine import decoding, memory
from engine.config import Config, Parser, parse
from engine.forward import recompute_layers
from engine.kinds import fill_in
from engine.models import empty_policy
from engine.optimizer import AdamW
from engine.run_folder import task_of
from rewards import Task
from rollout import build_prompt

SMALL = "--device cpu --size 5 --method vpo --prompts-per-step 2 --group-size 4 --max-new-tokens 14"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config_of(model: str, *flags: str) -> tuple[Config, Task]:
    """Parsed and filled in, as train.run does it; and the task."""
    config, _ = parse(Parser("train.py"), Config, [*SMALL.split(), "--model", model, *flags])
    task = task_of(config)
    fill_in(config, task, cuda=False)
    return config, task


def plan_of(config: Config, task: Task) -> memory.Plan:
    """What `--plan` computes for VPO."""
    return memory.step_memory(config, task, train.step_prompts(config, task)["vpo"])


@pytest.mark.parametrize(
    "architecture, flags",
    [
        ("llama", ["--no-gradient-checkpointing"]),
        ("gemma3", ["--gradient-checkpointing", "--micro-batch-tokens", "64"]),
        ("gpt2", ["--dtype", "bfloat16", "--kl", "0", "--sampling-batch", "4"]),
    ],
)
def test_fake_tensors_count_like_real_ones(architecture, flags, tmp_path, monkeypatch):
    """The same plan with real tensors, byte by byte, but for what kernels allocate in passing."""
    config, task = config_of(save_random_model(tmp_path / "model", architecture), *flags)
    fake = plan_of(config, task)
    monkeypatch.setattr(memory, "FakeTensorMode", lambda **options: contextlib.nullcontext())
    real = plan_of(config, task)
    for phase in ("sampling", "update"):
        assert sum(fake[phase].values()) == pytest.approx(sum(real[phase].values()), rel=0.02)
        for row in memory.ROWS[:5]:
            assert fake[phase].get(row) == real[phase].get(row)


def test_an_adapter_is_planned(tmp_path):
    """Its gradients and moments instead of the model's, and no second copy as the reference policy."""
    pytest.importorskip("peft")
    model = save_random_model(
        tmp_path / "model", "qwen2", hidden_size=128, intermediate_size=512, num_hidden_layers=1
    )
    whole = plan_of(*config_of(model))["update"]
    adapter = plan_of(*config_of(model, "--lora-rank", "2"))["update"]
    assert whole["reference policy"] == whole["weights"]
    assert adapter["reference policy"] == 0
    assert 0 < adapter["gradients"] < 0.2 * whole["gradients"]
    assert adapter["optimizer"] == 2 * adapter["gradients"]


def test_a_real_step_takes_what_was_planned(tmp_path, monkeypatch):
    """Every tensor of a training step that train.py really runs, within 10% of the plan; no rollout ends."""
    flags = ["--sampling-batch", "4", "--micro-batch-tokens", "128"]
    model = save_random_model(
        tmp_path / "model",
        "qwen2",
        hidden_size=128,
        intermediate_size=512,
        vocab_size=5000,
        num_hidden_layers=1,
    )
    config, task = config_of(model, *flags)
    planned = max(sum(rows.values()) for rows in plan_of(config, task).values())
    monkeypatch.setattr(decoding, "eos_ids", lambda model, tokenizer: [5001])
    run = [*SMALL.split(), "--out", "run", "--model", model, "--steps", "2", "--eval-problems", "0"]
    with memory.Tally() as tally:
        train.main([*run, *flags])
    assert tally.peak == pytest.approx(planned, rel=0.1)


def test_the_plan_is_printed_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    """A folder without weights suffices; the rows add up to the total; what does not fit names flags."""
    model = save_random_model(tmp_path / "model", "llama", vocab_size=50000, num_hidden_layers=1)
    (tmp_path / "model" / "model.safetensors").unlink()
    flags = [*SMALL.split(), "--model", model, "--max-new-tokens", "32", "--device", "cuda"]
    monkeypatch.setattr(memory, "CUDA_CONTEXT", 0)
    train.main([*flags, "--plan", "100"])
    out = capsys.readouterr().out
    assert re.search(r"^fits 100.0 GiB \(cuda\)", out, re.MULTILINE)
    rows = {}
    for line in out.splitlines():
        name = line[:28].strip()
        if name in (*memory.ROWS, "process, libraries", "total"):
            rows[name] = [int(number) for number in line[28:].split()]
    assert len(rows) == len(memory.ROWS) + 2
    totals = rows.pop("total")
    for i, total in enumerate(totals):
        assert total == pytest.approx(sum(numbers[i] for numbers in rows.values()), abs=5)
    enough = max(totals) * 0.985 / 1024
    train.main([*flags, "--dtype", "float32", "--plan", f"{enough:.4f}"])
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "flags that save memory" in out and "--dtype bfloat16" in out
    leaner = ["--dtype", "bfloat16", "--gradient-checkpointing", "--kl", "0"]
    train.main([*flags, *leaner, "--plan", f"{enough:.4f}"])
    assert re.search("^fits", capsys.readouterr().out, re.MULTILINE)
    assert not list(tmp_path.glob("runs")), "a plan must not claim a folder"


CUDA = (
    torch.OutOfMemoryError,
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.8 GiB",
    "Tried to allocate 2.50 GiB",
)
CPU = (
    RuntimeError,
    "[enforce fail] DefaultCPUAllocator: you tried to allocate 98304000 bytes",
    "tried to allocate 98304000 bytes",
)


@pytest.mark.parametrize("kind, message, amount", [CUDA, CPU])
def test_running_out_of_memory_names_device_amount_and_flags(
    kind, message, amount, capsys, monkeypatch
):
    """At step 4, so that the last good checkpoint is named too."""
    original = train.train_step

    def fail(method, learner, *rest):
        if learner.step == 3:
            raise kind(message)
        return original(method, learner, *rest)

    monkeypatch.setattr(train, "train_step", fail)
    fails(
        ["--out", "run", "--method", "vpo", *QUICK],
        capsys,
        "vpo, step 4: out of memory on cpu",
        amount,
        "checkpoint-000003",
        "--resume and a lower --micro-batch-tokens or --sampling-batch",
        "--lora-rank 16",
        "--plan",
    )


def test_running_out_of_memory_in_the_evaluation(capsys, monkeypatch):
    kind, message, amount = CUDA

    def fail(*args, **kwargs):
        raise kind(message)

    monkeypatch.setattr(train, "evaluate_runs", fail)
    command = ["--out", "run", "--method", "vpo", *QUICK, "--steps", "1"]
    fails(command, capsys, "out of memory on cpu", amount, "--sampling-batch")


def test_short_rollouts_are_planned_too(tmp_path):
    """Many short rollouts share a micro-batch with copies of their prompts: a real update stays below the plan."""
    flags = "--micro-batch-tokens 256 --gradient-checkpointing --group-size 8 --prompts-per-step 8"
    model = save_random_model(tmp_path / "model", "phi", num_hidden_layers=1)
    config, task = config_of(model, *flags.split())
    planned = sum(plan_of(config, task)["update"].values())
    policy, tokenizer = empty_policy(config.model, task, config.dtype)
    recompute_layers(policy)
    reference, _ = empty_policy(config.model, task, config.dtype)
    fixed = memory.size_of(policy) + memory.size_of(reference)
    fixed += sum(moments.nbytes for moments in AdamW(policy).moments)
    problems = task.problems("train", 8)
    prompts = [build_prompt(tokenizer, task, problem, 3) for problem in problems]
    ids, lengths = decoding.encode_prompts(policy.config, tokenizer, prompts, 40)
    for T in (2, 8, 20, 40):
        tokens = torch.zeros(64, T, dtype=torch.long)
        logprobs = torch.zeros(64, T)
        rollouts = decoding.Rollouts(ids, lengths, tokens, logprobs, [T] * 64, [], [])
        policy.zero_grad()
        with memory.Tally() as tally:
            whole_gradient(policy, reference, rollouts, [1.0] * 64, kl=1e-3, token_budget=256)
        assert tally.peak + fixed <= 1.1 * planned, T


def test_a_plan_for_no_sensible_card_is_refused(capsys):
    for flags, text in (
        (["--plan", "-1"], "--plan -1: must be"),
        (["--plan", "nan"], "--plan nan"),
        (["--plan", "8", "--device", "tpu"], "--device tpu"),
    ):
        fails(flags, capsys, text)
    if not torch.cuda.is_available():
        fails(["--plan", "--device", "cuda"], capsys, "this machine has none")


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError, match="shapes"), memory.explain_out_of_memory("cpu"):
        raise RuntimeError("shapes do not match")
