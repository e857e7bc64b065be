"""Prompts, sampling and scoring, on the tiny model and small random models of real architectures from disk."""

import copy
import functools
import json
import re
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE, WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rollout
import train
from engine.answers import write_answers
from engine.models import save_model
from engine.runs import load_run
from engine.training.start import load_start
from rewards import Fence, Problem, Task, UserError, parse_answers
from rollout import Policy, Rollouts, SamplingOptions, StopRule, load_policy
from tasks.code import Code
from tasks.maze import Maze

TASK = Maze(5)
FENCE = Fence()
TEMPERATURE = 0.7  # of `draw`
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
    "sliding_window": 8,  # prompts are longer
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": False,  # random models with tied ones repeat a token for ever
}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "tie_word_embeddings": False}
MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "head_dim": 8}
ZAMBA = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16}
ZAMBA |= {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
ZAMBA |= {"hybrid_layer_ids": [2], "num_mem_blocks": 1, "chunk_size": 16, "adapter_rank": 4}
ARCHITECTURES = {  # name -> (configuration class of transformers, its arguments)
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", SHAPE | {"no_rope_layers": [1, 0]}),
    "gemma2": ("Gemma2Config", SHAPE | WINDOW | {"final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", SHAPE | WINDOW),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048, "initializer_range": 0.3},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", SHAPE | DELTA),
    "falcon_h1": (
        "FalconH1Config",
        SHAPE | MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    ),
    "phi": ("PhiConfig", SHAPE | {"num_key_value_heads": 4}),  # its LM head has a bias
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if not enable_thinking %}<|nothink|>{% endif %}"
)


def save_random_model(folder: str | Path, architecture: str, **options) -> str:
    """A small random model with a byte-level tokenizer of its own, as an ordinary checkpoint on
    disk. Token 0 or 1 ends a rollout."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<other_eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [TASK.prompt(problem, 3) for problem in TASK.problems("train", 20)]
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    if architecture == "qwen2":
        tokenizer.chat_template = CHAT_TEMPLATE
    name, shape = ARCHITECTURES[architecture]
    arguments = {"vocab_size": len(tokenizer) + 8} | shape
    arguments |= {"bos_token_id": None, "eos_token_id": [0, 1], "pad_token_id": None} | options
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    if architecture == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    save_model(model, tokenizer, folder)
    return str(folder)


def change_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")


@functools.cache
def load_random_model(architecture: str) -> Policy:
    """The same, loaded; once, because no test changes it."""
    if architecture == "tiny":
        return load_policy("tiny", TASK, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        return load_policy(save_random_model(folder, architecture), TASK)


@pytest.fixture(scope="module", params=["tiny", *ARCHITECTURES])
def policy(request: pytest.FixtureRequest) -> Policy:
    return load_random_model(request.param)


# For what does not depend on the architecture: words or bytes, learned positions or rotated ones.
any_model = pytest.mark.parametrize("policy", ["tiny", "llama"], indirect=True)
byte_model = pytest.mark.parametrize("policy", ["llama"], indirect=True)


def prompts_of(policy: Policy, n: int) -> list[str]:
    """Prompts of different lengths, so that there is left padding."""
    problems = TASK.problems("train", n)
    prompts = [rollout.build_prompt(policy, TASK, problem, 2) for problem in problems]
    prompts[1] = " ".join(prompts[1].split()[:-3]) if policy.is_tiny else prompts[1][20:]
    return prompts


def draw(policy: Policy, n: int = 4, G: int = 3, sample=rollout.sample, **options) -> Rollouts:
    """Rollouts of prompts of different lengths. Seed 0 draws the same random numbers each time."""
    options = {"max_new_tokens": 40, "temperature": TEMPERATURE} | options
    options["generator"] = torch.Generator().manual_seed(0)
    return sample(policy, prompts_of(policy, n), G, SamplingOptions(**options))


def plain_logits(policy: Policy, rollouts: Rollouts, row: int) -> Tensor:
    """Logits (T, V) of one rollout, without a cache, padding or other rollouts."""
    p = row // rollouts.group_size
    prompt = rollouts.prompt_ids[p, -rollouts.prompt_lengths[p] :]
    tokens = rollouts.tokens[row, : rollouts.lengths[row]]
    ids = torch.cat([prompt, tokens])[None]
    return policy.model(ids).logits[0, len(prompt) - 1 : -1]


# Sampling.


@torch.no_grad()
def test_tokens_and_logprobs_are_those_of_plain_forward_passes(policy):
    """Every token, drawn again from logits without cache and padding, with its own random number.
    Guards against shifted positions, lost sliding windows, prompts that see their padding, sampling
    from one distribution and recording another, and random numbers that go to another rollout."""
    rollouts = draw(policy)
    assert len(set(rollouts.prompt_lengths)) > 1, "the test wants left padding"
    assert min(rollouts.lengths) < max(rollouts.lengths), "the test wants early ends"
    uniform = torch.rand(4, 3, 40, generator=torch.Generator().manual_seed(0)).flatten(0, 1)
    for row, length in enumerate(rollouts.lengths):
        logits = plain_logits(policy, rollouts, row) / TEMPERATURE
        tokens, logprobs = rollout.draw(logits, uniform[row, :length])
        assert rollouts.tokens[row, :length].tolist() == tokens.tolist()
        recorded = rollouts.logprobs[row, :length]
        torch.testing.assert_close(recorded, logprobs, atol=2e-5, rtol=1e-4)
        assert not rollouts.logprobs[row, length:].any()


@any_model
@pytest.mark.parametrize("batch", [1, 5, 9])
def test_tokens_do_not_depend_on_the_batch(policy, batch):
    """Guards against random numbers that belong to the batch, and groups that its border cuts."""
    whole = draw(policy, n=5)
    parts = draw(policy, n=5, batch=batch)
    assert parts.lengths == whole.lengths
    assert parts.texts == whole.texts
    assert parts.ended == whole.ended
    assert torch.equal(parts.tokens, whole.tokens)
    assert torch.allclose(parts.logprobs, whole.logprobs, atol=1e-4)


@any_model
def test_masks_come_from_positions(policy):
    """The first EOS, of several ids, is sampled and trained, and nothing after it, also at the last
    place. Guards against masks taken from the pad id. The rollouts without an EOS are cut off."""
    T = 12
    rollouts = draw(policy, n=12, G=12, max_new_tokens=T)
    is_end = torch.isin(rollouts.tokens, torch.tensor(policy.eos_ids)) & rollouts.token_mask
    for row, length in enumerate(rollouts.lengths):
        columns = is_end[row].nonzero()[:, 0].tolist()
        assert columns in ([], [length - 1]), "an EOS is the last token"
        assert rollouts.ended[row] == bool(columns)
        assert rollouts.ended[row] or length == T
        assert rollouts.token_mask[row].tolist() == [t < length for t in range(T)]
    assert set(rollouts.ended) == {True, False}, "the test wants both kinds"
    assert set(rollouts.tokens[is_end].tolist()) == set(policy.eos_ids)
    assert is_end[:, -1].any(), "the test wants an EOS at the last place"


def test_draws_follow_the_distribution():
    """20,000 even random numbers: each token gets its probability; guards against an index off by one."""
    log_p = torch.tensor([0.5, 0.0, 0.2, 0.25, 0.05]).log()
    uniform = (torch.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = rollout.draw(log_p.expand(20_000, -1), uniform)
    drawn = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(drawn, log_p.exp(), atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs, log_p[tokens])


@pytest.mark.parametrize("step", [0.3, -0.3])
def test_an_uneven_cumulative_sum_draws_no_negligible_token(step, monkeypatch):
    """Sums in parallel may rise or fall at a token of no probability: here enough to draw it."""
    logits = torch.zeros(100, 50)
    logits[:, 7] = -100.0
    original = Tensor.cumsum

    def cumsum(x: Tensor, dim: int) -> Tensor:
        total = original(x, dim)
        total[:, slice(7, None) if step > 0 else 6] += step
        return total

    monkeypatch.setattr(Tensor, "cumsum", cumsum)
    uniform = torch.linspace(0, 1, 100)
    total = cumsum(logits.softmax(-1), -1)
    unguarded = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)
    assert (unguarded == 7).any(), "without the guard it is drawn"
    tokens, logprobs = rollout.draw(logits, uniform)
    assert not (tokens == 7).any()
    assert (logprobs > rollout.NEGLIGIBLE).all()


def test_random_numbers_have_a_step_and_a_purpose():
    """Guards against weights that are drawn with the random numbers of the rollouts."""
    cases = [(1, 11, "rollouts"), (11, 1, "rollouts"), (1, 11, "weights"), (1, 12, "rollouts")]
    numbers = {torch.rand(1, generator=rollout.random_generator(*case)).item() for case in cases}
    assert len(numbers) == 4


# The stop rule.


class Words(Task):
    """A form of its own that random letters have: words that a blank ends. No `ends` are given."""

    name = "words"

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        return re.findall(r"(\S+)\s", text)[:m]


class MarkedWords(Words):
    """The same, with the characters that can end a word."""

    ends = " \n\t\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0"


class Lines(Task):
    """An answer on each line, which no closing tag ends."""

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        lines = text.split("\n")
        return lines[:m] if finished else lines[:-1][:m]


class Sentences(Task):
    """A sign of three bytes, each a token of its own in a byte-level vocabulary."""

    ends = "。"

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        return re.findall("(.*?)。", text)[:m]


class AtEveryToken(StopRule):
    """The plain rule: the whole text is looked at after every token."""

    def may_end(self, token: int) -> bool:
        return True


@byte_model
@pytest.mark.parametrize("task", [Words(), MarkedWords()])
@pytest.mark.parametrize("m", [1, 3])
def test_a_rollout_ends_with_the_token_of_its_last_answer(policy, task, m):
    """Guards against tokens after the end that would be trained on, and an end that comes too late."""
    whole = draw(policy, n=6)
    cut = draw(policy, n=6, stop=StopRule(policy, task, m))
    n_stopped = 0
    for row, length in enumerate(whole.lengths):
        tokens = whole.tokens[row, :length].tolist()
        end = first_stop(AtEveryToken(policy, task, m), tokens) or length
        n_stopped += end < length
        assert cut.lengths[row] == end
        assert cut.tokens[row, :end].tolist() == tokens[:end]
        assert cut.tokens[row, end:].eq(policy.eos_ids[0]).all()
        assert torch.allclose(cut.logprobs[row, :end], whole.logprobs[row, :end], atol=1e-4)
        assert not cut.logprobs[row, end:].any()
        assert cut.ended[row] or end == 40
        assert cut.texts[row] == policy.tokenizer.decode(tokens[:end], skip_special_tokens=True)
    assert n_stopped > 3


def first_stop(rule: StopRule, tokens: list[int]) -> int | None:
    """After how many tokens a rule ends a rollout."""
    for n in range(1, len(tokens) + 1):
        if rule(torch.tensor([tokens[:n]]), torch.tensor([True])):
            return n
    return None


TAGS = "Hm. <answer_1> a > b </answer_1>\n<answer_2>c</answer_2> and so on"
NUMBERED = "1. red\n2. blue\n3. green\n and so on"
THOUGHTS = "<think><answer_1>a</answer_1> <answer_2>b</answer_2></think> so" + TAGS
SIGNS = "一。二。三。"
BLOCK = "```python\nx = [1]\nprint(f'{x}')\n```\n"
BLOCKS = f"First:\n{BLOCK}Then:\n{BLOCK} and so on"
PROGRAMS = Code.__new__(Code)  # without problems


@byte_model
@pytest.mark.parametrize("text", [TAGS, NUMBERED, THOUGHTS, SIGNS, BLOCKS])
@pytest.mark.parametrize("task", [Task(), Lines(), Words(), MarkedWords(), Sentences(), PROGRAMS])
def test_the_rule_misses_no_end(policy, text, task):
    """Equal to a look at every token, for all forms; guards against signs that are cut into tokens."""
    tokens = policy.tokenizer(text)["input_ids"]
    for m in (1, 2):
        expected = first_stop(AtEveryToken(policy, task, m), tokens)
        assert first_stop(StopRule(policy, task, m), tokens) == expected


def test_an_end_may_be_the_blank_of_a_next_word():
    """Guards against decoders that take the first blank of a text away, as Llama's does."""
    backend = Tokenizer(WordLevel({"<eos>": 0, "▁red": 2, "▁blue": 3}, unk_token="<eos>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert tokenizer.decode([2, 3]) == "red blue"
    policy = Policy(load_random_model("llama").model, tokenizer)
    assert first_stop(StopRule(policy, MarkedWords(), 1), [2, 3, 2]) == 2


@byte_model
def test_where_a_rollout_stops(policy):
    """Guards against a set that is cut short, a thought taken for an answer, and a line without its end."""
    drafts = THOUGHTS.removeprefix("<think>")
    cases = [  # text, task, opening of the prompt, the text after the place where it stops
        (TAGS, Task(), "", " and so on"),
        (NUMBERED, Task(), "", "3. green\n and so on"),
        (NUMBERED, Lines(), "", "3. green\n and so on"),
        (SIGNS, Sentences(), "", "三。"),
        (BLOCKS, PROGRAMS, "", "\n and so on"),
        (THOUGHTS, Task(), "", " and so on"),
        (drafts, Task(), "", "</think> so" + TAGS),
        (drafts, Task(), "<think>", " and so on"),
        (THOUGHTS.replace("</think>", ""), Task(), "", None),
        (" red\n2. blue\n3. green\n", FENCE, "<think>", None),
    ]
    for text, task, opening, rest in cases:
        tokens = policy.tokenizer(text)["input_ids"]
        rule = StopRule(policy, task, 2)
        rule.opening = opening
        n = first_stop(rule, tokens)
        assert rest == (None if n is None else policy.tokenizer.decode(tokens[n:]))


THINKING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@byte_model
@pytest.mark.parametrize(
    ("end", "opening"),
    [
        ("", ""),
        ("<think>\n\n</think>\n\n", ""),  # Qwen3 with thinking switched off
        ("<think>\n", "<think>"),  # DeepSeek-R1, Qwen3 that always thinks
        ("[THINK]", "[THINK]"),
        ("<|channel>thought\n<channel|>", ""),
    ],
)
def test_a_prompt_that_opens_a_thought(policy, end, opening, monkeypatch):
    """Guards against drafts taken for answers, and a rollout that waits for the end of no thought."""
    monkeypatch.setattr(policy.tokenizer, "chat_template", f"{THINKING}{{{{ {end!r} }}}}")
    prompt = rollout.build_prompt(policy, FENCE, FENCE.problems("train", 1)[0], 2)
    assert prompt.endswith(f"<|assistant|>{end}{'' if opening else '1.'}")
    rule = StopRule(policy, FENCE, 2)
    options = SamplingOptions(2, torch.Generator(), stop=rule)
    (text,) = rollout.sample(policy, [prompt], 1, options).texts
    assert text.startswith(opening)
    answers = policy.tokenizer(" red\n2. blue\n")["input_ids"]
    assert first_stop(rule, answers) == (None if opening else len(answers))
    if opening:  # a warm-up closes it
        written = write_answers(FENCE, ["red", "blue"], "</think>")
        assert parse_answers("<think>" + written, FENCE, 2) == ["red", "blue"]
    draft = "Okay. First ideas:\n1. red red\n2. grey grey\n3. blue\nBut maybe"
    for task in (Task(), FENCE):
        answers = parse_answers(opening + draft, task, 3, finished=False)
        assert len(answers) == (0 if opening else 3)


def policy_with(folder: Path, template: str | None, marks: list[str], **options) -> Policy:
    """A random Llama whose tokenizer has a chat template and some special tokens."""
    policy = load_policy(save_random_model(folder, "llama", vocab_size=440, **options), TASK)
    policy.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    policy.tokenizer.chat_template = template
    return Policy(policy.model, policy.tokenizer)


MARKS = ["<think>", "</think>", "<answer_1>", "</answer_1>"]
FRAME = ["<|START_RESPONSE|>", "<|END_RESPONSE|>"]


@pytest.mark.parametrize(
    ("template", "text", "read"),
    [
        (None, "<think>1. no\n</think>1. red\n", "<think>1. no\n</think>1. red\n"),
        (None, "<answer_1> red </answer_1><eos>", "<answer_1> red </answer_1>"),
        # As Command A closes a reply before its EOS.
        (
            "<think>".join(FRAME),
            "<think>no</think>1. red<|END_RESPONSE|>",
            "<think>no</think>1. red",
        ),
        ("<think>".join(FRAME), "<answer_1>", "<answer_1>"),
    ],
)
def test_special_tokens_that_are_marks_stay_in_the_text(template, text, read, tmp_path):
    """Guards against drafts that are graded: without their marks thoughts look like answers. But what a
    chat template writes around texts is no text."""
    policy = policy_with(tmp_path, template and f"{template}{{{{ x }}}}", MARKS + FRAME)
    assert policy.decode(torch.tensor(policy.tokenizer(text)["input_ids"])) == read


ONE_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HEADERS = "<|{{ m.role }}|>\n{{ m.content }}"
LAST = "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
TOOLS = "{% if tools %}Call as <tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TOOLS + "{% for m in messages %}" + ONE_TURN + "{% endfor %}", "<|im_end|>"),
        ("Or <tool_call>. {% for m in messages %}" + ONE_TURN + "{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}" + HEADERS + "{% endfor %}", "<|user|>"),  # as of GLM-4
        ("{% for m in messages %}" + HEADERS + LAST + "{% endfor %}", "<|return|>"),  # gpt-oss
        ("{% for m in messages %}" + HEADERS + "<eos>{% endfor %}", "<eos>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "<eos>"),
    ],
)
def test_a_turn_ends_as_the_chat_template_ends_it(template, end, tmp_path):
    """Guards against a next turn that the model makes up and that is read, and against a call that loses its marks."""
    marks = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>"]
    policy = policy_with(tmp_path, template, [*marks, "<tool_call>", "</tool_call>"])
    assert policy.tokenizer.convert_ids_to_tokens(policy.eos_ids[0]) == end
    assert set(policy.tokenizer.convert_ids_to_tokens(policy.eos_ids[1:])) <= {
        "<eos>",
        "<other_eos>",
    }
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert policy.decode(torch.tensor(policy.tokenizer(text + end)["input_ids"])) == text
    taught = rollout.rollouts_of_texts(policy, ["Paint!"], ["red"])
    assert taught.tokens[0, -1] == policy.eos_ids[0]


@byte_model
def test_a_tokenizer_that_appends_an_end(policy, monkeypatch):
    """Guards against rollouts that begin after the end of their prompt."""
    prompt = "Paint!"
    ids = policy.tokenizer(prompt)["input_ids"]
    original = type(policy.tokenizer).__call__

    def call(tokenizer, text, **options):
        encoded = original(tokenizer, text, **options)
        if options.get("add_special_tokens", True):
            encoded["input_ids"].append(0)
        return encoded

    monkeypatch.setattr(type(policy.tokenizer), "__call__", call)
    assert rollout.encode(policy, prompt, special=True) == ids
    assert rollout.encode(policy, "", special=True) == [0]


@byte_model
def test_text_is_decoded_only_where_an_answer_can_have_ended(policy, monkeypatch):
    """Guards against a whole text that is decoded at each of 768 tokens, as only a form without `ends` needs."""
    word = policy.tokenizer("00000 ")["input_ids"]  # a token for each letter
    tokens = word * 128 + policy.tokenizer(TAGS)["input_ids"]
    lengths = []
    original = policy.tokenizer.decode

    def decode(tokens, **options):
        lengths.append(len(tokens))
        return original(tokens, **options)

    monkeypatch.setattr(policy.tokenizer, "decode", decode)
    assert first_stop(StopRule(policy, Task(), 800), tokens) is None
    assert sum(n > 2 for n in lengths) <= 8


# Scoring.


def assert_same_gradient(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Relative to each weight's own gradient; one that is next to nothing counts against all of them."""
    whole = torch.cat([gradient.flatten() for gradient in expected]).norm()
    assert whole > 0
    for own, other in zip(ours, expected, strict=True):
        assert (own - other).norm() <= tolerance * (other.norm() + 0.1 * whole)


def test_texts_as_rollouts():
    """What is imitated: every token of the text, and an EOS that closes it. What was cut off is no whole answer."""
    policy = load_random_model("llama")
    texts = ["one", "1\n2", "", "1\n2"]
    rollouts = rollout.rollouts_of_texts(policy, prompts_of(policy, 2), texts)
    assert rollouts.group_size == 2
    for row, text in enumerate(texts):
        tokens = [*policy.tokenizer(text)["input_ids"], policy.tokenizer.eos_token_id]
        assert rollouts.tokens[row, rollouts.token_mask[row]].tolist() == tokens
    rollouts.ended = [True, True, True, False]
    assert rollout.read_answers(Lines(), rollouts, 2)[1::2] == [["1", "2"], ["1"]]


def test_an_answer_is_scored_once():
    """Equal canonical forms are repeats, unequal texts are scored each; the rest has the task's minimum."""
    seen = []

    class Length(Task):
        objectives = ("length", "one")
        minimum = -2.0

        def rewards(self, pairs):
            seen.extend(answer for _, answer in pairs)
            return [[float(len(answer)), 1.0] for _, answer in pairs]

        def canonical(self, problem, answer):
            return answer.lower()

    answers = [["ab", "AB", "ab"], ["ab"], [], ["c", "ab"]]
    problems = [Problem("a", None), Problem("b", None)]
    scored = rollout.score(Length(), problems, answers, 3)
    assert sorted(seen) == ["", "", "AB", "ab", "ab", "c"], "once per problem"
    repeats = [[[False, True, True], [False] * 3], [[False] * 3] * 2]
    assert scored.repeat_mask.tolist() == repeats
    there = [[[True] * 3, [True, False, False]], [[False] * 3, [True, True, False]]]
    assert scored.answer_mask.tolist() == there
    assert scored.vectors[0, 1].tolist() == [[2, 1], [-2, -2], [-2, -2]]
    assert scored.scalars[1].tolist() == [[-2, -2, -2], [1, 1.5, -2]]
    assert scored.minimum == -2 and scored.missing_scalar.tolist() == [[-2], [-2]]
    torch.set_default_dtype(torch.bfloat16)  # as trainers do that load a model
    assert rollout.score(Length(), problems, answers, 3).vectors.dtype == torch.float32


# Prompts and models.


HARMONY = "<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant"


def test_a_chat_template_is_used_where_there_is_one(monkeypatch):
    """A list is begun in the prompt: small models go on with it, and write an essay otherwise. But not in an open
    header, as "<|start|>assistant1.": gpt-oss goes on with a channel there."""
    plain, chat = load_random_model("llama"), load_random_model("qwen2")
    problem = TASK.problems("train", 1)[0]
    prompt = rollout.build_prompt(plain, TASK, problem, 2)
    assert prompt.startswith("Find") and prompt.endswith("\n")
    prompt = rollout.build_prompt(chat, TASK, problem, 2)
    assert prompt.startswith("<|user|>Find") and prompt.endswith("<|assistant|><|nothink|>")
    for policy in (plain, chat):
        assert rollout.build_prompt(policy, FENCE, Problem("fence", None), 2).endswith("1.")
    monkeypatch.setattr(chat.tokenizer, "chat_template", HARMONY)
    prompt = rollout.build_prompt(chat, FENCE, Problem("fence", None), 2)
    assert prompt.endswith("<|start|>assistant")


@pytest.mark.parametrize(
    "template, why",
    [
        ("{{ raise_exception('needs a system message') }}", "needs a system message"),
        ("hello", "leaves out what the user says"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(template, why, monkeypatch):
    """Guards against a model that trains without having seen a problem."""
    policy = load_random_model("llama")
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=f"its chat template cannot be used.*{why}"):
        rollout.build_prompt(policy, TASK, TASK.problems("train", 1)[0], 2)


@pytest.mark.parametrize("policy", ["tiny", "qwen2", "phi"], indirect=True)
def test_checkpoints_are_ordinary_ones(policy, tmp_path):
    """A saved policy loads in plain transformers, weights and words unchanged."""
    save_model(policy.model, policy.tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    weights = loaded.state_dict()
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    text = prompts_of(policy, 2)[0]
    assert words(text)["input_ids"] == policy.tokenizer(text)["input_ids"]


LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}


@pytest.mark.parametrize(
    ("configuration", "fields"),
    [
        ("LlamaConfig", {"rope_theta": 1e6, "rope_scaling": None}),
        ("Qwen2Config", {"rope_theta": 1e6, "rope_scaling": LINEAR}),
        ("Gemma3TextConfig", {"rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
        ("Phi3Config", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
        ("StableLmConfig", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        ("GPTNeoXConfig", {"rotary_emb_base": 1e6, "rotary_pct": 0.5}),
    ],
)
def test_a_checkpoint_can_be_read_by_transformers_4(configuration, fields, monkeypatch):
    """It takes 10000 where it finds no rope_theta, and refuses a TokenizersBackend and a list of extra tokens. With
    4.57.6 the log-probabilities of 29 small models were equal to the last bit. Engines look for the chat template in
    tokenizer_config.json, and `generate` ends with the mark that it writes, as the training did."""
    shape = SHAPE | copy.deepcopy(fields)
    monkeypatch.setitem(ARCHITECTURES, "other", (configuration, shape))
    policy = load_policy(save_random_model("m", "other"), TASK)
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    chat = "{% for m in messages %}{{ m.content }}<call>{% endfor %}"
    policy.tokenizer.chat_template = chat
    save_model(policy.model, policy.tokenizer, "saved")
    config = json.loads(Path("saved/config.json").read_text("utf-8"))
    assert {name: config[name] for name in fields} == fields
    words = json.loads(Path("saved/tokenizer_config.json").read_text("utf-8"))
    assert words["tokenizer_class"] in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")
    assert words["additional_special_tokens"] == ["<call>"] and "extra_special_tokens" not in words
    assert words["chat_template"] == chat
    settings = json.loads(Path("saved/generation_config.json").read_text("utf-8"))
    again = load_policy("saved", TASK)
    assert settings["eos_token_id"] == again.eos_ids == [len(again.tokenizer) - 1, 0, 1]
    assert again.tokenizer.chat_template == chat
    assert again.model.config.rope_parameters == policy.model.config.rope_parameters
    assert again.tokenizer.extra_special_tokens == ["<call>"]


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "kernels-x/y"])
def test_attention_that_does_not_run_here_becomes_sdpa(attention, capsys):
    folder = save_random_model("m", "llama")
    change_json(Path(folder, "config.json"), attn_implementation=attention)
    assert load_start(folder, TASK).model.config._attn_implementation == "sdpa"
    assert f"m: attention by sdpa, not by {attention}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "configuration, shape, why",
    [
        ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "KV cache|other logits"),
        ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "KV cache|other logits"),
        ("Zamba2Config", SHAPE | ZAMBA, "change with a KV cache or padding"),
        (
            "RwkvConfig",
            {"hidden_size": 32, "num_hidden_layers": 2},
            "change with a KV cache or padding",
        ),
        ("CohereConfig", SHAPE, "are no LM head's"),
    ],
)
def test_a_model_that_cannot_be_scored_here_is_refused(configuration, shape, why, monkeypatch):
    """No cache, another cache, or logits that are scaled behind the head: wrong log-probabilities."""
    monkeypatch.setitem(ARCHITECTURES, "other", (configuration, shape))
    with pytest.raises(UserError, match=why):
        load_start(save_random_model("m", "other"), TASK)


@pytest.mark.parametrize("lora", [[], ["--lora-rank", "2"]])
def test_a_model_with_more_than_keys_and_values_trains_the_plain_way(lora):
    """Guards against a traceback in the first step, where states of Mamba are taken for a prompt's keys."""
    if lora:
        pytest.importorskip("peft")
    model = save_random_model("m", "falcon_h1")
    flags = (
        "--task fence --method vpo --m 2 --steps 1 --prompts-per-step 1 --group-size 2 --device cpu"
    )
    flags += f" --max-new-tokens 8 --eval-problems 1 --pool 2 --out run --model {model}"
    train.main([*flags.split(), *lora])
    assert load_run(Path("run")).config.plain


def test_a_token_without_a_row_is_refused_where_a_text_holds_it(tmp_path):
    """Gemma 3's tokenizer has one for images. Guards against an index beyond the embeddings, or a model that is refused."""
    folder = save_random_model(tmp_path, "gemma3", vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = {"additional_special_tokens": ["<image_soft_token>"], "pad_token": "[PAD]"}
    tokenizer.add_special_tokens(marks)
    tokenizer.save_pretrained(folder)
    policy = load_start(folder, TASK)
    assert len(policy.tokenizer) == 402
    draw(policy)  # padded with another token than [PAD], which has no row either
    with pytest.raises(UserError, match="the token '<image_soft_token>', which is none"):
        rollout.encode_prompts(policy, ["An <image_soft_token>?"], 1)


def test_a_long_rope_is_refused_beyond_its_first_length(tmp_path, monkeypatch):
    """There it turns all positions anew, but not the cached ones: 17 nats between sampling and update."""
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    shape = SHAPE | {"original_max_position_embeddings": 128, "rope_scaling": rope}
    monkeypatch.setitem(ARCHITECTURES, "phi3", ("Phi3Config", shape))
    policy = load_start(save_random_model(tmp_path, "phi3"), TASK)
    ids, _ = rollout.encode_prompts(policy, ["Paint!"], 16)
    rollout.encode_prompts(policy, ["Paint!"], 128 - ids.shape[1])
    with pytest.raises(UserError, match="a context of 129, the model's is 128"):
        rollout.encode_prompts(policy, ["Paint!"], 129 - ids.shape[1])


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_settings_that_do_not_fit_are_left_behind(file):
    """A base model's top-p would change what a trained policy answers elsewhere. With a padding that is no token a model
    would be refused, or not saved."""
    folder = save_random_model("m", "llama")
    change_json(Path(folder, "generation_config.json"), top_p=0.8, temperature=0.7)
    change_json(Path(folder, file), pad_token_id=-1)
    policy = load_start(folder, TASK)
    save_model(policy.model, policy.tokenizer, "saved")
    saved = json.loads(Path("saved/generation_config.json").read_text("utf-8"))
    del saved["transformers_version"]
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert saved == plain | {"eos_token_id": [0, 1]}


OWN_CLASSES = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}


@pytest.mark.parametrize(
    ("options", "file", "fields", "words"),
    [
        ({}, "config", {"model_type": "own", "auto_map": OWN_CLASSES}, "needs code of its own"),
        ({}, "config", {"vocab_size": 2000}, "incomplete, its files lack .* in another size"),
        (
            {},
            "config",
            {"vocab_size": 9, "architectures": ["LlamaForX"]},
            "are of a LlamaForX; choose",
        ),
        ({}, "config", {"model_type": "t5", "architectures": None}, "is a t5; choose a decoder"),
        ({}, "config", {"model_type": "whisper", "architectures": None}, "is a whisper; choose"),
        ({}, "config", {"model_type": "vit", "architectures": ["ViT"]}, "is a ViT; choose"),
        (
            {},
            "config",
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "MaskedLM; ch",
        ),
        ({"eos_token_id": None}, "tokenizer_config", {"eos_token": None}, "eos_token None has no"),
        (
            {"eos_token_id": None, "vocab_size": 400},
            "tokenizer_config",
            {"eos_token": "<|im_end|>"},
            "its eos_token '<.im_end.>' has no row in its embeddings",
        ),
    ],
)
def test_a_model_whose_files_do_not_fit_is_named(options, file, fields, words, monkeypatch):
    """transformers would ask whether it may run code, or look words up beyond the embeddings."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    folder = save_random_model("m", "llama", **options)
    if "eos_token_id" in options:
        change_json(Path(folder, "generation_config.json"), eos_token_id=None)
    change_json(Path(folder, f"{file}.json"), **fields)
    with pytest.raises(UserError, match=words) as refused:
        load_start(folder, TASK)
    assert "trust_remote_code" not in str(refused.value)


def test_weights_that_are_missing_or_no_numbers_are_named():
    """transformers would fill what is missing with random weights."""
    folder = save_random_model("m", "llama")
    file = Path(folder, "model.safetensors")
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    for changed, words in (
        (weights, "incomplete, .* lack model.norm.weight"),
        (weights | {"model.norm.weight": norm * torch.nan}, "the logits are not finite"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(UserError, match=words):
            load_start(folder, TASK)
    file.rename("m/model.q4.GGUF")
    for name in (folder, "m/model.q4.GGUF", "someone/m-GGUF"):
        with pytest.raises(
            UserError, match="GGUF files .*; take the model that they were made from"
        ):
            load_start(name, TASK)


def test_a_tokenizer_that_makes_no_tokens_is_named():
    """transformers loads any tokenizer of a Qwen2 as one of bytes. One of words then knows none."""
    folder = save_random_model("m", "qwen2")
    backend = Tokenizer(WordLevel({"<eos>": 0, "red": 1}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    with pytest.raises(UserError, match="a Qwen2Tokenizer here, makes no tokens"):
        load_start(folder, TASK)


def test_a_model_that_is_too_large_to_try_is_not_blamed(tmp_path, monkeypatch):
    """Guards against the advice to choose another kind of model where memory is short."""
    short = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(rollout, "lm_logits", MagicMock(side_effect=short))
    with pytest.raises(torch.OutOfMemoryError):
        load_start(save_random_model(tmp_path, "llama"), TASK)
