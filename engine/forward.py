"""The parts of a forward pass that sampling and the update put together: prompts, cache, LM head."""

import contextlib
import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rewards import UserError

DECODER_ONLY = "choose a decoder-only model such as Qwen, Llama, SmolLM, Gemma or GPT-2"


def prefill(model: PreTrainedModel, ids: Tensor, lengths: list[int]) -> tuple[DynamicCache, Tensor]:
    """Run prompts through the model.

    Args:
        ids: token ids (P, L), padded on the left.
        lengths: P lengths of the prompts in tokens, the padding left out.

    Returns:
        The KV cache of the prompts and the hidden states (P, H) of their last tokens.
    """
    n_layers = len(DynamicCache(config=model.config).layers)
    cache = cache_of([PromptLayer() for _ in range(n_layers)])
    L = ids.shape[1]
    # The first column of a shorter prompt has a negative position: its padding comes before 0.
    start = torch.tensor(lengths, device=ids.device) - L
    mask = attention_mask(lengths, L, ids.device)
    hidden = hidden_states(model, ids, cache, start, mask)  # (P, L, H)
    return cache, hidden[:, -1]


class PromptLayer(DynamicLayer):
    """A layer of a KV cache that holds prompts and nothing after them, so that it can be reused.

    An empty layer stores the keys and values (P, heads, L, head size) that it is given first. Later
    ones are put behind the stored ones for the attention, but are not stored.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        super().__init__()
        self.keys = keys
        self.values = values
        self.is_initialized = keys is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys = key_states
            self.values = value_states
            return key_states, value_states
        keys = torch.cat([self.keys, key_states], 2)
        values = torch.cat([self.values, value_states], 2)
        return keys, values


def cache_of(layers: list[DynamicLayer]) -> DynamicCache:
    """A KV cache of these layers.

    They hold all positions. That is right for sliding-window attention too, because the model's
    own attention mask cuts the window out.
    """
    cache = DynamicCache()
    cache.layers = layers
    return cache


def hidden_states(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache, start: Tensor, mask: Tensor | None
) -> Tensor:
    """Last hidden states (B, T, H) of tokens that follow those in the cache.

    Args:
        ids: token ids (B, T).
        cache: keys and values of C earlier positions. The model hands it the new ones.
        start: position (B) of the first token in its sequence.
        mask: attention mask (B, C + T), or None where nothing is padded, which is faster.
    """
    steps = torch.arange(ids.shape[1], device=ids.device)
    positions = (start[:, None] + steps).clamp_min(0)  # (B, T)
    output = model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    return output.last_hidden_state


def attention_mask(lengths: list[int], L: int, device: torch.device, new: int = 0) -> Tensor | None:
    """Attention mask (B, L + new) of left-padded prompts and `new` tokens after each.

    It is False on the padding. None is returned if no prompt is padded.
    """
    if min(lengths) == L:
        return None
    padding = L - torch.tensor(lengths, device=device)
    return torch.arange(L + new, device=device) >= padding[:, None]


def lm_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits (..., V) in float32 of hidden states (..., H)."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = soft_cap(model)
    if cap is None:
        return logits
    return cap * torch.tanh(logits / cap)


def soft_cap(model: PreTrainedModel) -> float | None:
    """The bound that the logits of Gemma 2 approach by a tanh, None for most models."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def adapter_off(model: PreTrainedModel | None) -> contextlib.ExitStack:
    """A context in which a model that trains an adapter is the one before training.

    For other models, and for None, the context changes nothing.
    """
    context = contextlib.ExitStack()
    if getattr(model, "_hf_peft_config_loaded", False):
        model.disable_adapters()
        context.callback(model.enable_adapters)
    return context


def recompute_layers(model: PreTrainedModel) -> None:
    """Switch on gradient checkpointing that keeps the KV cache, which transformers' own drops.

    Raises:
        UserError: if the model's layers do not support it.
    """
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise UserError(
            f"{type(model).__name__}: cannot compute its layers again; "
            "take --no-gradient-checkpointing"
        )
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward, *args, **kwargs):
    """Call a layer's forward pass, and once more in the backward pass if there will be one."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Nothing in the layer is random: the model is in eval mode, without dropout.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
