"""The start model of a run: whether it can be sampled and scored."""

import torch
from transformers import DynamicCache

from rewards import Task, UserError
from rollout import Policy, hidden_states, lm_logits, load_policy


def load_start(
    name: str, task: Task, *, seed: int = 0, device: str = "cpu", dtype: str = "float32"
) -> Policy:
    """A model as `rollout.load_policy` loads it. Raises UserError if it cannot be sampled or scored."""
    policy = load_policy(name, task, seed=seed, dtype=dtype)
    if not policy.is_tiny:
        check_model(policy, name)
    policy.model.to(device)
    return policy


def check_model(policy: Policy, name: str) -> None:
    """Raise UserError for a model whose rollouts would never end, or would be scored wrongly."""
    if not policy.eos_ids:
        raise UserError(
            f"--model {name}: its tokenizer has no EOS token, so no rollout would ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    model = policy.model
    ids = torch.tensor([[5, 6, 3, 4]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    architecture = type(model).__name__
    fix = "choose a decoder-only model such as Qwen, Llama, SmolLM, Gemma or GPT-2"
    try:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            padded = torch.cat([ids[:, :1], ids[:, :2]], 1)  # its first token is padding
            padded_mask = torch.tensor([[False, True, True, True, True]])
            hidden_states(model, padded, padded_mask[:, :3], cache)
            ours = lm_logits(model, hidden_states(model, ids[:, 2:], padded_mask, cache))
            plain = model(input_ids=ids, attention_mask=mask).logits[:, 2:].float()
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise UserError(
            f"--model {name}: {architecture} takes no KV cache as others do ({error!s:.200}); {fix}"
        ) from error
    if not plain.isfinite().all():
        raise UserError(
            f"--model {name}: its logits are not finite, so its weights are not; fetch or save it again"
        )
    if not torch.allclose(ours, plain, atol=2e-2 * plain.abs().max().item()):
        raise UserError(
            f"--model {name}: {architecture} gives other logits after a cached prompt, or does more to "
            f"them than its LM head, so log-probabilities would be wrong here; {fix}"
        )
