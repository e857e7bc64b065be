"""What `auto` means on a card: what its memory holds. docs/hardware.md explains the numbers."""

import torch

from engine.config import AUTO, Config
from engine.tasks import held_out
from engine.training.jobs import PROCESS_BYTES, are_known, jobs_of
from rewards import Task, UserError
from rollout import Policy, build_prompt, encode_prompts, rollout_length

GIB = 2**30
HEAD = 6 * 2**27  # six chunks of the LM head's float32 logits
LOGITS = 6 * 4  # bytes per word of the vocabulary: float32 logits, and what `draw` makes of them
SPARE = 0.85  # of the rest is planned with: memory is given in blocks
WORKING_BYTES = 3 * GIB  # that a method gets besides, where nobody says how many go side by side
SMALL = 1e9  # weights of a model whose methods go side by side
MOST_ROLLOUTS = 512
MOST_TOKENS = 2**15  # of a micro-batch; more would be no faster
ENOUGH_TOKENS = 2**13  # so many fill a card, and no layer need be computed again
LEAST_TOKENS = 2**10


def free_memory() -> int:
    """Bytes of the card that nobody uses."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def fill_card(config: Config, policy: Policy, task: Task, free: int, longest: int = 0) -> None:
    """Give `auto` its numbers and --jobs its default. Raises UserError if the weights do not fit.

    `free` bytes of the card are free beside the policy, the start model. `longest` are the tokens of
    the run's longest prompt, where they are known.
    """
    n = policy.model.num_parameters()
    free += n * policy.model.dtype.itemsize  # it leaves before the training begins
    stays = resident(config, policy)

    # 1. methods side by side
    fitting = int(free // (stays + PROCESS_BYTES))
    if fitting < jobs_of(config):
        sizes = f"a method keeps {stays / GIB:.1f} GiB, {free / GIB:.1f} GiB of the card are free"
        advice = f"take --jobs {fitting}" if fitting else "take --lora-rank 16 or a smaller --model"
        raise UserError(f"--jobs {jobs_of(config)}, --model {config.model}: {sizes}; {advice}")
    if not config.jobs:
        roomy = int(free // (stays + PROCESS_BYTES + WORKING_BYTES))
        most = len(config.method) if n <= SMALL and are_known(config) else 1
        config.jobs = max(1, min(roomy, most))
    left = SPARE * (free / jobs_of(config) - PROCESS_BYTES - stays) - HEAD

    # 2. rollouts: their KV cache stays, too
    per_rollout = kv_cache(config, policy, task, longest)
    if not config.plain:  # a graph keeps room for its logits
        per_rollout += LOGITS * policy.model.get_output_embeddings().weight.shape[0]
    if config.sampling_batch == AUTO:
        fitting = int(left / 2 // per_rollout)
        config.sampling_batch = max(config.group_size, min(fitting, MOST_ROLLOUTS))
    left -= (config.sampling_batch or MOST_ROLLOUTS) * per_rollout

    # 3. tokens of a micro-batch
    if config.micro_batch_tokens == AUTO:
        if not config.plain:  # fast/ keeps as many tokens of prompts beside them
            left /= 2
        fitting = int(left // per_token(policy, is_checkpointed=False))
        config.gradient_checkpointing &= fitting < ENOUGH_TOKENS
        if config.gradient_checkpointing:
            fitting = int(left // per_token(policy, is_checkpointed=True))
        config.micro_batch_tokens = max(LEAST_TOKENS, min(fitting, MOST_TOKENS))


def per_token(policy: Policy, is_checkpointed: bool) -> int:
    """Bytes that the layers keep of a token for its gradient."""
    shape = policy.model.config.get_text_config()
    size = policy.model.dtype.itemsize
    width = shape.hidden_size
    mlp = getattr(shape, "intermediate_size", None) or 4 * width
    layer = size * (12 * width + 4 * mlp)
    if is_checkpointed:  # the input of each layer, and one layer at a time
        return size * width * shape.num_hidden_layers + layer
    return layer * shape.num_hidden_layers


def resident(config: Config, policy: Policy) -> float:
    """Bytes that a method keeps: weights, gradients, AdamW's moments, master weights, the reference."""
    size = policy.model.dtype.itemsize
    n = policy.model.num_parameters()
    # float32 gradients and moments, and of bfloat16 weights a float32 copy
    per_trained = 4 + 8 if size == 4 else 4 + 8 + 4
    if config.lora_rank:
        shapes = [weight.shape for weight in policy.model.parameters() if weight.ndim == 2]
        return size * n + per_trained * config.lora_rank * sum(map(sum, shapes))
    n_models = 2 if config.kl else 1
    return n_models * size * n + per_trained * n


@torch.no_grad()
def kv_cache(config: Config, policy: Policy, task: Task, longest: int = 0) -> int:
    """Bytes of the KV cache of a rollout of m answers to the longest prompt."""
    problems = held_out(task, "train", 32)
    prompts = [build_prompt(policy, task, problem, config.m) for problem in problems]
    n_new = rollout_length(task, config.m, config.max_new_tokens)
    ids, lengths = encode_prompts(policy, prompts, n_new)
    cache = policy.model.base_model(input_ids=ids[:1], use_cache=True).past_key_values
    per_token = 0
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:  # a layer with states alone, or without any
            continue
        per_token += layer.keys[:, :, :1].nbytes + layer.values[:, :, :1].nbytes
    return (max(longest, *lengths) + n_new) * per_token
