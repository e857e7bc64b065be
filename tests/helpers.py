"""What several test files use: small models, tasks, rewards, commands and pages."""

import copy
import functools
import json
import os
import random
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import eval as evaluation
import fast
import rollout
import train
from engine.config import Config
from engine.evaluations import Row, Settings
from engine.models import save_model
from engine.runs import load_run, task_of
from engine.tasks import load_task, reward_vectors
from eval import sample_pool
from fast import graphs
from report.snapshots import Frame, Snapshots
from report.table import Table
from rewards import Fence, Problem, Task
from rollout import Policy, Rollouts, SamplingOptions, StopRule, load_policy
from tasks.maze import Maze
from vpo import Scored

SCRIPTS = {"train": train.main, "eval": evaluation.main}
ROOT = Path(__file__).resolve().parent.parent
QUICK = shlex.split(
    "--task toy --m 2 --warm-steps 3 --steps 4 --prompts-per-step 2 --group-size 3 --eval-problems 3 "
    "--pool 4 --save-every 3 --device cpu"
)
# A warm-up that is long enough for rewards and advantages that are not all zero. Without them a
# resume has nothing to get wrong.
LEARNING = [*QUICK, *shlex.split("--warm-steps 40 --steps 8 --eval-problems 0")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def metrics(folder: Path) -> list[dict]:
    """The metrics of a method, without those of time, which differ from run to run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"], row["tokens_per_second"]
    return rows


def change_config(run: Path, **flags: object) -> None:
    record = json.loads((run / "config.json").read_text())
    record["flags"] |= flags
    (run / "config.json").write_text(json.dumps(record))


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def fails(
    arguments: list[str], capsys, *texts: str, command: Callable[[list[str]], None] = train.main
) -> None:
    """The command ends with code 2, and its last line holds the texts."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    for text in texts:
        assert text in error.splitlines()[-1], error


TASK = Maze(5)
FENCE = Fence()
TEMPERATURE = 0.7  # of `draw`
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
SHAPE |= {"initializer_range": 0.3}
WINDOW = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
WINDOW |= {"sliding_window": 8, "query_pre_attn_scalar": 8}  # prompts are longer
WINDOW |= {"tie_word_embeddings": False}  # random models with tied ones repeat a token for ever
DELTA = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "tie_word_embeddings": False}
MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "head_dim": 8}
MAMBA |= {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
ARCHITECTURES = {  # name -> (configuration class of transformers, its arguments); "tiny" is a GPT-2
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", SHAPE | {"no_rope_layers": [1, 0]}),
    "gemma2": ("Gemma2Config", SHAPE | WINDOW | {"final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", SHAPE | WINDOW),
    "qwen3_5": ("Qwen3_5TextConfig", SHAPE | DELTA),
    "falcon_h1": ("FalconH1Config", SHAPE | MAMBA),
    "phi": ("PhiConfig", SHAPE | {"num_key_value_heads": 4}),  # its LM head has a bias
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if not enable_thinking %}<|nothink|>{% endif %}"
)


def save_random_model(folder: str | Path, architecture: str, **options) -> str:
    """A small random model with a byte-level tokenizer, as an ordinary checkpoint. Token 0 or 1 ends a rollout."""
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


class Words(Task):
    """A form of its own that random letters have: words that a blank ends. No `ends` are given."""

    name = "words"

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        return re.findall(r"(\S+)\s", text)[:m]


class MarkedWords(Words):
    """The same, with the characters that can end a word."""

    ends = " \n\t\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0"


class WordProblems(MarkedWords):
    """Prompts of unequal length. Any word is an answer, so that random models earn rewards."""

    objectives = ("long", "e")
    words = ("one", "two")
    answer_words = 1

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        return [Problem(f"{split}-{i}", i) for i in range(start, start + n)]

    def prompt(self, problem: Problem, m: int) -> str:
        return "one two " * (5 + problem.data % 3)

    def tiny_prompt(self, problem: Problem) -> str:
        return self.prompt(problem, 1)

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return [len(answer) % 4 / 3, float("e" in answer)]

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return rng.choice(self.words)


class Lines(Task):
    """An answer on each line, which no closing tag ends."""

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        lines = text.split("\n")
        return lines[:m] if finished else lines[:-1][:m]


def first_stop(rule: StopRule, tokens: list[int]) -> int | None:
    """After how many tokens a rule ends a rollout."""
    for n in range(1, len(tokens) + 1):
        if rule(torch.tensor([tokens[:n]]), torch.tensor([True])):
            return n
    return None


def assert_same_gradient(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Relative to each weight's own gradient; one that is next to nothing counts against all of them."""
    whole = torch.cat([gradient.flatten() for gradient in expected]).norm()
    assert whole > 0
    for own, other in zip(ours, expected, strict=True):
        assert (own - other).norm() <= tolerance * (other.norm() + 0.1 * whole)


def train_hybrid(*flags: str) -> None:
    """Train a model whose cache holds more than keys and values."""
    model = save_random_model("m", "falcon_h1")
    usual = "--task fence --method vpo --m 2 --steps 1 --prompts-per-step 1 --group-size 2"
    usual += " --max-new-tokens 8 --eval-problems 1 --pool 2 --out run --device cpu --model"
    train.main([*usual.split(), model, *flags])
    assert load_run(Path("run")).config.plain


TOLERANCE = 1e-5


def copy_of(policy: Policy, shift: float = 0.0) -> Policy:
    """A policy of its own, whose weights differ a little."""
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(shift)
    return Policy(model, policy.tokenizer)


def gradient(
    backward,
    policy: Policy,
    rollouts: Rollouts,
    advantages: Tensor | None = None,
    reference: Policy | None = None,
    budget: int = 500,
    bonus: float = 0.0,
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient of every trained weight, and the metrics."""
    if advantages is None:
        advantages = torch.linspace(-1, 1, len(rollouts.tokens))
    config = Config(temperature=0.7, micro_batch_tokens=budget, entropy_coef=bonus)
    config.kl = 0.1 if reference else 0.0
    policy.model.zero_grad()
    metrics = backward(policy, reference, rollouts, advantages, config)
    gradients = []
    for weight in policy.model.parameters():
        if weight.requires_grad:
            gradients.append(weight.grad.clone())
    return gradients, {name: torch.as_tensor(value).item() for name, value in metrics.items()}


def assert_plain_is_fast(policy: Policy, rollouts: Rollouts, **options) -> None:
    plain, expected = gradient(train.backward, policy, rollouts, **options)
    ours, metrics = gradient(fast.backward, policy, rollouts, **options)
    assert_same_gradient(ours, plain, TOLERANCE)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


with_graphs = functools.partial(rollout.sample, decode=graphs.decode)


def ends_soon(tokens: Tensor, is_alive: Tensor) -> Tensor:
    """A stop rule: one token in eight ends a rollout."""
    return tokens[:, -1] % 8 == 0


def assert_same_tokens(policy: Policy, **options) -> None:
    plain = draw(policy, **options)
    ours = draw(policy, sample=with_graphs, **options)
    assert ours.lengths == plain.lengths
    assert ours.ended == plain.ended
    assert ours.texts == plain.texts
    assert torch.equal(ours.tokens, plain.tokens)
    torch.testing.assert_close(ours.logprobs, plain.logprobs, atol=2e-5, rtol=1e-4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rewards(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator(seed))


def all_there(rewards: Tensor) -> Tensor:
    """The mask of rewards (P, G, m, d) of which none is missing."""
    return torch.ones(rewards.shape[:3], dtype=torch.bool)


def scored_of(rewards: Tensor, mask: Tensor | None = None, **fields) -> Scored:
    """Rewards (P, G, m, d) whose task scalar is the mean, and nothing repeated or missing unless given."""
    mask = all_there(rewards) if mask is None else mask
    P, _, _, d = rewards.shape
    scalars, no_repeats = rewards.float().mean(-1), torch.zeros_like(mask)
    objectives = torch.ones(P, d, dtype=torch.bool)
    scored = Scored(rewards, scalars, mask, no_repeats, objectives, torch.zeros(P, 1))
    return replace(scored, **fields)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.n = max(self.n, tensor.numel())
        return result


def task_in(form: str) -> Task:
    task = Task()
    task.form = form
    return task


def write_fence(members: str, path: str = "mine.py") -> None:
    """A task of one's own: the fence, but for these members."""
    imports = "from pathlib import Path\nfrom rewards import Fence\n"
    Path(path).write_text(f"{imports}class Mine(Fence):\n    name = 'mine'\n    {members}", "utf-8")


def left_by(sessions: set[int]) -> list[str]:
    """The processes of these sessions that still run, and zombies of ours. A helper has its own."""
    listing = subprocess.run(
        ["ps", "-eo", "ppid=,sid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    left = []
    for line in listing.splitlines():
        parent, session, state, _ = line.split(None, 3)
        is_our_zombie = state.startswith("Z") and int(parent) == os.getpid()
        runs_on = not state.startswith("Z") and int(session) in sessions
        if is_our_zombie or runs_on:
            left.append(line)
    return left


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def table_of(seed: int = 0) -> Table:
    """GRPO has collapsed onto an answer that is best on average; VPO has kept its variety."""
    means = {  # best@1, best@8, diversity
        "start": (0.3, 0.5, 1.0),
        "start_sets": (0.3, 0.5, 1.2),
        "grpo": (0.8, 0.8, 0.1),
        "vpo": (0.7, 0.9, 1.1),
    }
    noise = 0.01 * random_rewards(seed, 20)
    noise -= noise.mean()
    measures = {}
    for policy, (one, many, diversity) in means.items():
        levels = {"best@1": one, "best@3": 0.6, "best@8": many, "W@8": many, "diversity": diversity}
        levels |= dict.fromkeys(("pass@1", "pass@8"), 0.0)
        measures[Row(policy)] = {name: level * (1 + noise) for name, level in levels.items()}
    return Table([f"runs/fence-seed{seed}"], Settings("test", 20, 8, 0.7), measures)


SAVE = ["--problems", "1", "--pool", "2", "--mix", "0.5", "--save-mixed", "saved"]


def sampled(policy, run: Path) -> list:
    config = load_run(run).config
    task = task_of(config)
    return sample_pool(policy, task, task.problems("test", 3), config, m=1, size=8).answers


METHODS = ("grpo", "vpo", "group_vpo")


class Prose(Task):
    """Long answers, names and prompts; the number of objectives differs from problem to problem; rewards below 0."""

    name, minimum = "prose", -1.0
    WORDS = ("a<b>c", "&amp;", "line\nbreak", "w" * 60, "\u00e9", "word")

    def prompt(self, problem: Problem, m: int) -> str:
        ship = "Donaudampfschifffahrtsgesellschaft" * 5
        return f"Write </script> <b>an essay</b> on {ship} https://example.org"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return [(len(answer) * (i + 3)) % 7 / 7 * 2.5 - 1 for i in range(problem.data)]

    def walk(self, problem: Problem, answer: str) -> list[int]:
        raise RuntimeError("a method of the user's own, which nobody may call")

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return " ".join(rng.choices(self.WORDS, k=12))


def made_record(task: Task, problem: Problem, kinds: int, size: int, rng: Random) -> dict:
    """`size` answers to a problem, of so many kinds; every tenth is missing."""
    several = [task.demonstration(problem, rng) for _ in range(kinds)]
    answers = [rng.choice(several) if rng.random() < 0.9 else None for _ in range(size)]
    vectors = reward_vectors(task, [(problem, answer or "") for answer in answers])
    rewards = []
    for answer, vector in zip(answers, vectors, strict=True):
        if answer is None:
            vector = [task.minimum] * len(vector)
        rewards.append([round(value, 6) for value in vector])
    return {"id": problem.id, "answers": answers, "rewards": rewards}


def made_metrics(steps: int) -> dict[str, list[dict]]:
    rng = random.Random(1)
    metrics = {method: [] for method in METHODS}
    for rows in metrics.values():
        for step in range(1, steps + 1):
            rows.append({"step": step, "diversity": rng.random(), "reward": rng.random()})
    return metrics


def made_snapshots(name: str, size: int = 30, steps: int = 4) -> Snapshots:
    """Snapshots as of a training in which pools become one answer, GRPO's first."""
    if name == "prose":
        task = Prose()
        problems = [Problem(str(d), d) for d in (1, 3, 5, 6)]
    else:
        task = load_task(name)
        problems = task.problems("test", 4)
    rng = Random(0)
    frames = []
    for step in range(steps):
        pools = {}
        for shrink, method in enumerate(METHODS):
            kinds = max(1, 24 - 8 * step // (1 + shrink))
            pools[method] = [made_record(task, problem, kinds, size, rng) for problem in problems]
        frames.append(Frame(1 + 10 * step, pools))
    return Snapshots(Config(m=3), task, problems, frames, made_metrics(10 * steps))


def data_of(path: Path) -> dict:
    """What the page holds as data; and that it is one small file that asks for nothing."""
    text = path.read_text("utf-8")
    assert len(text) < 2_000_000
    text, _, rest = text.partition('<script type="application/json" id="data">')
    data, _, script = rest.partition("</script>")
    assert not re.search(r"https?://|<link|\ssrc=|\shref=|@import|url\(", text + script)
    return json.loads(data)


# A task on which an untrained model finds answers, with two or three objectives and rewards below 0.
LETTERS = """
from rewards import Problem, Task

class Letters(Task):
    name, minimum, answer_words = "letters", -0.5, 4
    defaults = {"eval_problems": 4}
    words = ("a", "b", "c", *(f"p{i}" for i in range(40)))

    def problems(self, split, n, seed=0, start=0):
        return [Problem(f"{split}-{i}", i) for i in range(start, start + n)]

    def prompt(self, problem, m):
        return "Write letters."

    def tiny_prompt(self, problem):
        return f"p{problem.data}"

    def without_thoughts(self, text):
        words = [word for word in text.split() if word in "abc"]
        answers = [f"<answer_{i}> {' '.join(words[i - 1 :: 3])} </answer_{i}>" for i in (1, 2, 3)]
        return " ".join(answers[: len(words)])

    def reward(self, problem, answer):
        return [answer.split().count(x) - 0.5 * (x in "bc") for x in "abc"[:2 + problem.data % 2]]
"""
