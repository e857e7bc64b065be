"""Plain against fast: the same tokens, the same gradient; and both against each rollout on its own."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    TASK,
    TOLERANCE,
    MarkedWords,
    assert_plain_is_fast,
    assert_same_gradient,
    assert_same_tokens,
    copy_of,
    draw,
    ends_soon,
    gradient,
    load_random_model,
    plain_logits,
    with_graphs,
)
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.glm4 import modeling_glm4 as glm4

import fast
import rollout
import train
import vpo
from engine.config import Config
from engine.models import recompute_layers
from engine.optimizer import MasterWeightAdamW
from fast import graphs, lean, update
from rollout import Policy, StopRule

PLAIN = ("qwen3_5", "falcon_h1")  # train the plain way
both_kinds = pytest.mark.parametrize("name", ["tiny", "llama"])


# The gradient.


def backward_of_single_rollouts(policy, reference, rollouts, advantages, config) -> dict:
    """Each rollout without cache, padding and micro-batches, all logits at once."""
    totals = Counter()
    for row, length in enumerate(rollouts.lengths):
        tokens = rollouts.tokens[row, :length, None]
        log_p = torch.log_softmax(plain_logits(policy, rollouts, row) / 0.7, -1)
        options = {"entropy": -(log_p.exp() * log_p).sum(-1)[None]}
        if reference:
            with torch.no_grad():
                ref_log_p = torch.log_softmax(plain_logits(reference, rollouts, row) / 0.7, -1)
            options["ref_logprobs"] = ref_log_p.gather(1, tokens).T
        options |= {"kl_coef": config.kl, "entropy_coef": config.entropy_coef}
        old, mask = rollouts.logprobs[[row], :length], torch.ones(1, length, dtype=torch.bool)
        batch = (log_p.gather(1, tokens).T, old, advantages[[row]], mask, sum(rollouts.lengths))
        loss, parts = vpo.policy_loss(*batch, **options)
        loss.backward()
        totals.update(parts | {"loss": loss.detach()})
        totals["entropy"] += options["entropy"].sum() / sum(rollouts.lengths)
    return totals


TERMS = [("tiny", "kl"), ("llama", "bonus"), *((name, "kl, bonus") for name in ARCHITECTURES)]


@pytest.mark.parametrize(("name", "terms"), TERMS)
def test_both_have_the_gradient_of_single_rollouts(name, terms, monkeypatch):
    """Guards against a wrong mask or position behind a shared prompt, and micro-batches or chunks of
    the LM head that do not add up. The KL term without a bonus, the bonus without KL, and both."""
    policy = load_random_model(name)
    head = policy.model.get_output_embeddings()
    monkeypatch.setattr(rollout, "HEAD_BYTES", 20 * 4 * head.weight.shape[0])
    rollouts = draw(policy, stop=ends_soon)
    assert max(rollouts.lengths) > 2 * min(rollouts.lengths), "the test wants padding"
    options = {"advantages": torch.linspace(-1, 1, 12)}
    options["advantages"][3:6] = 0.0  # KL and bonus have a gradient all the same
    options["bonus"] = 0.3 if "bonus" in terms else 0.0
    options["reference"] = copy_of(policy, 0.01) if "kl" in terms else None
    expected, numbers = gradient(backward_of_single_rollouts, policy, rollouts, **options)
    for backward in [train.backward] if name in PLAIN else [train.backward, fast.backward]:
        ours, metrics = gradient(backward, policy, rollouts, **options)
        assert_same_gradient(ours, expected, TOLERANCE)
        assert metrics == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def imitate(policy: Policy, *arguments) -> None:
    """A step of the SFT warm-up, in place of a gradient."""
    train.warm_up(policy, TASK, Config(warm_steps=1, m=3, micro_batch_tokens=0))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("backward", [train.backward, fast.backward, imitate])
def test_logits_of_one_chunk_are_kept(backward, entropy_coef, monkeypatch):
    """Guards against a backward pass that keeps all of them for an entropy without gradient, on a card 40 GiB."""
    policy = copy_of(load_random_model("llama"))
    rollouts = draw(policy)
    rows = policy.model.get_output_embeddings().weight.shape[0]
    monkeypatch.setattr(rollout, "HEAD_BYTES", 20 * 4 * rows)
    softmax = torch.log_softmax
    made = []  # weak references to the memory of log-probabilities
    kept = []  # how many of them there are, each time

    def log_softmax(*arguments) -> Tensor:
        log_p = softmax(*arguments)
        made.append(weakref.ref(log_p.untyped_storage()))
        kept.append(sum(memory() is not None for memory in made))
        return log_p

    monkeypatch.setattr(torch, "log_softmax", log_softmax)
    config = Config(micro_batch_tokens=0, kl=0.0, entropy_coef=entropy_coef)
    backward(policy, None, rollouts, torch.linspace(-1, 1, 12), config)
    assert len(made) > 20 and max(kept) < 3


@both_kinds
def test_layers_that_are_computed_again_give_the_same_gradient(name):
    """Guards against a layer that sees its tokens twice, because the KV cache is kept."""
    policy = load_random_model(name)
    rollouts = draw(policy)
    expected, _ = gradient(train.backward, policy, rollouts)
    lean = copy_of(policy)
    recompute_layers(lean.model)
    kept = []

    def count(x: Tensor) -> Tensor:
        kept[-1] += x.nbytes
        return x

    for own in (policy, lean):
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            rollout.token_logprobs(own.model, rollouts, torch.arange(12), 0.7)
    assert kept[1] < 0.7 * kept[0], "nothing was saved"
    assert_same_gradient(gradient(train.backward, lean, rollouts)[0], expected, TOLERANCE)
    assert_plain_is_fast(lean, rollouts)


@both_kinds
def test_rollouts_without_gradient_are_left_out(name, monkeypatch):
    """Advantage 0 and no KL term: the gradient is the same, and the entropy is that of the others."""
    policy = load_random_model(name)
    rollouts = draw(policy)
    advantages = torch.zeros(12)
    advantages[[1, 7, 10]] = torch.tensor([1.0, -1.0, 0.5])  # of prompts 0, 2 and 3
    computed = []
    original = update.logprobs_after

    def spied(model, rollouts, rows, *rest):
        computed.extend(rows)
        return original(model, rollouts, rows, *rest)

    monkeypatch.setattr(update, "logprobs_after", spied)
    plain, expected = gradient(train.backward, policy, rollouts, advantages)
    ours, metrics = gradient(fast.backward, policy, rollouts, advantages)
    assert sorted(computed) == [1, 7, 10]
    assert_same_gradient(ours, plain, TOLERANCE)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    rows = torch.tensor([1, 7, 10])
    _, entropy = rollout.token_logprobs(policy.model, rollouts, rows, 0.7)
    mean = (entropy.sum() / rollouts.token_mask[rows].sum()).item()
    assert metrics["entropy"] == pytest.approx(mean, rel=1e-4)

    computed.clear()
    assert_plain_is_fast(policy, rollouts, advantages=advantages, reference=copy_of(policy, 0.01))
    assert sorted(computed) == sorted([*range(12), *range(12)]), "policy and reference"


@both_kinds
def test_a_step_without_any_signal(name):
    """All advantages are 0, so fast computes nothing: guards against weights that its optimizer then leaves out."""
    weights = []
    for backward in (train.backward, fast.backward):
        policy = copy_of(load_random_model(name))
        metrics = backward(policy, None, draw(policy), torch.zeros(12), Config(kl=0.0))
        assert metrics["loss"] == 0
        MasterWeightAdamW(policy.model).step(1e-2)
        weights.append(torch.cat([weight.flatten() for weight in policy.model.parameters()]))
    assert torch.equal(*weights)


@both_kinds
def test_rollouts_of_one_token(name):
    """Nothing of them goes through the model after the prompt."""
    policy = load_random_model(name)
    rollouts = draw(policy, max_new_tokens=1)
    assert_plain_is_fast(policy, rollouts)
    assert_plain_is_fast(policy, rollouts, reference=copy_of(policy, 0.01), budget=1)


@pytest.mark.parametrize("budget", [0, 1, 100, 300])
@pytest.mark.parametrize("T", [2, 40])
def test_micro_batches_hold_each_row_once_and_keep_the_budget(budget, T):
    """Guards against rows that are lost, and many short rollouts with a copy of a long prompt each."""
    rollouts = draw(load_random_model("tiny"), n=6, G=8, max_new_tokens=T)
    chunks = update.prompt_chunks(rollouts, list(range(48)), budget)
    copied = min(rollouts.prompt_lengths) // 4  # what a copy of a prompt counts for

    def fits(lengths: list[int]) -> bool:
        return len(lengths) == 1 or not budget or max(lengths) * len(lengths) <= budget

    rows = []
    for chunk in chunks:
        assert fits([rollouts.prompt_lengths[p] for p in chunk.prompts])
        chunk_rows = []
        for batch in chunk.batches:
            assert fits([rollouts.lengths[row] for row in batch])
            assert fits([copied] * len(batch))
            chunk_rows += batch
        assert {row // 8 for row in chunk_rows} == set(chunk.prompts)
        rows += chunk_rows
    assert sorted(rows) == list(range(48))
    assert budget or len(chunks) == 1


# Sampling.


class Tape(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: the same operators once more, on the memory they had
    before. So what Python decided stays decided, and nobody may ask for the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "_local_scalar_dense" in operator.name():
            raise RuntimeError("the host asks")
        out = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for operator, args, kwargs, out in self.calls:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def taped(function: Callable[[], None], space: graphs.Workspace) -> Callable[[], None]:
    """As `graphs.captured`."""
    with Tape() as tape:
        function()
    space.place.sub_(1)
    return tape.replay


@pytest.mark.parametrize("name", ["tiny", *(name for name in ARCHITECTURES if name not in PLAIN)])
def test_a_graph_draws_the_same_tokens(name, monkeypatch):
    """Guards against a place, a window or a random number that is that of the captured token. The
    same graphs serve other prompts, and weights that have changed where they are. Weights that are
    elsewhere, such as those of an adapter, get new ones."""
    monkeypatch.setattr(graphs, "captured", taped)
    policy = copy_of(load_random_model(name))
    if name != "gemma2":  # its attention is computed in float32, whatever its weights are
        policy.model.double()  # so that no rounding draws another token
    many = {"n": 6, "G": 6, "stop": ends_soon}
    assert_same_tokens(policy, **many)
    space = graphs.workspaces[policy.model]
    captured = dict(space.graphs)
    assert min(b for b, _, _ in captured) < 36 / 2, "the test wants a batch that gets smaller"
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(0.9)
    assert_same_tokens(policy, **many)
    assert graphs.workspaces[policy.model] is space
    assert captured.items() <= space.graphs.items(), "a graph was captured again"
    assert_same_tokens(policy, n=3, G=2, max_new_tokens=12, temperature=1.1)
    assert_same_tokens(policy, n=2, G=1, max_new_tokens=1)
    assert graphs.workspaces[policy.model] is space
    for weight in policy.model.parameters():
        weight.data = weight.data * 1.1
    assert_same_tokens(policy, **many)
    assert graphs.workspaces[policy.model] is not space
    assert policy.model not in graphs.refused


def test_a_stop_that_is_noticed_late_is_the_same_stop(monkeypatch):
    """Guards against tokens after the end that would be trained on."""
    monkeypatch.setattr(graphs, "LOOK_EVERY", 7)
    policy = load_random_model("llama")
    for m in (1, 3):
        assert_same_tokens(policy, n=6, stop=StopRule(policy, MarkedWords(), m))
        assert_same_tokens(policy, n=6, batch=5, stop=StopRule(policy, MarkedWords(), m))


@pytest.mark.parametrize("way", ["the host asks", "a ready mask"])
def test_a_model_without_a_graph_goes_on_and_says_so_once(way, monkeypatch, capsys):
    """Guards against silence, a retry at each batch, and a model that reads the mask in its own way."""
    monkeypatch.setattr(graphs, "captured", taped)
    policy = copy_of(load_random_model("llama"))
    if way == "the host asks":
        layer = policy.model.base_model.layers[0]
        layer.register_forward_hook(lambda module, inputs, output: output.sum().item() and None)
    else:
        monkeypatch.setattr(graphs, "ready_mask", lambda model, seen, distance: ~seen)
    capsys.readouterr()
    assert_same_tokens(policy)
    assert_same_tokens(policy)
    (line,) = capsys.readouterr().err.splitlines()
    assert "without a CUDA graph" in line and way in line
    assert policy.model not in graphs.workspaces


def test_a_batch_without_memory_for_graphs_goes_on_without_them(monkeypatch, capsys):
    """Guards against a model that is sampled slowly for ever after one batch that was too large."""
    policy = copy_of(load_random_model("llama"))
    with_graphs = graphs.decode_with_graphs

    too_large = Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr(graphs, "decode_with_graphs", too_large)
    assert_same_tokens(policy)
    assert policy.model not in graphs.workspaces
    assert "without a CUDA graph: out of memory" in capsys.readouterr().err
    monkeypatch.setattr(graphs, "decode_with_graphs", with_graphs)
    assert_same_tokens(policy)
    assert policy.model in graphs.workspaces


# Fewer kernels.


def own_functions(model: nn.Module) -> dict[str, object]:
    """What a model's parts and its module hold under the names that fast/ swaps."""
    module = sys.modules[type(model.base_model).__module__]
    functions = {name: vars(part).get("forward") for name, part in model.named_modules()}
    return functions | {"rope": vars(module)["apply_rotary_pos_emb"]}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_has_its_own_functions_again(name, tmp_path):
    """Guards against a model that is saved or handed on with functions of ours, after an error too."""
    policy = copy_of(load_random_model(name))
    before = own_functions(policy.model)
    rollouts = draw(policy, sample=with_graphs)
    gradient(fast.backward, policy, rollouts, reference=policy)
    assert own_functions(policy.model) == before
    with pytest.raises(KeyError), lean.lean(policy.model):
        assert own_functions(policy.model) != before
        raise KeyError
    assert own_functions(policy.model) == before


def test_only_what_a_trial_proves_is_swapped(monkeypatch):
    """Guards against norms that know another epsilon, and RoPE of neighbours or of a part of the width."""
    model = copy_of(load_random_model("llama")).model
    assert len([*lean.find_norms(model)]) == 5

    def forward(norm: nn.Module, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], norm.weight, 10 * norm.variance_epsilon)

    monkeypatch.setattr(type(model.base_model.norm), "forward", forward)
    assert not [*lean.find_norms(model)]

    assert [*lean.find_rope(model)]
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", glm4.apply_rotary_pos_emb)
    assert not [*lean.find_rope(model)]
    x = torch.randn(1, 2, 3, 8)
    angles = torch.randn(1, 3, 4)
    calls = []
    lean.rope(lambda *inputs: calls.append(inputs), x, x, angles, angles)
    assert len(calls) == 1, "the model's own function turns a part of the width"
