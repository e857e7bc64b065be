"""The update: its gradients against the plain computation's, its micro-batches, its bfloat16 weights, LoRA."""

import copy

import pytest
import torch
from test_rollout import (
    SHAPE,
    TASK,
    any_model,
    draw,
    plain_logits,
    policy_pair,  # noqa: F401 - the fixture applies by its name
    save_random_model,
    tiny_model,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

import vpo
from engine import memory, models, update
from engine.decoding import Rollouts
from rewards import UserError


@pytest.fixture(scope="module")
def rollouts(policy_pair) -> Rollouts:  # noqa: F811
    """4 prompts of different lengths, 3 rollouts each."""
    return draw(policy_pair)


def neighbour(model):
    """A reference policy that differs a little."""
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01)
    return reference


def gradients(
    model, rollouts, advantages=None, *, kl: float = 0.1, **options
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Of every weight, and the metrics."""
    advantages = (
        torch.linspace(-1, 1, len(rollouts.tokens)).tolist() if advantages is None else advantages
    )
    model.zero_grad()
    metrics = update.backward(
        model,
        neighbour(model) if kl else None,
        rollouts,
        advantages,
        kl=kl,
        temperature=0.7,
        **options,
    )
    return (
        {name: parameter.grad.clone() for name, parameter in model.named_parameters()},
        {name: float(value) for name, value in metrics.items()},
    )


def plain_gradients(
    model, rollouts, kl: float = 0.1
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Each rollout on its own, its prompt before it, all logits at once: nothing shared, chunked, packed or skipped."""
    reference, n_tokens = neighbour(model), sum(rollouts.lengths)
    advantages = torch.linspace(-1, 1, len(rollouts.tokens))
    model.zero_grad()
    totals: dict[str, float] = {}
    for row, length in enumerate(rollouts.lengths):
        tokens = rollouts.tokens[row, :length, None]
        log_p, ref_log_p = (
            torch.log_softmax(plain_logits(m, rollouts, row) / 0.7, -1) for m in (model, reference)
        )
        loss, metrics = vpo.policy_loss(
            log_p.gather(1, tokens).T,
            rollouts.logprobs[row : row + 1, :length],
            advantages[row : row + 1],
            torch.ones(1, length, dtype=torch.bool),
            n_tokens,
            kl_coef=kl,
            ref_logprobs=ref_log_p.gather(1, tokens).T.detach() if kl else None,
        )
        loss.backward()
        metrics |= {
            "loss": loss.detach(),
            "entropy": -(log_p.exp() * log_p).sum().detach() / n_tokens,
        }
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in metrics.items()}
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, totals


def assert_equal(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    """To float tolerance, weight by weight; a weight's gradient may be as small as it likes beside the largest."""
    scale = max(gradient.abs().max().item() for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(
            ours[name],
            gradient,
            atol=1e-5 * scale + 1e-4 * gradient.abs().max().item(),
            rtol=1e-3,
            msg=name,
        )


def test_gradients_and_metrics_are_the_plain_ones(policy_pair, rollouts, monkeypatch):  # noqa: F811
    """Shared prompts, rollouts sorted into micro-batches, the head in chunks of 3 rows: guards against a wrong mask or
    position, denominators of a micro-batch, groups that a boundary cuts. The neighbour shows that it can fail."""
    model, _ = policy_pair
    monkeypatch.setattr(update, "CHUNK_BYTES", 3 * 4 * model.config.vocab_size)
    plain, expected = plain_gradients(model, rollouts)
    ours, metrics = gradients(model, rollouts, micro_batch_tokens=130)
    assert_equal(ours, plain)
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    with pytest.raises(AssertionError):
        assert_equal(gradients(neighbour(model), rollouts)[0], plain)


@any_model
def test_micro_batches_change_no_gradient(policy_pair, rollouts):  # noqa: F811
    """All at once, or each rollout on its own, give what the test above compares with the plain computation."""
    expected, metrics = gradients(policy_pair[0], rollouts, micro_batch_tokens=130)
    for budget in (0, 1):
        ours, same = gradients(policy_pair[0], rollouts, micro_batch_tokens=budget)
        assert_equal(ours, expected)
        assert same == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_recomputed_layers_give_the_same_gradient(policy_pair, rollouts):  # noqa: F811
    """Gradient checkpointing with the KV cache kept: a layer computed again must not see its own tokens twice."""
    model, _ = policy_pair
    expected, _ = gradients(model, rollouts, micro_batch_tokens=130)
    lean = copy.deepcopy(model)
    models.recompute_layers(lean)
    assert_equal(gradients(lean, rollouts, micro_batch_tokens=130)[0], expected)
    bytes_taken = []
    for m in (model, lean):
        with memory.Tally() as tally:
            gradients(m, rollouts, kl=0.0)
        bytes_taken.append(tally.peak)
    assert bytes_taken[1] < 0.9 * bytes_taken[0], "nothing was saved"


@any_model
def test_rollouts_without_gradient_are_not_computed(policy_pair, rollouts, monkeypatch):  # noqa: F811
    """Advantage 0 and no KL term: left out, and the gradient is the same. With a KL term they are computed."""
    model, _ = policy_pair
    advantages = [0.0, 0.0, 0.0, 1.0, 0.0, -1.0] + [0.0] * 6
    computed = []
    original = update.token_logprobs
    monkeypatch.setattr(
        update,
        "token_logprobs",
        lambda model, rollouts, rows, **rest: (
            computed.extend(rows) or original(model, rollouts, rows, **rest)
        ),
    )
    sparse, metrics = gradients(model, rollouts, advantages, kl=0.0)
    assert sorted(computed) == [3, 5]
    _, entropy = original(model, rollouts, [3, 5], temperature=0.7)
    assert metrics["entropy"] == pytest.approx(
        float(entropy.sum()) / (rollouts.lengths[3] + rollouts.lengths[5]), rel=1e-4
    ), "of the computed ones"
    everything, _ = gradients(model, rollouts, [A or 1e-30 for A in advantages], kl=0.0)
    assert_equal(sparse, everything)
    computed.clear()
    gradients(model, rollouts, advantages, kl=0.1)
    assert set(computed) == set(range(12))
    nothing, metrics = gradients(model, rollouts, [0.0] * 12, kl=0.0)
    assert not any(gradient.any() for gradient in nothing.values()) and metrics["loss"] == 0


def test_no_tensor_of_tokens_and_vocabulary_exists(monkeypatch):
    """At Qwen's vocabulary of 151,936: every tensor of logits stays below CHUNK_BYTES, where the plain update has
    several of them whole. Sizes as torch allocates them, on tensors without contents."""
    monkeypatch.setattr(update, "CHUNK_BYTES", 2**24)
    config, logits_seen = Qwen2Config(**SHAPE, vocab_size=151936), []

    class LogitsTally(memory.Tally):
        def __torch_dispatch__(self, *call):
            out = super().__torch_dispatch__(*call)
            for x in tree_leaves(out):
                if (
                    getattr(x, "ndim", 0)
                    and x.shape[-1] == config.vocab_size
                    and x.shape[0] != config.hidden_size
                ):
                    logits_seen.append(x.nbytes)
            return out

    with FakeTensorMode():
        model, T = AutoModelForCausalLM.from_config(config).eval(), 15
        rollouts = Rollouts(
            torch.zeros(2, 60, dtype=torch.long),
            [60, 50],
            torch.zeros(8, T, dtype=torch.long),
            torch.zeros(8, T),
            [T] * 8,
            [],
            [],
        )
        assert 4 * config.vocab_size * 8 * T > 3 * update.CHUNK_BYTES
        with LogitsTally() as ours:
            update.backward(model, None, rollouts, [1.0] * 8)
        with memory.Tally() as plain:
            logits = model(
                torch.cat([rollouts.prompt_ids.repeat_interleave(4, 0), rollouts.tokens], 1)
            ).logits
            torch.log_softmax(logits, -1)[:, :-1].gather(
                2, rollouts.tokens[:, :1, None]
            ).sum().backward()
    assert len(logits_seen) > 6 and max(logits_seen) <= update.CHUNK_BYTES
    assert ours.peak < plain.peak / 3


@tiny_model
def test_micro_batches_hold_each_row_once_and_keep_the_budget(policy_pair):  # noqa: F811
    rollouts = draw(policy_pair, n=6, group_size=4)
    for budget in (0, 1, 100, 300):
        parts = update.micro_batches(rollouts, list(range(24)), budget)
        assert sorted(row for _, batches in parts for batch in batches for row in batch) == list(
            range(24)
        )
        for prompts, batches in parts:
            assert {row // 4 for batch in batches for row in batch} == set(prompts)
            for lengths, items in [
                (rollouts.prompt_lengths, prompts),
                *((rollouts.lengths, batch) for batch in batches),
            ]:
                assert (
                    len(items) == 1
                    or not budget
                    or max(lengths[i] for i in items) * len(items) <= budget
                )
            for batch in batches:  # copies of prompts
                assert (
                    len(batch) == 1
                    or not budget
                    or len(batch) * (min(rollouts.prompt_lengths) // 4) <= budget
                )
    assert len(update.micro_batches(rollouts, list(range(24)), 0)) == 1


def test_split_and_join_lose_no_bit():
    """Random bit patterns of finite floats, numbers on the border between two roundings among them."""
    bits = torch.randint(
        -(2**31),
        2**31 - 1,
        (200_000,),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.int64,
    ).int()
    bits[:1000] = (bits[:1000] & ~0xFFFF) | 0x8000  # halfway between two bfloat16 numbers
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    upper, lower = update.split(x)
    assert torch.equal(update.join(upper, lower).view(torch.int32), x.view(torch.int32))
    assert ((upper.float() - x).abs() <= (x.bfloat16().float() - x).abs()).all(), "not the nearest"


def test_every_nan_stays_one():
    """Whatever its bits: some would overflow into an infinity or a finite number when they are rounded."""
    mantissa = torch.cat(
        [torch.arange(1, 2**15), torch.randint(1, 2**23, (20_000,)), 2**23 - torch.arange(1, 2**15)]
    )
    x = (
        torch.cat([mantissa | 0x7F800000, (mantissa | 0x7F800000) - 2**31])
        .int()
        .view(torch.float32)
    )
    assert x.isnan().all() and x.signbit().any() and not x.signbit().all()
    upper, lower = update.split(x)
    assert upper.isnan().all() and update.join(upper, lower).isnan().all()


def run_adamw(make, dtype: torch.dtype, steps: int, lr: float) -> torch.nn.Linear:
    """A layer of 24 weights after some steps of gradients that bfloat16 can hold, the same for every optimizer."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 4)
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    move = make(layer)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = (torch.randn(parameter.shape) + 0.5).bfloat16().to(dtype)
        move(lr)
    return layer


def torch_adamw(layer: torch.nn.Linear):
    optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.01)

    def move(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    return move


def test_adamw_is_torchs(monkeypatch):
    monkeypatch.setattr(update, "CHUNK_WEIGHTS", 7)  # matrices in pieces
    ours = run_adamw(lambda layer: update.AdamW(layer).step, torch.float32, 20, 1e-3)
    theirs = run_adamw(torch_adamw, torch.float32, 20, 1e-3)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_bfloat16_weights_move_as_float32_ones_do(monkeypatch):
    """30 steps of 1e-6. Rounded weights do not move at all; with their lower halves they arrive where float32 does."""
    monkeypatch.setattr(update, "CHUNK_WEIGHTS", 7)
    optimizers = []
    ours = run_adamw(
        lambda layer: optimizers.append(update.AdamW(layer)) or optimizers[0].step,
        torch.bfloat16,
        30,
        1e-6,
    )
    exact = run_adamw(torch_adamw, torch.float32, 30, 1e-6)
    start = run_adamw(torch_adamw, torch.float32, 0, 1e-6)
    naive = run_adamw(torch_adamw, torch.bfloat16, 30, 1e-6)
    for a, b, c, d, lower in zip(
        ours.parameters(),
        exact.parameters(),
        start.parameters(),
        naive.parameters(),
        optimizers[0].lower,
        strict=True,
    ):
        moved = update.join(a.data.view(-1), lower).view(a.shape)
        torch.testing.assert_close(moved - c, b - c, atol=1e-7, rtol=1e-2)
        assert (b - c).abs().min() > 1e-6 and torch.equal(d.float(), c)


@any_model
def test_an_adapter_is_trained_and_is_off_for_the_reference(
    request, policy_pair, rollouts, tmp_path
):  # noqa: F811
    """LoRA: only the adapter has gradients, and with it off the model is the one before training."""
    pytest.importorskip("peft")
    name = request.node.callspec.params["policy_pair"]
    folder = name if name == "tiny" else save_random_model(tmp_path, name)
    model, _ = models.load_policy(folder, TASK, seed=1, lora_rank=4)
    before, _ = update.token_logprobs(policy_pair[0], rollouts, range(12))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora" in name for name in trained)
    optimizer = update.AdamW(model)
    for _ in range(3):
        model.zero_grad()
        update.backward(model, model, rollouts, torch.linspace(-1, 1, 12).tolist(), kl=0.1)
        optimizer.step(1e-2)
    after, _ = update.token_logprobs(model, rollouts, range(12))
    with models.adapter_off(model):
        reference, _ = update.token_logprobs(model, rollouts, range(12))
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(reference, before)
    again, _ = update.token_logprobs(model, rollouts, range(12))
    assert torch.equal(again, after), "the adapter is on again"


def test_an_adapter_without_peft_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UserError, match="--lora-rank 4: needs peft.*pip install peft"):
        models.load_policy("tiny", TASK, lora_rank=4)
