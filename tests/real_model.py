"""What a real language model costs and whether its numbers are right, measured side by side; asserts nothing.

    python tests/real_model.py MODEL            a checkpoint's folder, or a Hub id
    python tests/real_model.py MODEL exact      one section of these, or several; not given: all but programs

exact     log-probabilities while sampling against a fresh forward pass; the shared update's gradient against the plain
          one; in float32, and what bfloat16 gives
sampling  tokens per second against generate
update    seconds of an update of VPO's rollouts (sets of three) at several --micro-batch-tokens
plan      what --plan says against the peak memory of a real step
trl       seconds of a whole GRPO step against TRL's GRPOTrainer, where trl is installed
tasks     a step of VPO with each task for language models, HumanEval's format among them, on small files of our own
programs  what the policies of docs/results.md wrote for three held-out problems, from results/; needs no MODEL

The problems are tasks/open_cases.jsonl, two prompts with eight rollouts each.
"""

import contextlib
import copy
import functools
import gzip
import html
import importlib.util
import io
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmark import compare_sampling, plain_backward, planned_and_measured, trl_steps
from transformers.utils import logging as transformers_logging

import rollout
import train
import vpo
from engine import models, update
from engine.runs import held_out
from report.plots import title
from rewards import UserError, load_task

DATA, P, G, TOKENS = "tasks/open_cases.jsonl", 2, 8, 96


@functools.cache
def loaded(name: str, dtype: str = "float32"):
    """The task, its first problems and their prompts, the model and its tokenizer."""
    task = load_task("code", data=DATA)
    model, tokenizer = models.load_policy(name, task, dtype=dtype)
    problems = task.problems("train", P)
    return (
        task,
        problems,
        [rollout.build_prompt(tokenizer, task, problem, 1) for problem in problems],
        model,
        tokenizer,
    )


def gradient(backward, model, *rest) -> torch.Tensor:
    """What a backward pass leaves at all weights, in one vector; it is cleared."""
    backward(model, None, *rest)
    flat = torch.cat(
        [weight.grad.flatten().double() for weight in model.parameters() if weight.grad is not None]
    )
    model.zero_grad()
    return flat


def exact(name: str) -> None:
    """Both relative to the norm of what they are compared with. torch's log_softmax over 49,152 words in float32 is
    itself off by some 3e-5, so the plain gradient is taken with a float64 softmax too."""
    for dtype, G, T in (
        ("float32", 8, TOKENS),
        ("bfloat16", 2, 24),
    ):  # the latter is ten times slower on many CPUs
        _, _, prompts, model, tokenizer = loaded(name, dtype)
        rollouts = rollout.sample(
            model,
            tokenizer,
            prompts,
            G,
            max_new_tokens=T,
            generator=torch.Generator().manual_seed(0),
        )
        sampled, fresh = [], []
        with torch.no_grad():
            for i in range(P * G):
                ids = rollouts.prompt_ids[i // G, -rollouts.prompt_lengths[i // G] :]
                tokens = rollouts.tokens[i, : rollouts.lengths[i]]
                logits = model(torch.cat([ids, tokens])[None]).logits[0, len(ids) - 1 : -1].float()
                fresh.append(torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])
                sampled.append(rollouts.logprobs[i, : len(tokens)])
        sampled, fresh = torch.cat(sampled), torch.cat(fresh)
        A = torch.randn(P, G, generator=torch.Generator().manual_seed(0)).flatten().tolist()
        ours = gradient(
            functools.partial(update.backward, micro_batch_tokens=512), model, rollouts, A
        )
        plain, exactly = (
            gradient(plain_backward, model, rollouts, A, 0.0, G, softmax)
            for softmax in (torch.float32, torch.float64)
        )
        log_p, off, near, theirs = (
            (a - b).norm() / b.norm()
            for a, b in ((sampled, fresh), (ours, plain), (ours, exactly), (plain, exactly))
        )
        if (
            dtype == "bfloat16"
        ):  # both round: which is nearer to what float32 makes of the same weights?
            whole = gradient(
                plain_backward, copy.deepcopy(model).float(), rollouts, A, 0.0, G, torch.float64
            )
            ours_off, plain_off = ((a - whole).norm() / whole.norm() for a in (ours, plain))
            print(
                f"bfloat16: from the float32 gradient of the same weights the shared one differs by {ours_off:.1e}, "
                f"the plain one by {plain_off:.1e}"
            )
        print(
            f"{dtype}, {P} x {G} rollouts of up to {T} tokens: log-probabilities differ by {log_p:.1e}, at most "
            f"{(sampled - fresh).abs().max():.1e} nats; the shared gradient from the plain one by {off:.1e}, from "
            f"that with a float64 softmax by {near:.1e} (the plain one from it: {theirs:.1e})",
            flush=True,
        )


def sampling(name: str) -> None:
    """Both sides stop where a rollout ends."""
    _, _, prompts, model, tokenizer = loaded(name)
    compare_sampling(
        f"{P} x {G} rollouts, up to {TOKENS} tokens; plain: generate",
        model,
        tokenizer,
        prompts,
        G,
        TOKENS,
        3,
    )


def micro_batches(name: str) -> None:
    """The same rollouts, of lengths that differ as sets do, with random advantages; each twice, there and back."""
    task, problems, _, model, tokenizer = loaded(name)
    prompts = [rollout.build_prompt(tokenizer, task, problem, 3) for problem in problems]
    rollouts = rollout.sample(
        model,
        tokenizer,
        prompts,
        G,
        max_new_tokens=3 * TOKENS,
        temperature=0.7,
        generator=torch.Generator().manual_seed(0),
    )
    A = torch.randn(P * G, generator=torch.Generator().manual_seed(0)).tolist()
    print(
        f"update of {P} x {G} rollouts of {min(rollouts.lengths)} to {max(rollouts.lengths)} tokens:",
        flush=True,
    )
    sizes, seconds = (4096, 1024, 512), {}
    for size in (*sizes, *reversed(sizes)):
        began = time.perf_counter()
        update.backward(model, None, rollouts, A, temperature=0.7, micro_batch_tokens=size)
        model.zero_grad()
        seconds.setdefault(size, []).append(time.perf_counter() - began)
    for size in sizes:
        print(
            f"--micro-batch-tokens {size}: {' and '.join(f'{x:.1f}' for x in seconds[size])} s",
            flush=True,
        )


def plan(name: str) -> None:
    """Settings that fit a laptop."""
    for settings in ("", "--lora-rank 16"):
        if "lora" in settings and not importlib.util.find_spec("peft"):
            continue
        flags = [
            "--task",
            "code",
            "--data",
            DATA,
            "--prompts-per-step",
            str(P),
            "--max-new-tokens",
            str(TOKENS),
        ]
        said, measured, seconds = planned_and_measured(name, [*flags, *settings.split()])
        print(
            f"--plan {said:.2f} GiB, measured {measured:.2f} GiB ({said / measured - 1:+.0%}), {seconds:.0f} s a "
            f"step: {' '.join(flags)} {settings}",
            flush=True,
        )


def trl(name: str) -> None:
    """The same model, prompts, rewards, group, lengths, KL and learning rate; the steps take turns with nothing."""
    if not importlib.util.find_spec("trl"):
        print("trl is not installed: pip install trl")
        return
    task, problems, prompts, model, tokenizer = loaded(name)
    by_prompt, steps, ours = dict(zip(prompts, problems, strict=True)), 3, []

    def reward(prompts: list[str], completions: list[str], **rest) -> list[float]:
        scored = rollout.score_texts(
            task, [by_prompt[prompt] for prompt in prompts], completions, 1
        )
        return scored.scalars.flatten().tolist()

    theirs = trl_steps(
        model,
        tokenizer,
        prompts * steps,
        reward,
        per_device_train_batch_size=P * G,
        num_generations=G,
        max_steps=steps,
        beta=1e-3,
        learning_rate=1e-6,
        max_completion_length=TOKENS,
    )
    reference, optimizer = models.load_policy(name, task)[0], update.AdamW(model)
    for step in range(steps):
        began = time.perf_counter()
        rollouts = rollout.sample(
            model,
            tokenizer,
            prompts,
            G,
            max_new_tokens=TOKENS,
            generator=torch.Generator().manual_seed(step),
        )
        scored = rollout.score_texts(task, problems, rollouts.texts, 1)
        A = vpo.ADVANTAGES["grpo"](scored.vectors, scored.scalars, scored.mask).flatten().tolist()
        update.backward(model, reference, rollouts, A, kl=1e-3, micro_batch_tokens=512)
        optimizer.step(1e-6)
        model.zero_grad()
        ours.append(time.perf_counter() - began)
    fast, slow = statistics.median(ours), statistics.median(theirs)
    print(
        f"GRPO step, {P} x {G} rollouts of up to {TOKENS} tokens: {fast:.1f} s, TRL {slow:.1f} s, "
        f"{slow / fast:.1f} times faster"
    )


def tasks(name: str) -> None:
    """Two prompts, four rollouts of two answers each, one held-out problem."""
    from test_code import HUMANEVAL
    from test_text_tasks import written

    name = str(Path(name).resolve()) if Path(name).exists() else name
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for task in ("musique", "eureqa", "tool", "code"):
            if task == "code":
                lines = [
                    json.dumps(
                        HUMANEVAL
                        | {"task_id": f"own/{i}", "prompt": HUMANEVAL["prompt"] + f"# {i}\n"}
                    )
                    for i in range(30)
                ]
                Path("data.jsonl").write_text("\n".join(lines))
            else:
                written(task, 30)
            with contextlib.redirect_stdout(io.StringIO()):
                train.main(
                    [
                        "--task",
                        task,
                        "--data",
                        "data.jsonl",
                        "--model",
                        name,
                        "--m",
                        "2",
                        "--out",
                        task,
                        "--steps",
                        "1",
                        "--method",
                        "vpo",
                        "--prompts-per-step",
                        "2",
                        "--group-size",
                        "4",
                        "--eval-problems",
                        "1",
                        "--pool",
                        "2",
                        "--max-new-tokens",
                        "64",
                        "--kl",
                        "0",
                        "--device",
                        "cpu",
                    ]
                )
            row = json.loads(Path(task, "vpo", "metrics.jsonl").read_text().splitlines()[0])
            print(
                f"{task}: {row['seconds']:.0f} s, {row['tokens']:.0f} tokens, reward {row['reward']:.3f}, "
                f"{row['answers']:.0%} of the slots filled, {row['cut_off']:.0%} cut off",
                flush=True,
            )


def programs(_: str) -> None:
    """The first three held-out problems that some policies solve, but not all: of each policy its most frequent
    programs side by side, as HTML that stands in Markdown."""
    found, parts = {}, []
    for name, file in (
        ("start", "grpo-seed0"),
        ("grpo", "grpo-seed0"),
        ("grpo", "grpo-seed0-lr2e-05"),
        ("max_at_k", "max_at_k-seed0"),
        ("vpo", "vpo-seed0-lr2e-05"),
        ("group_vpo", "group_vpo-seed0"),
    ):
        result = json.loads(
            gzip.decompress(Path(f"results/open_cases-{file}.json.gz").read_bytes())
        )
        called = name if name == "start" else f"{name} {result['command'][-1]}"
        found[called] = (
            result["at"]["0.7"][name]["passed"],
            result["programs"][name],
            result["size"],
        )

    def cell(text: str | None, share: float, count: int) -> str:
        code = html.escape(text or "(no program)").strip().replace("\n", "<br>")
        return f"{'once' if count == 1 else f'{count} times'}, {share:.0%} of the tests<pre>{code}</pre>"

    for i, problem in enumerate(held_out(load_task("code", data=DATA), "test", 10**4)):
        passed = {name: counts[i] for name, (counts, *_) in found.items()}
        if len(parts) < 3 and any(passed.values()) and 0 in passed.values():
            rows = [
                [
                    f"{title(name)}: {passed[name]} of {size} pass"
                    for name, (*_, size) in found.items()
                ],
                *itertools.zip_longest(
                    *(
                        [cell(*answer, count) for answer, count in shown[i]]
                        for _, shown, _ in found.values()
                    ),
                    fillvalue="",
                ),
            ]
            lines = ["".join(f"<td valign=top>{each}</td>" for each in row) for row in rows]
            parts.append(
                "\n".join(
                    [
                        f"**{problem.data['text']}**\n\n<table>",
                        *(f"<tr>{x}</tr>" for x in lines),
                        "</table>",
                    ]
                )
            )
    print("\n\n".join(parts))


SECTIONS = {
    "exact": exact,
    "sampling": sampling,
    "update": micro_batches,
    "plan": plan,
    "trl": trl,
    "tasks": tasks,
    "programs": programs,
}


def main(words: list[str]) -> None:
    sections, others = (
        [word for word in words if word in SECTIONS],
        [word for word in words if word not in SECTIONS],
    )
    if len(others) != 1 and (others or sections != ["programs"]):
        raise UserError(
            f"{' '.join(words) or 'nothing given'}: name one MODEL, a checkpoint's folder or a Hub id, and "
            f"sections of {', '.join(SECTIONS)}"
        )
    model = (
        str(Path(others[0]).resolve()) if others and Path(others[0]).exists() else "".join(others)
    )
    os.chdir(Path(__file__).parent.parent)  # the problems and commands are named from there
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if model:
        print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads")
    for section in sections or [*SECTIONS][:-1]:
        SECTIONS[section](model)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"real_model.py: error: {error}", file=sys.stderr)
        sys.exit(2)
