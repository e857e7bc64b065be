"""Sampling and scoring, on the tiny model and on small random models of real architectures loaded from disk."""

import copy
import types

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

import rollout
import train
from rewards import Maze, UserError

TASK = Maze(5)


def save_random_model(folder, architecture: str) -> str:
    """A small random model with a byte-level tokenizer of its own, as an ordinary checkpoint on disk."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = __import__("tokenizers").decoders.ByteLevel()
    backend.train_from_iterator([TASK.prompt(p, 3) for p in TASK.problems("train", 20)], trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<other_eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    if architecture == "qwen2":
        tokenizer.chat_template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
                                   "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    shape = {"vocab_size": len(tokenizer) + 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.3}
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[architecture](**shape, bos_token_id=None, eos_token_id=[0, 1])
    torch.manual_seed(0)
    rollout.save_policy(AutoModelForCausalLM.from_config(config), tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module", params=["tiny", "llama", "qwen2"])
def policy(request, tmp_path_factory):
    name = request.param
    if name != "tiny":
        name = save_random_model(tmp_path_factory.mktemp(name), name)
    return rollout.load_policy(name, TASK, seed=1)


def draw(policy, n: int = 4, group_size: int = 3, temperature: float = 0.7, max_new_tokens: int = 40) -> rollout.Rollouts:
    """Rollouts of prompts of different lengths, so that there is left padding."""
    model, tokenizer = policy
    prompts = [rollout.build_prompt(tokenizer, TASK, problem, 2) for problem in TASK.problems("train", n)]
    if rollout.is_tiny(tokenizer):
        prompts[1] = " ".join(prompts[1].split()[:-3])
    else:
        prompts[1] = prompts[1][20:]
    return rollout.sample(model, tokenizer, prompts, group_size, max_new_tokens=max_new_tokens, temperature=temperature,
                          generator=torch.Generator().manual_seed(0))


def plain_logits(model, rollouts: rollout.Rollouts, row: int) -> torch.Tensor:
    """One rollout through the model without cache, padding or sharing: logits (T, V) before each sampled token."""
    p = row // rollouts.group_size
    prompt = rollouts.prompt_ids[p][rollouts.prompt_mask[p]]
    tokens = rollouts.tokens[row][rollouts.mask[row]]
    return model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1:-1]


def test_recorded_logprobs_equal_a_fresh_forward_pass(policy):
    """Guards against sampling from one distribution and scoring another, and against padding that shifts positions."""
    model, _ = policy
    rollouts = draw(policy)
    assert not rollouts.prompt_mask.all(), "the test wants left padding"
    with torch.no_grad():
        shared, entropy = rollout.token_logprobs(model, rollouts, 0, len(rollouts.tokens), temperature=0.7, with_entropy=True)
        for row in range(len(rollouts.tokens)):
            mask = rollouts.mask[row]
            log_p = torch.log_softmax(plain_logits(model, rollouts, row) / 0.7, -1)
            fresh = log_p.gather(1, rollouts.tokens[row][mask][:, None])[:, 0]
            torch.testing.assert_close(rollouts.logprobs[row][mask], fresh, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(shared[row][mask], fresh, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(entropy[row][mask], -(log_p.exp() * log_p).sum(-1), atol=1e-4, rtol=1e-4)
    wrong, _ = rollout.token_logprobs(model, rollouts, 0, 12, temperature=1.0)
    assert (wrong - rollouts.logprobs)[rollouts.mask].abs().max() > 0.05, "another temperature must show"


def test_masks_come_from_positions(policy):
    """The first EOS is sampled and trained, nothing after it; guards against masks taken from the pad id."""
    model, tokenizer = policy
    rollouts = draw(policy, n=8, group_size=8)
    ends = torch.isin(rollouts.tokens, torch.tensor(rollout.eos_ids(model, tokenizer)))
    for tokens_end, mask in zip(ends, rollouts.mask, strict=True):
        first_end = int(tokens_end.float().argmax()) if (tokens_end & mask).any() else len(mask) - 1
        assert mask[:first_end + 1].all() and not mask[first_end + 1:].any()
    lengths = rollouts.mask.sum(1)
    assert lengths.min() < lengths.max(), "the test wants rollouts of different lengths"
    assert rollouts.tokens.shape[1] == lengths.max()


def test_sampling_follows_the_models_distribution(policy):
    """4,000 first tokens against the softmax; compaction of finished rows must not mix them up (see the test above)."""
    model, tokenizer = policy
    prompt = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 1)
    rollouts = rollout.sample(model, tokenizer, [prompt], 4000, max_new_tokens=1, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        p = model(rollouts.prompt_ids).logits[0, -1].softmax(-1)
    drawn = torch.bincount(rollouts.tokens[:, 0], minlength=len(p)) / 4000
    assert (drawn - p).abs().max() < 5 * (p.max() * (1 - p.max()) / 4000).sqrt() + 0.002  # five standard errors


def test_sampling_stays_inside_the_context(policy):
    model, tokenizer = policy
    with pytest.raises(UserError, match="context"):
        rollout.sample(model, tokenizer, ["x"], 2, max_new_tokens=4000)


def gradients(policy, rollouts: rollout.Rollouts, micro_batch: int, kl: float = 0.1) -> dict[str, torch.Tensor]:
    model = policy[0]
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01)
    advantages = torch.linspace(-1, 1, len(rollouts.tokens))
    model.zero_grad()
    args = types.SimpleNamespace(micro_batch=micro_batch, temperature=0.7, kl=kl)
    train.backward(args, model, reference, rollouts, advantages)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_micro_batches_give_the_same_gradient(policy, micro_batch):
    """Guards against per-micro-batch denominators and against groups that a micro-batch boundary cuts."""
    rollouts = draw(policy)
    whole, parts = gradients(policy, rollouts, 0), gradients(policy, rollouts, micro_batch)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5 + 1e-4 * gradient.abs().max().item(), rtol=1e-3)


def test_sharing_the_prompt_gives_the_plain_gradient(policy):
    """The shared prefix against each rollout on its own with its prompt repeated: REINFORCE, no clip, no KL."""
    model, _ = policy
    rollouts = draw(policy)
    shared = gradients(policy, rollouts, 0, kl=0.0)
    model.zero_grad()
    advantages, n_tokens = torch.linspace(-1, 1, len(rollouts.tokens)), rollouts.mask.sum()
    for row in range(len(rollouts.tokens)):
        log_p = torch.log_softmax(plain_logits(model, rollouts, row) / 0.7, -1)
        tokens = rollouts.tokens[row][rollouts.mask[row]]
        (-advantages[row] * log_p.gather(1, tokens[:, None]).sum() / n_tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(shared[name], parameter.grad, atol=1e-5 + 1e-4 * parameter.grad.abs().max().item(), rtol=1e-3)


def test_checkpoints_are_ordinary_ones(policy, tmp_path):
    """A saved policy loads in plain transformers, weights and words unchanged."""
    model, tokenizer = policy
    rollout.save_policy(model, tokenizer, tmp_path)
    loaded, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    text = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 2)
    assert words(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_chat_template_is_used_where_there_is_one(tmp_path):
    problem = TASK.problems("train", 1)[0]
    for name, starts in (("llama", "Find"), ("qwen2", "<|user|>Find")):
        _, tokenizer = rollout.load_policy(save_random_model(tmp_path / name, name), TASK)
        assert rollout.build_prompt(tokenizer, TASK, problem, 2).startswith(starts)


@pytest.mark.parametrize("name", ["tinny", "./nowhere", "/no/such/folder"])
def test_unknown_models_are_named(name):
    with pytest.raises(UserError, match=f"--model {name}"):
        rollout.load_policy(name, TASK)
