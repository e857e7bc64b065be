"""What a CPU cannot show: captured graphs, numbers of a card, its memory, and processes that share it."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    assert_same_gradient,
    copy_of,
    draw,
    ends_soon,
    gradient,
    load_random_model,
    metrics,
    with_graphs,
)

import fast
import rollout
import train
from engine.config import open_device
from fast import graphs
from rollout import Policy

pytestmark = pytest.mark.skipif("not torch.cuda.is_available()", reason="there is no card")
DEVICE = "cuda"
RUN = shlex.split(
    "--task toy --warm-steps 12 --steps 2 --prompts-per-step 2 --group-size 4 --save-every 1 "
    "--keep-optimizer --eval-problems 1 --pool 5 --method grpo vpo --device"
)
architectures = pytest.mark.parametrize("name", ["tiny", "llama", "qwen3", "gemma2", "gemma3"])


def on_device(name: str) -> Policy:
    """A random model on the card, in float32."""
    open_device(DEVICE)
    policy = copy_of(load_random_model(name))
    policy.model.to(DEVICE)
    return policy


@architectures
def test_graph_eager_and_cpu_draw_the_same_tokens(name):
    """Guards against a graph that reads old weights, or keeps a number of the token it was captured at."""
    policy = on_device(name)
    on_cpu = copy_of(load_random_model(name))
    for change in (1.0, 0.9):  # the second time the graphs are kept
        for own in (policy, on_cpu):
            with torch.no_grad():
                for weight in own.model.parameters():
                    weight.mul_(change)
        options = {"n": 4, "G": 6, "max_new_tokens": 30, "stop": ends_soon}
        expected = draw(on_cpu, **options)
        for sample in (rollout.sample, with_graphs, fast.sample):
            ours = draw(policy, sample=sample, **options)
            assert torch.equal(ours.tokens.cpu(), expected.tokens)
            assert ours.lengths == expected.lengths
            torch.testing.assert_close(ours.logprobs.cpu(), expected.logprobs, atol=1e-4, rtol=1e-3)
    assert policy.model not in graphs.refused, graphs.refused[policy.model]
    assert len({b for b, _, _ in graphs.workspaces[policy.model].graphs}) > 1


def test_a_model_that_asks_its_host_goes_on_without_a_graph(capsys):
    """Guards against a capture that fails in the middle, after which the card is of no use."""
    policy = on_device("llama")
    layer = policy.model.base_model.layers[0]
    layer.register_forward_hook(lambda module, inputs, output: output.sum().item() and None)
    expected = draw(policy)
    assert torch.equal(draw(policy, sample=with_graphs).tokens, expected.tokens)
    assert "without a CUDA graph" in capsys.readouterr().err
    other = on_device("llama")
    assert torch.equal(draw(other, sample=with_graphs).tokens, expected.tokens)
    assert other.model not in graphs.refused


@architectures
def test_the_gradient_is_that_of_the_cpu(name):
    policy = on_device(name)
    on_cpu = load_random_model(name)
    expected, _ = gradient(train.backward, on_cpu, draw(on_cpu))
    rollouts = draw(policy)
    advantages = torch.linspace(-1, 1, len(rollouts.tokens), device=DEVICE)
    for backward in (train.backward, fast.backward):
        ours, _ = gradient(backward, policy, rollouts, advantages)
        assert_same_gradient([own.cpu() for own in ours], expected, 1e-3)


def test_training_and_a_resume_come_to_what_the_cpu_comes_to():
    """Methods side by side, too. A checkpoint that is lost is trained again, in this process."""
    train.main([*RUN, "cpu", "--jobs", "1", "--eval-problems", "0", "--out", "cpu"])
    train.main([*RUN, DEVICE, "--jobs", "2", "--out", "run"])
    shutil.rmtree("run/vpo/checkpoint-000002")
    train.main(["--resume", "--jobs", "1", "--out", "run"])
    flags = json.loads(Path("run/config.json").read_text("utf-8"))["flags"]
    assert flags["micro_batch_tokens"] > 0 and flags["sampling_batch"] > 0
    for method in ("grpo", "vpo"):
        rows = zip(metrics(Path("run", method)), metrics(Path("cpu", method)), strict=True)
        for own, expected in rows:
            assert own["loss"] == pytest.approx(expected["loss"], abs=1e-3)
            assert own["reward"] == pytest.approx(expected["reward"], abs=1e-3)
    assert len(json.loads(Path("run/eval.json").read_text("utf-8"))["policies"]) == 5


def test_out_of_memory_is_explained():
    """A card of 256 MiB, and a gradient of 5,120 rollouts at once, which takes more than three times that."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch, train; "
    code += "share = 2**28 / torch.cuda.mem_get_info()[1]; "
    code += "torch.cuda.set_per_process_memory_fraction(share); train.main()"
    flags = "--warm-steps 0 --group-size 512 --micro-batch-tokens 0 --jobs 1 --out run"
    done = subprocess.run(
        [sys.executable, "-c", code, *RUN, DEVICE, *flags.split()], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "out of memory" in done.stderr and "--micro-batch-tokens" in done.stderr
