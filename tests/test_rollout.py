"""Sampling and scoring, on the tiny model and on small random models of real architectures loaded from disk."""

import functools
import json
import re
import tempfile

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rollout
from engine import decoding, models
from engine.checks import check_device
from engine.tiny import is_tiny
from rewards import Task, UserError, write_answers
from tasks.maze import Maze

TASK = Maze(5)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}
WINDOW = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
ARCHITECTURES = {  # name -> (configuration class of transformers, its arguments)
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", SHAPE | {"no_rope_layers": [1, 0]}),
    "gemma2": (
        "Gemma2Config",
        SHAPE | WINDOW | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3TextConfig", SHAPE | WINDOW | {"query_pre_attn_scalar": 8}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048, "initializer_range": 0.3},
    ),
    "phi": ("PhiConfig", SHAPE | {"num_key_value_heads": 4}),  # its LM head has a bias
}


def save_random_model(folder, architecture: str, **options) -> str:
    """A small random model with a byte-level tokenizer of its own, as an ordinary checkpoint on disk."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TASK.prompt(p, 3) for p in TASK.problems("train", 20)],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<eos>", "<other_eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    if architecture == "qwen2":
        tokenizer.chat_template = (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
            "{% if not enable_thinking %}<|nothink|>{% endif %}"
        )
    name, shape = ARCHITECTURES[architecture]
    ends = {"bos_token_id": None, "eos_token_id": [0, 1], "pad_token_id": None}
    config = getattr(transformers, name)(
        **{"vocab_size": len(tokenizer) + 8} | shape | ends | options
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if architecture == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    models.save_policy(model, tokenizer, folder)
    return str(folder)


@functools.cache
def load_random_model(architecture: str):
    """The same, loaded; once, because no test changes it."""
    if architecture == "tiny":
        return models.load_policy("tiny", TASK, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        return models.load_policy(save_random_model(folder, architecture), TASK, seed=1)


@pytest.fixture(scope="module", params=["tiny", *ARCHITECTURES])
def policy_pair(request):
    return load_random_model(request.param)


# For what does not depend on the architecture: words or bytes, learned positions or rotated ones, one EOS or two.
any_model = pytest.mark.parametrize("policy_pair", ["tiny", "llama"], indirect=True)
tiny_model = pytest.mark.parametrize("policy_pair", ["tiny"], indirect=True)


def prompts_of(tokenizer, n: int) -> list[str]:
    """Prompts of different lengths, so that there is left padding."""
    prompts = [
        rollout.build_prompt(tokenizer, TASK, problem, 2) for problem in TASK.problems("train", n)
    ]
    if is_tiny(tokenizer):
        prompts[1] = " ".join(prompts[1].split()[:-3])
    else:
        prompts[1] = prompts[1][20:]
    return prompts


def draw(policy_pair, n: int = 4, group_size: int = 3, **options) -> rollout.Rollouts:
    """Rollouts of prompts of different lengths."""
    model, tokenizer = policy_pair
    options = {"max_new_tokens": 40, "temperature": 0.7} | options
    options["generator"] = torch.Generator().manual_seed(0)
    options = decoding.SamplingOptions(**options)
    return decoding.sample(model, tokenizer, prompts_of(tokenizer, n), group_size, options)


def test_greedy_rollouts_are_those_of_generate(policy_pair):
    """Token for token, at a temperature near zero: prompts of different lengths, early ends.

    Guards against shifted positions, lost sliding windows and compaction that mixes rows up.
    Token 1 or 0 ends a rollout of the language models.
    """
    model, tokenizer = policy_pair
    rollouts = draw(policy_pair, n=6, group_size=2, temperature=1e-4)
    ends = models.eos_ids(model, tokenizer)
    L = rollouts.prompt_ids.shape[1]
    is_prompt = torch.arange(L) >= L - torch.tensor(rollouts.prompt_lengths)[:, None]
    expected = model.generate(
        rollouts.prompt_ids,
        attention_mask=is_prompt.long(),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )[:, L:]
    assert len(set(rollouts.prompt_lengths)) > 1
    for row, length in enumerate(rollouts.lengths):
        tokens = expected[row // 2].tolist()
        last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        assert rollouts.tokens[row, :length].tolist() == tokens[: last + 1]


@any_model
def test_a_batch_of_rollouts_can_be_sampled_in_parts(policy_pair):
    """Greedy, so that the parts' random numbers do not matter: nothing but memory changes."""
    whole = draw(policy_pair, temperature=1e-4, batch=0)
    parts = draw(policy_pair, temperature=1e-4, batch=5)
    assert whole.lengths == parts.lengths
    assert whole.texts == parts.texts
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.allclose(whole.logprobs, parts.logprobs, atol=1e-3)


def test_recorded_logprobs_equal_a_fresh_forward_pass(policy_pair):
    """Guards against sampling from one distribution and scoring another, and shifted positions."""
    rollouts = draw(policy_pair)
    assert len(set(rollouts.prompt_lengths)) > 1, "the test wants left padding"
    assert_logprobs_are_plain(policy_pair[0], rollouts)


@torch.no_grad()
def assert_logprobs_are_plain(model, rollouts: rollout.Rollouts) -> None:
    """At the temperature of `draw`."""
    for row, length in enumerate(rollouts.lengths):
        log_p = torch.log_softmax(plain_logits(model, rollouts, row) / 0.7, -1)
        fresh = log_p.gather(1, rollouts.tokens[row, :length, None])[:, 0]
        torch.testing.assert_close(rollouts.logprobs[row, :length], fresh, atol=2e-5, rtol=1e-4)
        assert not rollouts.logprobs[row, length:].any()


def plain_logits(model, rollouts: rollout.Rollouts, row: int) -> torch.Tensor:
    """One rollout through the model without cache, padding or sharing: logits (T, V) before each sampled token."""
    p = row // rollouts.group_size
    prompt = rollouts.prompt_ids[p, -rollouts.prompt_lengths[p] :]
    tokens = rollouts.tokens[row, : rollouts.lengths[row]]
    return model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]


@any_model
@pytest.mark.parametrize("batch", [0, 16])
def test_masks_come_from_positions(policy_pair, batch):
    """The first EOS is sampled and trained, nothing after it; guards against masks taken from the pad id. A rollout has
    ended if it holds an EOS, at whatever place, the last one too; the others are cut off at the last."""
    model, tokenizer = policy_pair
    rollouts = draw(policy_pair, n=8, group_size=8, batch=batch)
    end_ids = torch.tensor(models.eos_ids(model, tokenizer))
    is_end = torch.isin(rollouts.tokens, end_ids) & rollouts.token_mask
    for row, length in enumerate(rollouts.lengths):
        columns = is_end[row].nonzero()[:, 0].tolist()
        assert columns in ([], [length - 1]), "an EOS is the last token"
        assert rollouts.ended[row] == bool(columns)
        assert rollouts.ended[row] or length == 40
        assert rollouts.token_mask[row].tolist() == [t < length for t in range(40)]
    assert set(rollouts.ended) == {True, False}, "the test wants both kinds"
    assert min(rollouts.lengths) < max(rollouts.lengths) == rollouts.tokens.shape[1]


@any_model
def test_sampling_follows_the_models_distribution(policy_pair):
    """4,000 first tokens against the softmax; compaction of finished rows must not mix them up (see the test above)."""
    model, tokenizer = policy_pair
    prompt = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 1)
    options = decoding.SamplingOptions(1, generator=torch.Generator().manual_seed(3))
    rollouts = decoding.sample(model, tokenizer, [prompt], 4000, options)
    with torch.no_grad():
        p = model(rollouts.prompt_ids).logits[0, -1].softmax(-1)
    drawn = torch.bincount(rollouts.tokens[:, 0], minlength=len(p)) / 4000
    standard_error = (p.max() * (1 - p.max()) / 4000).sqrt()
    assert (drawn - p).abs().max() < 5 * standard_error + 0.002


@pytest.mark.parametrize("last, ended", [(1, True), (9, False)])
def test_the_last_place_may_hold_an_eos(last, ended, monkeypatch):
    """All rollouts draw an EOS at the last place, or none: the same length, but only the first have ended."""
    tokens = iter([9, 9, 9, 9, last])

    def lm_logits(model, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(hidden), model.config.vocab_size), -50.0)
        logits[:, next(tokens)] = 50.0
        return logits

    monkeypatch.setattr(decoding, "lm_logits", lm_logits)
    rollouts = draw(load_random_model("llama"), max_new_tokens=5)
    assert rollouts.lengths == [5] * 12 and rollouts.ended == [ended] * 12


@any_model
def test_sampling_stays_inside_the_context(policy_pair):
    with pytest.raises(UserError, match="context"):
        draw(policy_pair, max_new_tokens=4000)


@tiny_model
def test_logits_that_are_not_finite_stop_sampling_at_once(policy_pair):
    """At the fourth step: no other token is drawn after it."""
    model, _ = policy_pair
    calls = []

    def spoil(module, inputs, logits: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return logits * float("nan") if len(calls) == 4 else logits

    hook = model.get_output_embeddings().register_forward_hook(spoil)
    try:
        with pytest.raises(UserError, match="logits are not finite"):
            draw(policy_pair)
    finally:
        hook.remove()
    assert len(calls) == 4


@pytest.mark.parametrize("step", [0.3, -0.3])
def test_a_cumulative_sum_that_is_not_even_draws_no_negligible_token(step, monkeypatch):
    """Sums in parallel may rise or fall at a token of no probability: here enough to draw it."""
    logits = torch.zeros(100, 50)
    logits[:, 7] = -100.0
    original = torch.Tensor.cumsum

    def cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
        total = original(x, dim)
        total[:, slice(7, None) if step > 0 else 6] += step
        return total

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    uniform = torch.linspace(0, 1, 100)[:, None]
    total = cumsum(logits.softmax(-1), -1)
    unguarded = torch.searchsorted(total, uniform * total[:, -1:], right=True)
    assert (unguarded == 7).any(), "without the guard it is drawn"
    tokens, logprobs = decoding.draw(logits, uniform)
    assert not (tokens == 7).any()
    assert (logprobs > decoding.NEGLIGIBLE).all()


@any_model
def test_a_rollout_ends_with_the_first_token_that_stops_it(policy_pair):
    """Guards against tokens after the end that would be trained on, and an end that moves."""
    model, tokenizer = policy_pair
    prompts = prompts_of(tokenizer, 4)

    def long_enough(text: str) -> bool:
        return len(text) >= 20

    def sampled(stop) -> rollout.Rollouts:
        options = decoding.SamplingOptions(40, temperature=1e-4, stop=stop)
        return decoding.sample(model, tokenizer, prompts, 2, options)

    whole = sampled(None)
    cut = sampled(long_enough)
    eos = models.eos_ids(model, tokenizer)[0]
    n_shorter = 0
    for row, length in enumerate(whole.lengths):
        tokens = whole.tokens[row].tolist()
        beginnings = [
            tokenizer.decode(tokens[:n], skip_special_tokens=True) for n in range(1, length + 1)
        ]
        is_stop = [long_enough(text) for text in beginnings]
        n = is_stop.index(True) + 1 if any(is_stop) else length
        n_shorter += n < length
        assert cut.lengths[row] == n
        assert cut.tokens[row, :n].tolist() == tokens[:n]
        assert torch.allclose(cut.logprobs[row, :n], whole.logprobs[row, :n], atol=1e-3)
        assert cut.logprobs[row, n:].eq(0).all()
        assert cut.tokens[row, n:].eq(eos).all()
        assert cut.ended[row] == (any(is_stop) or whole.ended[row])
    assert n_shorter


def test_a_language_models_rollout_ends_with_its_last_answer(policy_pair, monkeypatch):
    """Guards against a set that is cut short, a thought taken for an answer, and a changed tiny model."""
    _, tokenizer = policy_pair
    stop = rollout.sampling_options(tokenizer, TASK, 2, 9).stop
    if is_tiny(tokenizer):
        assert stop is None
        return
    one = write_answers(TASK, ["R"])
    two = write_answers(TASK, ["R", "D"])
    texts = (one, two[:-1], two, f"<think>{two}</think>")
    assert [stop(text) for text in texts] == [False, False, True, True]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}<think>")
    stop = rollout.sampling_options(tokenizer, TASK, 2, 9).stop
    assert [stop(text) for text in texts] == [False, False, False, True]


class Lines(Task):
    """A task of its own form: an answer on each line, which no closing tag ends."""

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        lines = text.split("\n")
        return lines[:m] if finished else lines[:-1][:m]


@pytest.mark.parametrize("task", [Lines(), Task()])
def test_a_rollout_of_lines_goes_on_to_their_end(task):
    """Guards against rollouts that are cut after the first token: a line is no answer before its end."""
    _, tokenizer = load_random_model("qwen2")
    stop = rollout.sampling_options(tokenizer, task, 2, 9).stop
    texts = ("1", "1. re", "1. red\n", "1. red\n2. b", "1. red\n2. blue\n")
    assert [stop(text) for text in texts] == [False, False, False, False, True]


@pytest.mark.parametrize("pattern", [r".+", r"\d+", r"\S+"])
def test_answers_that_may_still_grow_are_refused(pattern):
    """Guards against rollouts of one token, all of whose slots hold an answer: `finished` is not heeded."""
    task = Task()
    _, tokenizer = load_random_model("qwen2")
    task.find_answers = lambda text, m, finished: re.findall(pattern, text)
    stop = rollout.sampling_options(tokenizer, task, 1, 9).stop
    with pytest.raises(UserError, match="find_answers gave .* with finished=False, but the next"):
        stop("1")
    task.find_answers = lambda text, m, finished: re.findall(r"\[(.*?)\]", text)
    assert [stop(text) for text in ("[1", "[1]")] == [False, True]


@pytest.mark.parametrize("policy_pair", ["tiny", "qwen2", "phi"], indirect=True)
def test_checkpoints_are_ordinary_ones(policy_pair, tmp_path):
    """A saved policy loads in plain transformers, weights and words unchanged."""
    model, tokenizer = policy_pair
    models.save_policy(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    text = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 2)
    assert words(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_chat_template_is_used_where_there_is_one():
    problem = TASK.problems("train", 1)[0]
    for name, starts, ends in (
        ("llama", "Find", "\n"),
        ("qwen2", "<|user|>Find", "<|assistant|><|nothink|>"),
    ):
        _, tokenizer = load_random_model(name)
        prompt = rollout.build_prompt(tokenizer, TASK, problem, 2)
        assert prompt.startswith(starts) and prompt.endswith(ends)


@pytest.mark.parametrize(
    "configuration, shape, why",
    [
        ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "KV cache|other logits"),
        (
            "MambaConfig",
            {"hidden_size": 32, "num_hidden_layers": 1},
            "KV cache|other logits",
        ),
        ("CohereConfig", SHAPE, "more to them than its LM head"),
    ],
)
def test_a_model_that_cannot_be_scored_here_is_refused(
    configuration, shape, why, tmp_path, monkeypatch
):
    """No cache, another cache, or logits that are scaled behind the head: each would give wrong log-probabilities."""
    monkeypatch.setitem(ARCHITECTURES, "other", (configuration, shape))
    with pytest.raises(UserError, match=why):
        models.load_policy(save_random_model(tmp_path, "other"), TASK)


def test_weights_that_are_damaged_are_named(tmp_path):
    """Weights that are not finite, and a configuration that is none."""
    folder = save_random_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(
        {name: torch.full_like(x, torch.nan) for name, x in weights.items()},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match="its logits are not finite"):
        models.load_policy(folder, TASK)
    (tmp_path / "config.json").write_bytes(b"\x80\x00\xff")
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load_policy(folder, TASK)


def test_a_run_folder_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"flags": {"task": "maze"}}))
    with pytest.raises(
        UserError, match="no Hugging Face checkpoint; of a run folder name a checkpoint in it"
    ):
        models.load_policy(str(tmp_path), TASK)


def test_a_word_that_the_tiny_model_lacks_is_named():
    model, tokenizer = load_random_model("tiny")
    prompt = rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 1)
    with pytest.raises(UserError, match="'minotaur'.*Task.words"):
        options = decoding.SamplingOptions(max_new_tokens=5)
        decoding.sample(model, tokenizer, [prompt, prompt + " minotaur"], 2, options)


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    folder = save_random_model(tmp_path, "llama", eos_token_id=None)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token"', '"no_such_token"'))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text("{}")
    for eos in (
        None,
        2,
    ):  # the latter is what transformers takes for Llama's where config.json has none
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        with pytest.raises(UserError, match="no EOS token"):
            models.load_policy(folder, TASK)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_checkpoint_whose_parts_do_not_belong_together_is_refused(architecture, tmp_path):
    """transformers would fill what is missing with random weights, and look words up beyond the embeddings."""
    folder = save_random_model(tmp_path, architecture)
    path = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    save_file(
        {key: value for key, value in weights.items() if key != name},
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match=f"incomplete, its files lack {name} and 0 more"):
        models.load_policy(folder, TASK)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2000}))
    with pytest.raises(
        UserError, match="incomplete, its files lack .* in another size than config.json"
    ):
        models.load_policy(folder, TASK)
    (tmp_path / "config.json").write_text(json.dumps(config))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded .*save it again"):
        models.load_policy(folder, TASK)
    path.unlink()
    with pytest.raises(UserError, match="cannot be loaded .*model.safetensors"):
        models.load_policy(folder, TASK)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(UserError, match="tokenizer has 4.. tokens, its embeddings have 100 rows"):
        models.load_policy(folder, TASK)


def test_a_dtype_that_the_device_lacks_is_named(monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("BFloat16 is not supported on MPS")

    assert check_device("cpu", "bfloat16") == "cpu"
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(
        UserError, match="--device cpu: this machine has none that computes in bfloat16"
    ):
        check_device("cpu", "bfloat16")


@pytest.mark.parametrize("name", ["tinny", "./nowhere", "/no/such/folder"])
def test_unknown_models_are_named(name):
    with pytest.raises(UserError, match=f"--model {name}"):
        models.load_policy(name, TASK)


@pytest.mark.parametrize(
    "template, why",
    [
        ("{{ raise_exception('needs a system message') }}", "needs a system message"),
        ("{% for %}", "template cannot"),
        ("hello", "leaves out what the user says"),
        ("{{ '' }}", "leaves out what the user says"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(template, why, monkeypatch):
    """Guards against a traceback, and against a model that trains without having seen a problem."""
    _, tokenizer = load_random_model("llama")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=why) as told:
        rollout.build_prompt(tokenizer, TASK, TASK.problems("train", 1)[0], 2)
    assert "its chat template cannot be used" in str(told.value)
