"""The bridge to veRL, by veRL's own code on a CPU. Skipped where verl is missing: see verl_cpu.py."""

import asyncio
import contextlib
import io
import json
import os
import random

import numpy as np
import pytest
import torch
from helpers import LETTERS, load_random_model

pytest.importorskip("verl", reason="verl is not installed: see tests/optional/verl_cpu.py")

import transfer_queue as tq
from hydra import compose, initialize_config_module
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from engine.answers import write_answers
from engine.tasks import load_task, take_problems
from examples import verl_vpo
from rewards import UserError, parse_answers
from rollout import random_generator, score
from vpo import ADVANTAGES, Options, answers_per_rollout

G = 4  # rollouts per prompt
P = 3  # prompts
STEP = 5


def config_of(*settings: str):
    """veRL's own configuration with the settings of the command in the head, and more."""
    settings = (
        "algorithm.adv_estimator=grpo",
        "reward.custom_reward_function.path=pkg://examples.verl_vpo",
        "trainer.v1.trainer_mode=vpo",
        f"actor_rollout_ref.rollout.n={G}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        *settings,
    )
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", settings)


def trainer_of(*settings: str):
    """The trainer that veRL makes of a configuration, before it loads anything."""
    config = config_of(*settings)
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config)


@pytest.fixture(scope="module")
def queue():
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(config_of().transfer_queue)
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def letters(tmp_path) -> str:
    """A task whose problems have two or three objectives, and rewards below 0."""
    (tmp_path / "letters.py").write_text(LETTERS)
    return str(tmp_path / "letters.py")


def rows_of(task: str, n: int, m: int) -> list[dict]:
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        verl_vpo.write_rows(task, "train", n, m)
    return [json.loads(line) for line in stdout.getvalue().splitlines()]


def texts_of(rng: random.Random) -> list[str]:
    """Rollouts of three letters or fewer; the last one holds no answer."""
    return [" ".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(G - 1)] + [""]


def row(uid: str, session: int, text: str, record: dict) -> dict:
    """The fields that veRL's agent loop keeps of a rollout of 3 to 5 tokens, with our reward."""
    result = verl_vpo.compute_score(
        record["data_source"], text, record["reward_model"]["ground_truth"], record["extra_info"]
    )
    n_tokens = 3 + session % 3
    rewards = torch.zeros(n_tokens)
    rewards[-1] = result["score"]
    tokens = torch.ones(n_tokens, dtype=torch.int64)
    return {
        "uid": uid,
        "prompts": tokens,
        "responses": tokens,
        "input_ids": torch.cat([tokens, tokens]),
        "position_ids": torch.arange(2 * n_tokens),
        "response_mask": tokens,
        "loss_mask": tokens,
        "rm_scores": rewards,
        "rollout_log_probs": torch.zeros(n_tokens),
        "old_log_probs": torch.zeros(n_tokens),
        "extra_fields": {"reward_extra_info": result},
        "num_turns": 2,
    }


@pytest.mark.parametrize("method", ADVANTAGES)
def test_the_advantages_that_veRLs_trainer_writes_are_ours(queue, letters, method):
    """Three whole groups in any order, one that lost rollouts, one of a single rollout, and padding."""
    m = answers_per_rollout(method, 3)
    records = rows_of(letters, P + 2, m)
    all_problems = take_problems(load_task(letters, "a language model"), "train", P + 2)
    rng = random.Random(1)
    texts = {f"{method}-{p}": texts_of(rng) for p in range(P + 2)}
    texts[f"{method}-{P}"].pop(0)  # three are left
    texts[f"{method}-{P + 1}"] = ["a"]
    record_of = dict(zip(texts, records, strict=True))
    keys, fields = [], []
    for uid, own in texts.items():
        for session, text in enumerate(own):
            keys.append(f"{uid}_{session}_0")
            fields.append(row(uid, session, text, record_of[uid]))
    tags = [{"seq_len": len(field["input_ids"])} for field in fields]
    batch = tq.kv_batch_put(keys, "train", list_of_dict_to_tensordict(fields), tags)
    batch = upsample_batch_to_divisible_size(batch, 20, 0)
    assert sum(tag.get("is_padding", False) for tag in batch.tags) == 4
    batch.reorder(rng.sample(range(20), 20))

    trainer = trainer_of(f"+trainer.v1.vpo.method={method}", "+trainer.v1.vpo.seed=3")
    trainer.global_steps = STEP
    batch = trainer._compute_advantage(batch, {})
    data = tq.kv_batch_get(batch.keys, "train", ["advantages", "returns", "response_mask"])
    actual = {}
    for key, A, mask in zip(
        batch.keys, *(data[x].unbind() for x in ("advantages", "response_mask")), strict=True
    ):
        assert A.shape == mask.shape and (A[0] == A).all()
        assert mask.any() or not A.any()
        actual[key] = A[0].item()
    assert torch.equal(data["advantages"].values(), data["returns"].values())

    prompts = list(dict.fromkeys(key.rsplit("_", 2)[0] for key in batch.keys if key in keys))
    generator = random_generator(3, STEP, "weights")
    task = load_task(letters, "a language model")
    for size in (G, G - 1):
        names = [uid for uid in prompts if len(texts[uid]) == size]
        problems = [all_problems[int(uid[-1])] for uid in names]
        answers, own = [], []
        for uid in names:
            for key in batch.keys:
                if key.startswith(f"{uid}_"):
                    text = texts[uid][int(key.rsplit("_", 2)[1])]
                    answers.append(parse_answers(text, task, m))
                    own.append(actual[key])
        scored = score(task, problems, answers, m)
        expected = ADVANTAGES[method](scored, Options(generator=generator))  # (P, G)
        assert expected.abs().max() > 0.3
        assert torch.allclose(torch.tensor(own).view(-1, size), expected, atol=1e-6, rtol=0)
    assert actual[f"{method}-{P + 1}_0_0"] == 0


def test_the_reward_function_as_veRL_loads_and_calls_it():
    """R of a set, numbered lines, and the whole vectors as a text, which veRL's metrics leave alone."""
    config = config_of()
    tokenizer = load_random_model("llama").tokenizer
    compute_score = get_custom_reward_fn(config)

    manager = get_reward_manager_cls("naive")

    async def called(data: DataProto) -> dict:
        return await manager(config, tokenizer, compute_score).run_single(data)

    record = rows_of("fence", 1, 2)[0]
    red, blue = " ".join(["red"] * 6), " ".join(["blue"] * 6)

    def scored(text: str) -> dict:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        tensors = {"responses": ids, "attention_mask": torch.ones_like(ids)}
        others = {name: np.array([value], dtype=object) for name, value in record.items()}
        data = DataProto.from_dict(tensors, others)
        return asyncio.run(called(data))["reward_extra_info"]

    result = scored(f"1. {red}\n2. {blue}")
    assert result["score"] == pytest.approx(0.5, abs=0.01)  # E max(w_1, w_2) of three weights
    assert result["scalar"] == pytest.approx(1 / 3)
    assert scored(f"Two fences:\n1. {red}\n2. {blue}") == result
    assert scored(f"1. {red}\n2. {red}")["answers"] == 0.5
    assert json.loads(result["scored"])["vectors"] == [[[[1, 0, 0], [0, 1, 0]]]]
    task = load_task("maze", "a language model")
    (problem,) = take_problems(task, "train", 1)
    (record,) = rows_of("maze", 1, 3)
    assert record["prompt"][0]["content"] == task.prompt(problem, 3)
    route = task.demonstration(problem, random.Random(0))
    assert scored(write_answers(task, [route]))["scalar"] > 0


@pytest.mark.parametrize(
    "settings, named",
    [
        ("+trainer.v1.vpo.method=goal_conditioned", "--method goal_conditioned: unknown"),
        ("+trainer.v1.vpo.metod=vpo", "metod"),
        ("+trainer.v1.vpo.method=group_vpo +trainer.v1.vpo.subset=4", "a set of s = 4"),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae"),
        ("algorithm.use_kl_in_reward=True", "algorithm.use_kl_in_reward=True"),
        ("reward.custom_reward_function.path=null", "reward.custom_reward_function.path=None"),
    ],
)
def test_settings_that_it_cannot_honour_are_refused_by_name(settings, named):
    with pytest.raises(UserError) as error:
        trainer_of(*settings.split())
    assert named in str(error.value)


def test_rows_of_several_answers_are_refused_for_a_method_of_one(tmp_path):
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows_of("fence", 4, 3))))
    files = [f"data.{split}_files={tmp_path}/rows.json" for split in ("train", "val")]
    trainer = trainer_of("+trainer.v1.vpo.method=grpo", *files)
    trainer.tokenizer, trainer.processor = load_random_model("llama").tokenizer, None
    with pytest.raises(UserError, match="m = 3 for grpo"):
        trainer._init_dataloader()


def test_our_trainer_samples_as_veRLs_synchronous_one():
    """Guards against the buffer of the asynchronous modes, which veRL takes for a name that it does not know."""
    ours = trainer_of()
    theirs = trainer_of("trainer.v1.trainer_mode=sync")
    assert type(ours.replay_buffer) is type(theirs.replay_buffer)
