"""The warm start: a model imitates demonstrations before RL; cached by all that shapes the result."""

import functools
import hashlib
import inspect
import json
from pathlib import Path

import torch
from tqdm import tqdm

from engine import decoding, models, tiny, update
from engine.runs import check_folder, write_folder
from rewards import Task, UserError


def warm_start(task: Task, name: str, show: functools.partial, model, tokenizer, steps: int):
    """The model and tokenizer after `steps` steps on what show(step, model=model) gives, prompts (P) and texts (P * G).
    Raises UserError if the loss is not finite."""
    peak = 5e-3 if tiny.is_tiny(tokenizer) else 2e-5
    weights = sum(
        parameter.detach().double().abs().sum().item() for parameter in model.parameters()
    )
    modules = [
        *map(inspect.getmodule, (type(task), show.func, warm_start)),
        decoding,
        models,
        tiny,
        update,
    ]
    recipe = [
        *map(inspect.getsource, modules),
        model.config.to_json_string(),
        [show(step) for step in range(3)],
        steps,
        weights,
        torch.__version__,
        torch.get_num_threads(),
        show.args[2:],
        show.keywords,
    ]
    cached = (
        Path("runs")
        / "start"
        / f"{name}-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]}"
    )
    if not cached.exists():
        optimizer, bar = (
            torch.optim.AdamW(model.parameters(), lr=peak),
            tqdm(range(steps), "warm start", unit="step"),
        )
        for step in bar:
            shown = decoding.given_rollouts(model, tokenizer, *show(step, model=model))
            optimizer.param_groups[0]["lr"] = (
                peak * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
            )
            optimizer.zero_grad()
            rows, loss = [*range(len(shown.texts))], torch.zeros(())
            for batch in (
                [rows] if tiny.is_tiny(tokenizer) else [[row] for row in rows]
            ):  # one by one: for the memory
                logprobs, _ = update.token_logprobs(model, shown, batch)
                mask = shown.mask[batch, : logprobs.shape[1]]
                part = -logprobs[mask].mean() * (mask.sum() / shown.mask.sum())
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            if not loss.isfinite():
                raise UserError(
                    f"warm start: loss {loss.item()}; are the demonstrations as they should be?"
                )
        write_folder(cached, lambda folder: models.save_policy(model, tokenizer, folder))
    check_folder(cached)
    return models.load_policy(str(cached), task)
