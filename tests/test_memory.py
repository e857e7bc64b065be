"""The plan against what real tensors take, its advice, and what a user reads when memory runs out."""

import contextlib
import functools
import re

import pytest
import torch
from test_rollout import save_random_model
from test_train import QUICK, fails

import rollout
import train
from engine import decoding, memory, update
from engine.flags import fill_in, train_parser
from engine.models import load_policy
from engine.runs import task_of

SMALL = [
    "--device",
    "cpu",
    "--size",
    "5",
    "--method",
    "vpo",
    "--prompts-per-step",
    "2",
    "--group-size",
    "4",
    "--max-new-tokens",
    "14",
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def arguments_of(model: str, *flags: str):
    """Parsed and filled in, as train.run does it."""
    args = train_parser().parse_args([*SMALL, "--model", model, *flags])
    task = task_of(vars(args))
    fill_in(args, task, False)
    return args, task


def plan_of(args, task) -> dict[str, dict[str, int]]:
    """What `--plan` computes for VPO."""
    return memory.step_memory(args, task, "vpo", functools.partial(train.ask, args, task))


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
    args, task = arguments_of(save_random_model(tmp_path / "model", architecture), *flags)
    fake = plan_of(args, task)
    monkeypatch.setattr(memory, "FakeTensorMode", lambda **options: contextlib.nullcontext())
    real = plan_of(args, task)
    for phase in ("sampling", "update"):
        assert sum(fake[phase].values()) == pytest.approx(sum(real[phase].values()), rel=0.02)
        assert {row: fake[phase].get(row) for row in memory.ROWS[:5]} == {
            row: real[phase].get(row) for row in memory.ROWS[:5]
        }


def test_an_adapter_is_planned(tmp_path):
    """Its gradients and moments instead of the model's, and no second copy as the reference policy."""
    pytest.importorskip("peft")
    model = save_random_model(
        tmp_path / "model", "qwen2", hidden_size=128, intermediate_size=512, num_hidden_layers=1
    )
    whole, adapter = (
        plan_of(*arguments_of(model, *flags))["update"] for flags in ([], ["--lora-rank", "2"])
    )
    assert adapter["reference policy"] == 0 and whole["reference policy"] == whole["weights"]
    assert (
        0 < adapter["gradients"] < 0.2 * whole["gradients"]
        and adapter["optimizer"] == 2 * adapter["gradients"]
    )


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
    args, task = arguments_of(model, *flags)
    planned = max(sum(rows.values()) for rows in plan_of(args, task).values())
    monkeypatch.setattr(decoding, "eos_ids", lambda model, tokenizer: [5001])
    with memory.Tally() as tally:
        train.main(
            [
                *SMALL,
                "--out",
                "run",
                "--model",
                model,
                "--steps",
                "2",
                "--eval-problems",
                "0",
                *flags,
            ]
        )
    assert tally.peak == pytest.approx(planned, rel=0.1)


def test_the_plan_is_printed_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    """A folder without weights suffices; the rows add up to the total; what does not fit names flags, and those fit."""
    model = save_random_model(tmp_path / "model", "llama", vocab_size=50000, num_hidden_layers=1)
    (tmp_path / "model" / "model.safetensors").unlink()
    flags = [*SMALL, "--model", model, "--max-new-tokens", "32", "--device", "cuda"]
    monkeypatch.setattr(memory, "CUDA_CONTEXT", 0)
    train.main([*flags, "--plan", "100"])
    out = capsys.readouterr().out
    assert re.search(r"^fits a card of 100.0 GiB", out, re.MULTILINE)
    columns = [
        [int(x) for x in line[28:].split()]
        for line in out.splitlines()
        if line[:28].strip() in (*memory.ROWS, "device context (assumed)", "total")
    ]
    assert len(columns) == len(memory.ROWS) + 2
    for column in zip(*columns, strict=True):
        assert column[-1] == pytest.approx(sum(column[:-1]), abs=5)
    enough = max(columns[-1]) * 0.985 / 1024
    train.main([*flags, "--dtype", "float32", "--plan", f"{enough:.4f}"])
    out = capsys.readouterr().out
    assert "does not fit" in out and "which fits" in out
    better = re.findall(r"MiB with (.*)", out)[-1].split()
    train.main([*flags, *better, "--plan", f"{enough:.4f}"])
    assert re.search("^fits", capsys.readouterr().out, re.MULTILINE)
    assert not list(tmp_path.glob("runs")), "a plan must not claim a folder"


CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.8 GiB"
)
CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: you tried to allocate 98304000 bytes")


@pytest.mark.parametrize(
    "name, error, texts",
    [
        ("sample", CUDA, ["sampling", "2.50 GiB", "--sampling-batch"]),
        (
            "backward",
            CUDA,
            [
                "the update",
                "2.50 GiB",
                "--resume and: --gradient-checkpointing, --micro-batch-tokens 1024",
                "new run: --dtype bfloat16",
            ],
        ),
        ("backward", CPU, ["the update", "98304000 bytes", "--plan"]),
    ],
)
def test_running_out_of_memory_names_phase_amount_and_flags(
    name, error, texts, capsys, monkeypatch
):
    """At step 4, so that the last good checkpoint is named too."""
    original, calls = getattr(train, name), []

    def fail(*args, **kwargs):
        calls.append(0)
        if len(calls) == 4:
            raise type(error)(
                *error.args
            )  # a fresh one: an exception keeps the frames that it was raised in
        return original(*args, **kwargs)

    fail.__code__ = fail.__code__.replace(co_name=name)  # the phase is told by who was called
    monkeypatch.setattr(train, name, fail)
    fails(
        ["--out", "run", "--method", "vpo", *QUICK],
        capsys,
        "vpo, step 4",
        "out of memory",
        "checkpoint-000003",
        *texts,
    )


@pytest.mark.parametrize("name, phase", [("load", "loading"), ("evaluate_runs", "the evaluation")])
def test_running_out_of_memory_around_the_steps(name, phase, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise type(CUDA)(*CUDA.args)

    fail.__code__ = fail.__code__.replace(co_name=name)
    monkeypatch.setattr(train if name in vars(train) else train.runs, name, fail)
    fails(
        ["--out", "run", "--method", "vpo", *QUICK, "--steps", "1"],
        capsys,
        f"in {phase}",
        "2.50 GiB",
        "--dtype bfloat16",
    )


def test_short_rollouts_are_planned_too(tmp_path):
    """Many short rollouts share a micro-batch with copies of their prompts: a real update stays below the plan."""
    flags = [
        "--micro-batch-tokens",
        "256",
        "--gradient-checkpointing",
        "--group-size",
        "8",
        "--prompts-per-step",
        "8",
    ]
    args, task = arguments_of(
        save_random_model(tmp_path / "model", "phi", num_hidden_layers=1), *flags
    )
    planned = sum(plan_of(args, task)["update"].values())
    model, tokenizer = load_policy(args.model, task, gradient_checkpointing=True, empty=True)
    reference, optimizer = load_policy(args.model, task, empty=True)[0], update.AdamW(model)
    prompts = [
        rollout.build_prompt(tokenizer, task, problem, 3) for problem in task.problems("train", 8)
    ]
    ids, lengths = rollout.encode_prompts(model.config, tokenizer, prompts, 40)
    fixed = sum(memory.size_of(m) for m in (model, reference)) + sum(
        x.nbytes for x in optimizer.moments
    )
    for T in (2, 8, 20, 40):
        rollouts = rollout.Rollouts(
            ids, lengths, torch.zeros(64, T, dtype=torch.long), torch.zeros(64, T), [T] * 64, [], []
        )
        model.zero_grad()
        with memory.Tally() as tally:
            update.backward(model, reference, rollouts, [1.0] * 64, kl=1e-3, micro_batch_tokens=256)
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
    args, _ = arguments_of("tiny")
    with pytest.raises(RuntimeError, match="shapes"), memory.explain_out_of_memory(args, "cpu"):
        raise RuntimeError("shapes do not match")
