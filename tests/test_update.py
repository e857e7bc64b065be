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
from engine import forward, lm_head, memory, models, optimizer, update
from engine.decoding import Rollouts
from rewards import UserError

TEMPERATURE = 0.7  # of `draw`


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


def whole_gradient(
    model,
    reference,
    rollouts: Rollouts,
    advantages: list[float],
    kl: float = 0.0,
    token_budget: int = 0,
) -> dict[str, float]:
    """Add the gradient of a batch of rollouts to the model's, as train_step does; the metrics."""
    advantages = torch.tensor(advantages)
    rows = update.rows_to_compute(advantages, with_reference=reference is not None)
    n_computed = max(1, sum(rollouts.lengths[row] for row in rows))
    totals = {"loss": 0.0, "policy_loss": 0.0, "clip_fraction": 0.0, "entropy": 0.0}
    for batch in update.micro_batches(
        model, reference, rollouts, rows, temperature=TEMPERATURE, token_budget=token_budget
    ):
        loss, metrics = vpo.policy_loss(
            batch.logprobs,
            batch.old_logprobs,
            advantages[batch.rows],
            batch.token_mask,
            sum(rollouts.lengths),
            ref_logprobs=batch.ref_logprobs,
            kl_coef=kl,
        )
        loss.backward()
        metrics["loss"] = loss
        metrics["entropy"] = batch.entropy.sum() / n_computed
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.detach()
    return {name: float(value) for name, value in totals.items()}


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gradients(
    model, rollouts: Rollouts, advantages: list[float] | None = None, *, kl=0.1, token_budget=0
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradients of every weight, and the metrics."""
    if advantages is None:
        advantages = torch.linspace(-1, 1, len(rollouts.tokens)).tolist()
    reference = neighbour(model) if kl else None
    model.zero_grad()
    metrics = whole_gradient(model, reference, rollouts, advantages, kl, token_budget)
    return gradients_of(model), metrics


def plain_gradients(
    model, rollouts: Rollouts, kl: float = 0.1
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Each rollout on its own, its prompt before it, all logits at once: nothing is shared."""
    reference = neighbour(model)
    n_tokens = sum(rollouts.lengths)
    advantages = torch.linspace(-1, 1, len(rollouts.tokens))
    model.zero_grad()
    totals: dict[str, float] = {}
    for row, length in enumerate(rollouts.lengths):
        tokens = rollouts.tokens[row, :length, None]
        log_p = torch.log_softmax(plain_logits(model, rollouts, row) / TEMPERATURE, -1)
        with torch.no_grad():
            ref_logits = plain_logits(reference, rollouts, row)
            ref_log_p = torch.log_softmax(ref_logits / TEMPERATURE, -1)
        loss, metrics = vpo.policy_loss(
            log_p.gather(1, tokens).T,
            rollouts.logprobs[row : row + 1, :length],
            advantages[row : row + 1],
            torch.ones(1, length, dtype=torch.bool),
            n_tokens,
            ref_logprobs=ref_log_p.gather(1, tokens).T,
            kl_coef=kl,
        )
        loss.backward()
        metrics["loss"] = loss
        metrics["entropy"] = -(log_p.exp() * log_p).sum() / n_tokens
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.item()
    return gradients_of(model), totals


def assert_equal(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    """To float tolerance, weight by weight; a gradient may be small beside the largest."""
    scale = max(gradient.abs().max().item() for gradient in plain.values())
    for name, gradient in plain.items():
        tolerance = 1e-5 * scale + 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, atol=tolerance, rtol=1e-3, msg=name)


def test_gradients_and_metrics_are_the_plain_ones(policy_pair, rollouts, monkeypatch):  # noqa: F811
    """Shared prompts, rollouts sorted into micro-batches, the head in chunks of 3 rows.

    Guards against a wrong mask or position, denominators of a micro-batch, and groups that a
    boundary cuts. The neighbour shows that the comparison can fail.
    """
    model, _ = policy_pair
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 3 * 4 * model.config.vocab_size)
    plain, expected = plain_gradients(model, rollouts)
    ours, metrics = gradients(model, rollouts, token_budget=130)
    assert_equal(ours, plain)
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    with pytest.raises(AssertionError):
        assert_equal(gradients(neighbour(model), rollouts)[0], plain)


@any_model
def test_micro_batches_change_no_gradient(policy_pair, rollouts):  # noqa: F811
    """All at once, or each rollout alone, give what the test above compares with the plain one."""
    model, _ = policy_pair
    expected, metrics = gradients(model, rollouts, token_budget=130)
    for budget in (0, 1):
        ours, same = gradients(model, rollouts, token_budget=budget)
        assert_equal(ours, expected)
        assert same == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_recomputed_layers_give_the_same_gradient(policy_pair, rollouts):  # noqa: F811
    """A layer that is computed again, with the KV cache kept, must not see its tokens twice."""
    model, _ = policy_pair
    expected, _ = gradients(model, rollouts, token_budget=130)
    lean = copy.deepcopy(model)
    forward.recompute_layers(lean)
    ours, _ = gradients(lean, rollouts, token_budget=130)
    assert_equal(ours, expected)
    with memory.Tally() as tally:
        gradients(model, rollouts, kl=0.0)
    with memory.Tally() as lean_tally:
        gradients(lean, rollouts, kl=0.0)
    assert lean_tally.peak < 0.9 * tally.peak, "nothing was saved"


@any_model
def test_rollouts_without_gradient_are_not_computed(policy_pair, rollouts, monkeypatch):  # noqa: F811
    """Advantage 0 and no KL term: left out, and the gradient is the same."""
    model, _ = policy_pair
    advantages = [0.0, 0.0, 0.0, 1.0, 0.0, -1.0] + [0.0] * 6
    computed = []
    original = update.token_logprobs

    def spied(model, rollouts, rows, **options):
        computed.extend(rows)
        return original(model, rollouts, rows, **options)

    monkeypatch.setattr(update, "token_logprobs", spied)
    sparse, metrics = gradients(model, rollouts, advantages, kl=0.0)
    assert sorted(computed) == [3, 5]
    _, entropy = original(model, rollouts, [3, 5], temperature=TEMPERATURE)
    n_computed = rollouts.lengths[3] + rollouts.lengths[5]
    assert metrics["entropy"] == pytest.approx(float(entropy.sum()) / n_computed, rel=1e-4)

    everything, _ = gradients(model, rollouts, [A or 1e-30 for A in advantages], kl=0.0)
    assert_equal(sparse, everything)

    computed.clear()
    gradients(model, rollouts, advantages, kl=0.1)
    assert set(computed) == set(range(12))

    nothing, metrics = gradients(model, rollouts, [0.0] * 12, kl=0.0)
    assert not any(gradient.any() for gradient in nothing.values())
    assert metrics["loss"] == 0


class LogitsTally(memory.Tally):
    """Also keeps the size of every tensor whose last dimension is the vocabulary."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.logits_bytes = []

    def __torch_dispatch__(self, *call):
        out = super().__torch_dispatch__(*call)
        for x in tree_leaves(out):
            if not getattr(x, "ndim", 0) or x.shape[-1] != self.config.vocab_size:
                continue
            if x.shape[0] != self.config.hidden_size:  # those are weights
                self.logits_bytes.append(x.nbytes)
        return out


def test_no_tensor_of_tokens_and_vocabulary_exists(monkeypatch):
    """At Qwen's vocabulary every tensor of logits stays below CHUNK_BYTES.

    The plain update has several of them whole. Sizes are those that torch would allocate, on
    tensors without contents.
    """
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 2**24)
    config = Qwen2Config(**SHAPE, vocab_size=151936)
    T = 15
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config).eval()
        prompt_ids = torch.zeros(2, 60, dtype=torch.long)
        tokens = torch.zeros(8, T, dtype=torch.long)
        rollouts = Rollouts(prompt_ids, [60, 50], tokens, torch.zeros(8, T), [T] * 8, [], [])
        assert 4 * config.vocab_size * 8 * T > 3 * lm_head.CHUNK_BYTES
        with LogitsTally(config) as ours:
            for batch in update.micro_batches(model, None, rollouts, list(range(8))):
                batch.logprobs.sum().backward()
        with memory.Tally() as plain:
            logits = model(torch.cat([prompt_ids.repeat_interleave(4, 0), tokens], 1)).logits
            log_p = torch.log_softmax(logits, -1)[:, :-1]
            log_p.gather(2, tokens[:, :1, None]).sum().backward()
    assert len(ours.logits_bytes) > 6
    assert max(ours.logits_bytes) <= lm_head.CHUNK_BYTES
    assert ours.peak < plain.peak / 3


@tiny_model
@pytest.mark.parametrize("budget", [0, 1, 100, 300])
def test_micro_batches_hold_each_row_once_and_keep_the_budget(policy_pair, budget):  # noqa: F811
    rollouts = draw(policy_pair, n=6, group_size=4)
    chunks = update.prompt_chunks(rollouts, list(range(24)), budget)
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
        assert {row // 4 for row in chunk_rows} == set(chunk.prompts)
        rows += chunk_rows
    assert sorted(rows) == list(range(24))
    assert budget or len(chunks) == 1


def test_split_and_join_lose_no_bit():
    """Random bit patterns of finite floats, some of them on the border between two roundings."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator).int()
    bits[:1000] = (bits[:1000] & ~0xFFFF) | 0x8000  # halfway between two bfloat16 numbers
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    upper, lower = optimizer.split(x)
    joined = optimizer.join(upper, lower)
    assert torch.equal(joined.view(torch.int32), x.view(torch.int32))
    error = (upper.float() - x).abs()
    assert (error <= (x.bfloat16().float() - x).abs()).all(), "not the nearest"


def test_every_nan_stays_one():
    """Some bit patterns would overflow into an infinity or a finite number when rounded."""
    small = torch.arange(1, 2**15)
    mantissa = torch.cat([small, torch.randint(1, 2**23, (20_000,)), 2**23 - small])
    positive = mantissa | 0x7F800000
    x = torch.cat([positive, positive - 2**31]).int().view(torch.float32)
    assert x.isnan().all()
    assert x.signbit().sum() == len(mantissa)
    upper, lower = optimizer.split(x)
    assert upper.isnan().all()
    assert optimizer.join(upper, lower).isnan().all()


def run_adamw(make_optimizer, dtype: torch.dtype, steps: int, lr: float):
    """A layer of 24 weights after some steps of gradients that bfloat16 can hold, the same for
    every optimizer; and the optimizer."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 4)
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    adamw = make_optimizer(layer)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = (torch.randn(parameter.shape) + 0.5).bfloat16().to(dtype)
        adamw.step(lr)
    return list(layer.parameters()), adamw


class TorchAdamW(torch.optim.AdamW):
    """torch's own, with the interface of ours."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__(layer.parameters(), weight_decay=0.01)

    def step(self, lr: float) -> None:
        self.param_groups[0]["lr"] = lr
        super().step()


def test_adamw_is_torchs(monkeypatch):
    monkeypatch.setattr(optimizer, "CHUNK_WEIGHTS", 7)  # matrices in pieces
    ours, _ = run_adamw(optimizer.AdamW, torch.float32, 20, 1e-3)
    theirs, _ = run_adamw(TorchAdamW, torch.float32, 20, 1e-3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_bfloat16_weights_move_as_float32_ones_do(monkeypatch):
    """30 steps of 1e-6: rounded weights do not move, those with lower halves arrive exactly."""
    monkeypatch.setattr(optimizer, "CHUNK_WEIGHTS", 7)
    ours, adamw = run_adamw(optimizer.AdamW, torch.bfloat16, 30, 1e-6)
    exact, _ = run_adamw(TorchAdamW, torch.float32, 30, 1e-6)
    start, _ = run_adamw(TorchAdamW, torch.float32, 0, 1e-6)
    rounded, _ = run_adamw(TorchAdamW, torch.bfloat16, 30, 1e-6)
    for i, lower in enumerate(adamw.lower):
        arrived = optimizer.join(ours[i].data.view(-1), lower).view(ours[i].shape)
        expected = exact[i] - start[i]
        torch.testing.assert_close(arrived - start[i], expected, atol=1e-7, rtol=1e-2)
        assert expected.abs().min() > 1e-6
        assert torch.equal(rounded[i].float(), start[i])


@any_model
def test_an_adapter_is_trained_and_is_off_for_the_reference(
    request,
    policy_pair,  # noqa: F811
    rollouts,
    tmp_path,
):
    """LoRA: only the adapter has gradients, and with it off the model is the one before training."""
    pytest.importorskip("peft")
    name = request.node.callspec.params["policy_pair"]
    folder = name if name == "tiny" else save_random_model(tmp_path, name)
    model, _ = models.load_policy(folder, TASK, seed=1)
    models.add_adapter(model, 4)
    before, _ = update.token_logprobs(policy_pair[0], rollouts, range(12))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora" in name for name in trained)
    adamw = optimizer.AdamW(model)
    for _ in range(3):
        model.zero_grad()
        whole_gradient(model, model, rollouts, torch.linspace(-1, 1, 12).tolist(), kl=0.1)
        adamw.step(1e-2)
    after, _ = update.token_logprobs(model, rollouts, range(12))
    with forward.adapter_off(model):
        reference, _ = update.token_logprobs(model, rollouts, range(12))
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(reference, before)
    again, _ = update.token_logprobs(model, rollouts, range(12))
    assert torch.equal(again, after), "the adapter is on again"


def test_an_adapter_without_peft_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    model, _ = models.load_policy("tiny", TASK)
    with pytest.raises(UserError, match="--lora-rank 4: needs peft.*pip install peft"):
        models.add_adapter(model, 4)
