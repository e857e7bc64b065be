"""LoRA, which needs peft: trained, stored, resumed, mixed, and through both ways of training."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    LEARNING,
    QUICK,
    SAVE,
    TASK,
    TOLERANCE,
    assert_equal_weights,
    assert_plain_is_fast,
    assert_same_gradient,
    assert_same_tokens,
    draw,
    gradient,
    load_random_model,
    metrics,
    sampled,
    save_random_model,
    train_hybrid,
    weights,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import eval as evaluation
import fast
import train
from engine import models
from engine.config import Config
from engine.mixtures import mixed
from engine.models import add_adapter
from engine.optimizer import MasterWeightAdamW
from engine.runs import load_run, task_of
from engine.tasks import load_task
from rollout import load_policy

pytest.importorskip("peft", reason="peft trains adapters: pip install peft")


def test_an_adapter_goes_through_the_same_code(monkeypatch):
    """LoRA: the warm-up and the training train the adapter alone, checkpoints hold it alone, and a
    killed run goes on from it. Guards against 16 bytes for each weight of a model, and an adapter
    that is drawn anew where a run was killed before its first checkpoint."""
    trained = []

    class Recorded(MasterWeightAdamW):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            trained.append(sum(weight.numel() for weight in self.weights))

    monkeypatch.setattr(train.checkpoints, "MasterWeightAdamW", Recorded)
    model = save_random_model("model", "qwen2")
    flags = "--lora-rank 2 --dtype bfloat16 --method vpo --steps 2 --save-every 1 --lr 0.01"
    flags += " --max-new-tokens 20 --eval-problems 1 --pool 2 --keep-optimizer"
    train.main(["--out", "whole", "--model", model, *QUICK, *flags.split()])
    adapter = "vpo/checkpoint-000002/adapter_model.safetensors"
    whole = load_file(f"whole/{adapter}")
    assert trained == 2 * [sum(weight.numel() for weight in whole.values())]
    before, start = weights(Path(model)), weights(Path("whole/start"))
    changed = {name for name in start if not torch.equal(start[name], before[name].bfloat16())}
    assert start.keys() == before.keys() and changed
    assert all("proj.weight" in name for name in changed)
    assert metrics(Path("whole/vpo"))[0]["kl"] == 0, "the reference policy is another model"
    report = json.loads(Path("whole/eval.json").read_text("utf-8"))["policies"]
    assert list(report) == ["start", "start_sets", "vpo", "vpo, one answer"]

    shutil.copytree("whole", "run")
    for lost in ("checkpoint-000002", "checkpoint-00000[12]"):
        for checkpoint in Path("run/vpo").glob(lost):
            shutil.rmtree(checkpoint)
        train.main(["--out", "run", "--resume"])
        assert_equal_weights(whole, load_file(f"run/{adapter}"))
        assert metrics(Path("whole/vpo")) == metrics(Path("run/vpo"))


@pytest.mark.parametrize("start", ["run/start", "someone/a-model"])
def test_an_adapter_is_an_ordinary_folder_of_peft(start):
    """Plain transformers loads it where it was made, and we do where its run was moved."""
    policy = load_policy(save_random_model("run/start", "qwen2"), load_task("toy"))
    Path("run/config.json").touch()
    models.add_adapter(policy.model, rank=2)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    config = Config(model=start, lora_rank=2, steps=2, warm_steps=0)
    train.checkpoints.save(policy, MasterWeightAdamW(policy.model), 2, config, Path("run/vpo"))
    checkpoint = "run/vpo/checkpoint-000002"
    ids = torch.tensor([[5, 6, 7]])
    expected = policy.model(ids).logits
    if start == "run/start":
        plain = AutoModelForCausalLM.from_pretrained(checkpoint)
        assert torch.equal(plain(ids).logits, expected)
    else:
        named = json.loads(Path(checkpoint, "adapter_config.json").read_text("utf-8"))
        assert named["base_model_name_or_path"] == start
    Path("run").rename("moved")
    ours, _ = models.load_hugging_face("moved/vpo/checkpoint-000002", "float32")
    assert torch.equal(ours(ids).logits, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_of_an_adapter_scales_it(dtype):
    """Guards against an adapter mixed with a start that has none, and small changes that bfloat16 loses. No peft is needed after."""
    model = save_random_model("model", "qwen2")
    flags = "--lora-rank 2 --method grpo --max-new-tokens 20 --warm-steps 0 --steps 2 --out run "
    flags += "--temperature 0.9"
    train.main(["--model", model, "--dtype", dtype, *LEARNING, *flags.split()])
    run = Path("run")
    config = load_run(run).config
    torch.manual_seed(0)
    adapter = run / "grpo/checkpoint-000002/adapter_model.safetensors"
    weights = {name: torch.randn_like(weight) for name, weight in load_file(adapter).items()}
    save_file(weights, adapter, {"format": "pt"})
    nothing, half, trained = [mixed(run, "grpo", t, task_of(config), config) for t in (0, 0.5, 1)]
    start = load_policy("run/start", task_of(config), dtype=dtype)
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(trained.model(ids).logits, start.model(ids).logits)
    assert torch.equal(nothing.model(ids).logits, start.model(ids).logits)
    scaled = load_policy(str(adapter.parent), task_of(config))
    for layer in scaled.model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)
    torch.testing.assert_close(half.model(ids).logits, scaled.model(ids).logits)
    evaluation.main(["run", *SAVE])
    assert not Path("saved/grpo-0.5/adapter_config.json").exists()
    for folder in (run / "start", adapter.parent, Path("saved/grpo-0.5")):
        settings = json.loads((folder / "generation_config.json").read_text("utf-8"))
        assert settings["do_sample"] and settings["temperature"] == 0.9
    saved = AutoModelForCausalLM.from_pretrained("saved/grpo-0.5")
    torch.testing.assert_close(saved(ids).logits, half.model(ids).logits)
    assert sampled(load_policy("saved/grpo-0.5", task_of(config)), run) == sampled(half, run)


def test_both_train_an_adapter_alike(tmp_path):
    """The adapter alone has gradients, and the reference policy is the model with the adapter off."""
    policy = load_policy(save_random_model(tmp_path, "gemma3"), TASK)
    torch.manual_seed(0)
    add_adapter(policy.model, 4)
    trained = {key: x for key, x in policy.model.named_parameters() if x.requires_grad}
    assert trained and all("lora" in key for key in trained)
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.01 * torch.randn_like(weight))
    assert_same_tokens(policy)
    start = load_random_model("gemma3")
    rollouts = draw(start)
    assert_plain_is_fast(policy, rollouts)
    for backward in (train.backward, fast.backward):
        own, metrics = gradient(backward, policy, rollouts, reference=policy)
        expected, expected_metrics = gradient(backward, policy, rollouts, reference=start)
        assert_same_gradient(own, expected, TOLERANCE)
        assert metrics["kl"] == pytest.approx(expected_metrics["kl"], rel=1e-3)
        assert metrics["kl"] > 1e-3


def test_an_adapter_of_a_model_with_more_than_keys_and_values_trains_the_plain_way():
    train_hybrid("--lora-rank", "2")
