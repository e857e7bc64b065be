"""The plain sides of the comparisons: each thing as one would first write it, or as others do it."""

import contextlib
import copy
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import at_root  # noqa: F401 - puts the project on the path
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vpo
from engine import lm_head
from engine.decoding import Rollouts, encode_prompts
from engine.models import eos_ids
from tasks.sandbox import Job


def advantage(rewards: Tensor) -> Tensor:
    """VPO's advantage, one prompt group after the other: rewards (P, G, m, k) -> (P, G)."""
    advantages = []
    for group in rewards:  # (G, m, k)
        concentration = torch.ones(group.shape[-1], device=group.device)
        weights = torch.distributions.Dirichlet(concentration).sample((100,))  # (K, k)
        R = torch.einsum("gmk,jk->gmj", group, weights).amax(1).mean(-1)
        advantages.append((R - R.mean()) / (R.std(correction=0) + 1e-6))
    return torch.stack(advantages)


def run_in_fresh_interpreters(jobs: list[Job]) -> None:
    """Every test in a Python process of its own, as many at a time as there are cores."""
    tests = []
    for job in jobs:
        tests += [(job, test) for test in job.tests]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        assert all(threads.map(lambda pair: passes(*pair), tests))


def passes(job: Job, test: tuple) -> bool:
    """Whether a program passes a test; of a function the expected result stands in the program."""
    given, expected = test
    program = job.program
    if job.entry_point:
        program += f"\nassert {job.entry_point}(*{given!r}) == {expected!r}"
        given = ""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if job.entry_point:
        return done.returncode == 0
    return done.returncode == 0 and done.stdout == expected


def generate(model, tokenizer, prompts: list[str], G: int, T: int) -> None:
    """Rollouts by transformers' own loop, with the prompt of a group repeated."""
    ids, lengths = encode_prompts(model.config, tokenizer, prompts, T, model.device)
    ends = eos_ids(model, tokenizer)
    model.generate(
        ids.repeat_interleave(G, 0),
        attention_mask=prompt_mask(ids, lengths).long().repeat_interleave(G, 0),
        do_sample=True,
        top_k=0,
        max_new_tokens=T,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )


def prompt_mask(ids: Tensor, lengths: list[int]) -> Tensor:
    """Attention mask (P, L) of left-padded prompts."""
    L = ids.shape[1]
    padding = L - torch.tensor(lengths, device=ids.device)
    return torch.arange(L, device=ids.device) >= padding[:, None]


@dataclass
class PlainUpdate:
    """Prompt and rollout in one row, all logits at once."""

    kl: float = 0.0
    rows: int = 64  # of a micro-batch
    softmax: torch.dtype = torch.float32

    def backward(self, model, reference, rollouts: Rollouts, advantages: Tensor) -> None:
        """Add the gradient of all rollouts; advantages (P * G)."""
        for first in range(0, len(rollouts.tokens), self.rows):
            part = slice(first, first + self.rows)
            ref_logprobs = None
            if reference is not None:
                with torch.no_grad():
                    ref_logprobs = self.logprobs(reference, rollouts, part)
            loss, _ = vpo.policy_loss(
                self.logprobs(model, rollouts, part),
                rollouts.logprobs[part],
                advantages[part],
                rollouts.token_mask[part],
                sum(rollouts.lengths),
                ref_logprobs=ref_logprobs,
                kl_coef=self.kl,
            )
            loss.backward()

    def logprobs(self, model, rollouts: Rollouts, part: slice) -> Tensor:
        """Log-probabilities (B, T) of the tokens of some rows."""
        G = rollouts.group_size
        prompts = rollouts.prompt_ids.repeat_interleave(G, 0)[part]
        is_prompt = prompt_mask(rollouts.prompt_ids, rollouts.prompt_lengths)
        is_prompt = is_prompt.repeat_interleave(G, 0)[part]
        tokens = rollouts.tokens[part]
        mask = torch.cat([is_prompt, rollouts.token_mask[part]], 1)
        logits = model(
            input_ids=torch.cat([prompts, tokens], 1),
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=False,
        ).logits
        L = prompts.shape[1]
        log_p = torch.log_softmax(logits[:, L - 1 : -1].to(self.softmax), -1).float()
        with torch.no_grad():
            (log_p.exp() * log_p).sum(-1)  # the entropies, which the other side computes too
        return log_p.gather(2, tokens[..., None])[..., 0]


class CheckpointedHead:
    """lm_head.HeadLogProbs in short: the same chunks through torch.utils.checkpoint."""

    @staticmethod
    def apply(hidden, weight, bias, targets, scale) -> tuple[Tensor, Tensor]:
        def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            z = lm_head.scaled_logits(hidden, weight, bias, scale)
            log_Z = z.logsumexp(-1)
            with torch.no_grad():
                entropy = log_Z - ((z - log_Z[:, None]).exp() * z).sum(-1)
            return z.gather(1, targets[:, None])[:, 0] - log_Z, entropy

        logprobs = []
        entropies = []
        for part in lm_head.chunks(hidden, weight):
            log_p, entropy = checkpoint(chunk, hidden[part], targets[part], use_reentrant=False)
            logprobs.append(log_p)
            entropies.append(entropy)
        return torch.cat(logprobs), torch.cat(entropies)


def trl_steps(policy: tuple, prompts: list[str], reward: Callable, **options) -> list[float]:
    """Seconds of every step of TRL's GRPOTrainer on a copy of the model.

    Args:
        reward: as TRL calls it, of prompts and completions.
        options: of GRPOConfig.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs) -> None:
            seconds.append(time.perf_counter() - self.began)

    model, tokenizer = policy
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = GRPOConfig(
            output_dir=folder,
            lr_scheduler_type="constant",
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1000,
            shuffle_dataset=False,
            disable_tqdm=True,
            **options,
        )
        trainer = GRPOTrainer(
            model=copy.deepcopy(model),
            reward_funcs=reward,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            callbacks=[Clock()],
        )
        trainer.train()
    return seconds
