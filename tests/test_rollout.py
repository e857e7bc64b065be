"""Sampling and scoring, on the tiny model and on small random models of real architectures loaded from disk."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import policy
import rollout
from rewards import Maze, UserError

TASK = Maze(5)
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 2048, "initializer_range": 0.3}
WINDOW = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES = {  # name -> (configuration class of transformers, its arguments)
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", SHAPE | {"no_rope_layers": [1, 0]}),
    "gemma2": ("Gemma2Config", SHAPE | WINDOW | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", SHAPE | WINDOW | {"query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048, "initializer_range": 0.3}),
    "phi": ("PhiConfig", SHAPE | {"num_key_value_heads": 4}),  # its LM head has a bias
}


def save_random_model(folder, architecture: str, **options) -> str:
    """A small random model with a byte-level tokenizer of its own, as an ordinary checkpoint on disk."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([TASK.prompt(p, 3) for p in TASK.problems("train", 20)], trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<other_eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    if architecture == "qwen2":
        tokenizer.chat_template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
                                   "{% if add_generation_prompt %}<|assistant|>{% endif %}"
                                   "{% if not enable_thinking %}<|nothink|>{% endif %}")
    name, shape = ARCHITECTURES[architecture]
    ends = {"bos_token_id": None, "eos_token_id": [0, 1], "pad_token_id": None}
    config = getattr(transformers, name)(**{"vocab_size": len(tokenizer) + 8} | shape | ends | options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if architecture == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    policy.save_policy(model, tokenizer, folder)
    return str(folder)


def load_random_model(folder, architecture: str):
    """The same, loaded."""
    name = "tiny" if architecture == "tiny" else save_random_model(folder, architecture)
    return policy.load_policy(name, TASK, seed=1)


@pytest.fixture(scope="module", params=["tiny", *ARCHITECTURES])
def policy_pair(request, tmp_path_factory):
    return load_random_model(tmp_path_factory.mktemp(request.param), request.param)


def prompts_of(tokenizer, n: int) -> list[str]:
    """Prompts of different lengths, so that there is left padding."""
    prompts = [rollout.build_prompt(tokenizer, TASK, problem, 2) for problem in TASK.problems("train", n)]
    prompts[1] = " ".join(prompts[1].split()[:-3]) if policy.is_tiny(tokenizer) else prompts[1][20:]
    return prompts


def draw(policy_pair, n: int = 4, group_size: int = 3, temperature: float = 0.7, max_new_tokens: int = 40, **options) -> rollout.Rollouts:
    """Rollouts of prompts of different lengths."""
    model, tokenizer = policy_pair
    return rollout.sample(model, tokenizer, prompts_of(tokenizer, n), group_size, max_new_tokens=max_new_tokens,
                          temperature=temperature, generator=torch.Generator().manual_seed(0), **options)


class NoHostRoundTrip(TorchDispatchMode):
    """Fails at every operation that would wait for a GPU: those whose result Python or the allocator must know, and new
    tensors from Python numbers, which are copied there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default,
                            torch.ops.aten.is_nonzero.default, torch.ops.aten.lift_fresh.default), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("static", [False, True])
def test_greedy_rollouts_are_those_of_generate(policy_pair, static):
    """Token for token, at a temperature near zero: prompts of different lengths, rollouts that end early, two EOS ids.

    Guards against a static cache that shows a query what is not written yet, shifted positions, lost sliding windows
    and compaction that mixes rows up. Token 1 or 0 ends a rollout of the language models.
    """
    model, tokenizer = policy_pair
    rollouts = draw(policy_pair, n=6, group_size=2, temperature=1e-4, static=static)
    ends = policy.eos_ids(model, tokenizer)
    padded = torch.arange(rollouts.prompt_ids.shape[1]) >= rollouts.prompt_ids.shape[1] - torch.tensor(rollouts.prompt_lengths)[:, None]
    expected = model.generate(rollouts.prompt_ids, attention_mask=padded.long(), do_sample=False, max_new_tokens=40,
                              eos_token_id=ends, pad_token_id=ends[0])[:, rollouts.prompt_ids.shape[1]:]
    assert len(set(rollouts.prompt_lengths)) > 1
    for row, length in enumerate(rollouts.lengths):
        tokens = expected[row // 2].tolist()
        stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        assert rollouts.tokens[row, :length].tolist() == tokens[:stop + 1]


def test_a_static_decode_step_never_waits_for_the_device(policy_pair):
    """A CUDA graph could not be captured otherwise. Only operations are looked at, so it holds without a GPU."""
    model, tokenizer = policy_pair
    ids, lengths = rollout.encode_prompts(model.config, tokenizer, prompts_of(tokenizer, 3), 9)
    with torch.no_grad():
        decoder = rollout.Decoder(model, ids, lengths, 2, 9, 1.0, None, policy.eos_ids(model, tokenizer), static=True)
        def places() -> list[tuple]:
            tensors = [x for layer in (decoder, *decoder.cache.layers) for x in vars(layer).values() if isinstance(x, torch.Tensor)]
            return [(x.data_ptr(), x.shape) for x in tensors]

        before = places()
        with NoHostRoundTrip():
            for _ in range(8):
                decoder.step()
        assert places() == before, "a graph writes where it was captured"
        with pytest.raises(AssertionError, match="waits"), NoHostRoundTrip():
            decoder.compact()


def test_a_batch_of_rollouts_can_be_sampled_in_parts(policy_pair):
    """Greedy, so that the parts' random numbers do not matter: nothing but memory changes."""
    whole, parts = (draw(policy_pair, temperature=1e-4, batch=batch) for batch in (0, 5))
    assert whole.lengths == parts.lengths and whole.texts == parts.texts and torch.equal(whole.tokens, parts.tokens)
    assert torch.allclose(whole.logprobs, parts.logprobs, atol=1e-3)


def test_recorded_logprobs_equal_a_fresh_forward_pass(policy_pair):
    """Guards against sampling from one distribution and scoring another, and against padding that shifts positions."""
    model, _ = policy_pair
    for static in (False, True):
        rollouts = draw(policy_pair, static=static)
        assert len(set(rollouts.prompt_lengths)) > 1, "the test wants left padding"
        for row, length in enumerate(rollouts.lengths):
            log_p = torch.log_softmax(plain_logits(model, rollouts, row) / 0.7, -1)
            fresh = log_p.gather(1, rollouts.tokens[row, :length, None])[:, 0]
            torch.testing.assert_close(rollouts.logprobs[row, :length], fresh, atol=2e-5, rtol=1e-4)
            assert not rollouts.logprobs[row, length:].any()


def plain_logits(model, rollouts: rollout.Rollouts, row: int) -> torch.Tensor:
    """One rollout through the model without cache, padding or sharing: logits (T, V) before each sampled token."""
    p = row // rollouts.group_size
    prompt, tokens = rollouts.prompt_ids[p, -rollouts.prompt_lengths[p]:], rollouts.tokens[row, :rollouts.lengths[row]]
    return model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1:-1]


def test_masks_come_from_positions(policy_pair):
    """The first EOS is sampled and trained, nothing after it; guards against masks taken from the pad id."""
    model, tokenizer = policy_pair
    rollouts = draw(policy_pair, n=8, group_size=8)
    ends = torch.isin(rollouts.tokens, torch.tensor(policy.eos_ids(model, tokenizer)))
    for tokens_end, mask in zip(ends, rollouts.mask, strict=True):
        first_end = int(tokens_end.float().argmax()) if (tokens_end & mask).any() else len(mask) - 1
        assert mask[:first_end + 1].all() and not mask[first_end + 1:].any()
    assert rollouts.mask.sum(1).tolist() == rollouts.lengths and min(rollouts.lengths) < max(rollouts.lengths)
    assert rollouts.tokens.shape[1] == max(rollouts.lengths)


def test_sampling_follows_the_models_distribution(policy_pair):
    """4,000 first tokens against the softmax; compaction of finished rows must not mix them up (see the test above)."""
    model, tokenizer = policy_pair
    prompt = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 1)
    rollouts = rollout.sample(model, tokenizer, [prompt], 4000, max_new_tokens=1, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        p = model(rollouts.prompt_ids).logits[0, -1].softmax(-1)
    drawn = torch.bincount(rollouts.tokens[:, 0], minlength=len(p)) / 4000
    assert (drawn - p).abs().max() < 5 * (p.max() * (1 - p.max()) / 4000).sqrt() + 0.002  # five standard errors


def test_sampling_stays_inside_the_context(policy_pair):
    model, tokenizer = policy_pair
    with pytest.raises(UserError, match="context"):
        rollout.sample(model, tokenizer, ["x"], 2, max_new_tokens=4000)


def test_checkpoints_are_ordinary_ones(policy_pair, tmp_path):
    """A saved policy loads in plain transformers, weights and words unchanged."""
    model, tokenizer = policy_pair
    policy.save_policy(model, tokenizer, tmp_path)
    loaded, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    text = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 2)
    assert words(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_chat_template_is_used_where_there_is_one(tmp_path):
    problem = TASK.problems("train", 1)[0]
    for name, starts, ends in (("llama", "Find", "\n"), ("qwen2", "<|user|>Find", "<|assistant|><|nothink|>")):
        _, tokenizer = load_random_model(tmp_path / name, name)
        prompt = rollout.build_prompt(tokenizer, TASK, problem, 2)
        assert prompt.startswith(starts) and prompt.endswith(ends)


@pytest.mark.parametrize("configuration, shape, why", [
    ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "keeps no KV cache"),
    ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "keeps no KV cache, but other states"),
    ("CohereConfig", SHAPE, "more to them than its LM head")])
def test_a_model_that_cannot_be_scored_here_is_refused(configuration, shape, why, tmp_path, monkeypatch):
    """No cache, another cache, or logits that are scaled behind the head: each would give wrong log-probabilities."""
    monkeypatch.setitem(ARCHITECTURES, "other", (configuration, shape))
    with pytest.raises(UserError, match=why):
        policy.load_policy(save_random_model(tmp_path, "other"), TASK)


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    folder = save_random_model(tmp_path, "llama", eos_token_id=None)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token"', '"no_such_token"'))
    with pytest.raises(UserError, match="no EOS token"):
        policy.load_policy(folder, TASK)


def test_a_dtype_that_the_device_lacks_is_named(monkeypatch):
    policy.check_dtype("cpu", "bfloat16")
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: (_ for _ in ()).throw(TypeError("BFloat16 is not supported on MPS")))
    with pytest.raises(UserError, match="--dtype bfloat16: the device mps"):
        policy.check_dtype("mps", "bfloat16")


@pytest.mark.parametrize("name", ["tinny", "./nowhere", "/no/such/folder"])
def test_unknown_models_are_named(name):
    with pytest.raises(UserError, match=f"--model {name}"):
        policy.load_policy(name, TASK)
