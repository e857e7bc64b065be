"""Policies: models and tokenizers in, checkpoints out.

    load_policy     `tiny` (own vocabulary, random weights), or any causal language model: a local folder or a Hub id
    empty_policy    the same model without its weights, for the plan of `train.py --plan`
    prefill, hidden_states, head    the three parts of a forward pass that sampling and the update put together
    save_policy     an ordinary Hugging Face checkpoint, or a peft adapter

Three ways to make a model fit: weights in bfloat16 (their lower halves are the optimizer's, see update.py), layers that
are computed again in the backward pass, and LoRA, whose reference policy is the same model with the adapter switched off.
"""

import contextlib
import functools
import io
import os
from pathlib import Path

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from rewards import MAX_ANSWERS, Task, UserError

PAD, EOS = "<pad>", "<eos>"
DECODER_ONLY = "choose a decoder-only model such as Qwen, Llama, SmolLM, Gemma or GPT-2"
ADAPTER = "adapter_config.json"  # what tells a folder of peft from an ordinary checkpoint


def load_policy(name: str, task: Task, *, seed: int = 0, device: str = "cpu", dtype: str = "float32", lora_rank: int = 0,
                gradient_checkpointing: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer: `tiny` with fresh weights, else an ordinary Hugging Face checkpoint, local or on the Hub.

    With lora_rank it gets a new adapter; a checkpoint that is an adapter is loaded onto the start model beside it. Raises
    UserError if there is no such model, if it cannot be read, or if its rollouts could not be sampled or scored here.
    """
    config, tokenizer = load_config_and_tokenizer(name, task)
    torch.manual_seed(seed)
    if name == "tiny":
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    else:
        with _explained(name):
            model = AutoModelForCausalLM.from_pretrained(_weights(name), dtype=getattr(torch, dtype), local_files_only=_is_local(name))
        check_model(model, name)
    model = model.to(device).eval()
    if (Path(name) / ADAPTER).exists():
        check_peft(name)
        with _explained(name):
            model.load_adapter(name, is_trainable=True)
    elif lora_rank:
        add_lora(model, lora_rank)
    if gradient_checkpointing:
        recompute_layers(model)
    return model, tokenizer


def empty_policy(name: str, task: Task, *, dtype: str = "float32", lora_rank: int = 0,
                 gradient_checkpointing: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What load_policy gives, but the weights are not read: on torch.device("meta") the model takes no memory."""
    config, tokenizer = load_config_and_tokenizer(name, task)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    if lora_rank:
        add_lora(model, lora_rank)
    if gradient_checkpointing:
        recompute_layers(model)
    return model, tokenizer


def load_config_and_tokenizer(name: str, task: Task) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The small files of a policy; UserError as in load_policy."""
    if name == "tiny":
        tokenizer = _tiny_tokenizer(task)
        return _tiny_config(tokenizer), tokenizer
    folder = Path(name)
    if folder.exists() and not any((folder / file).is_file() for file in ("config.json", ADAPTER)):
        raise UserError(f"--model {name}: there is no config.json in it, so it is no Hugging Face checkpoint")
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"--model {name}: no such folder; choose tiny, a local checkpoint, or a Hub id like Qwen/Qwen2.5-0.5B")
    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=_is_local(name))
        config = AutoConfig.from_pretrained(_weights(name), local_files_only=_is_local(name))
    if tokenizer.eos_token_id is None and config.get_text_config().eos_token_id is None:
        raise UserError(f"--model {name}: its tokenizer has no EOS token, so no rollout would ever end; "
                        "set eos_token in its tokenizer_config.json")
    return config, tokenizer


def _weights(name: str) -> str:
    """Where the weights are: those of an adapter are in the start folder of its run."""
    return str(Path(name).parent.parent / "start") if (Path(name) / ADAPTER).exists() else name


@functools.cache
def _is_local(name: str) -> bool:
    """Whether to look on this machine only: a folder, or a cached model while the Hub is out of reach.

    Asks the Hub once, because transformers asks again and again for a minute. Raises what the Hub does not give.
    """
    if Path(name).exists():
        return True
    try:
        model_info(name, timeout=10)
    except Exception:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise
        return True
    return False


@contextlib.contextmanager
def _explained(name: str):
    """Turn what transformers, safetensors, tokenizers, peft and the Hub raise, each their own kinds, into one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not Path(name).exists():
            why = ("not in the local cache, and the Hub did not give it. Either there is no connection (or HF_HUB_OFFLINE is set), "
                   "or there is no such model, or it is gated: then accept its terms on its page and run `hf auth login`. "
                   f"The Hub's own words: {why}")
        raise UserError(f"--model {name}: cannot be loaded ({why})") from error


def check_model(model: PreTrainedModel, name: str) -> None:
    """Raise UserError unless prompts in a KV cache, then rollouts after them, give the logits of the plain forward pass.

    Two prompts of different lengths, the shorter one padded: guards against architectures that keep no cache, take their
    positions from elsewhere, or do more to their logits than their LM head.
    """
    kind = type(model).__name__
    prompts, rollouts = torch.tensor([[0, 5, 6], [7, 8, 9]], device=model.device), torch.tensor([[3, 4], [4, 3]], device=model.device)
    lengths = [2, 3]
    try:
        with torch.no_grad():
            cache, _ = prefill(model, prompts, lengths)
            if any(layer.keys is None for layer in cache.layers):
                raise UserError(f"--model {name}: {kind} keeps no KV cache of all its layers; {DECODER_ONLY}")
            after = cache_of(model, [PromptLayer(layer.keys, layer.values) for layer in cache.layers])
            hidden = hidden_states(model, rollouts, after, torch.tensor(lengths, device=model.device),
                                   prompt_mask(lengths, 3, prompts.device, 2))
            expected = [model(input_ids=torch.cat([prompts[i, 3 - lengths[i]:], rollouts[i]])[None]).logits[0, -2:].float() for i in (0, 1)]
            ours = head(model, hidden)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"--model {name}: {kind} does not take a KV cache as other models do ({error}); {DECODER_ONLY}") from error
    if not torch.allclose(ours, torch.stack(expected), atol=2e-2 * ours.abs().max().item(), equal_nan=True):
        raise UserError(f"--model {name}: {kind} gives other logits after a cached prompt, or does more to them than its LM head, "
                        f"so log-probabilities would be wrong here; {DECODER_ONLY}")


def check_dtype(device: str, dtype: str) -> None:
    """Raise UserError if the device cannot compute in this dtype, without emulation."""
    try:
        torch.ones(2, 2, device=device, dtype=getattr(torch, dtype)).mm(torch.ones(2, 2, device=device, dtype=getattr(torch, dtype)))
        lacking = dtype == "bfloat16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, TypeError):
        lacking = True
    if lacking:
        raise UserError(f"--dtype {dtype}: the device {device} does not compute in it; take --dtype float32")


class PromptLayer(DynamicLayer):
    """A KV cache layer that holds prompts and nothing that comes after them.

    Made empty it takes the prompts in; made with their keys and values (B, heads, L, head size) it puts them before those
    of the rollouts. Either way the same call gives the same result again, so that a layer may be recomputed.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, keys is not None
        self.full = keys is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.full:
            return torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.full else 0


def cache_of(model: PreTrainedModel, layers: list[DynamicLayer]) -> DynamicCache:
    """A cache with these layers. Full ones serve sliding-window attention too: the model's mask cuts the window out."""
    cache = DynamicCache(config=model.config)
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise UserError(f"--model {model.config.name_or_path}: {type(model).__name__} keeps no KV cache, but other states; {DECODER_ONLY}")
    cache.layers = layers or [PromptLayer() for _ in cache.layers]
    return cache


def hidden_states(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, start: Tensor, mask: Tensor | None) -> Tensor:
    """Last hidden states (B, T, H) of ids (B, T) at positions start (B) onwards, after what the cache holds.

    mask (B, everything in the cache + T) hides left padding; None where there is none, which is faster.
    """
    positions = (start[:, None] + torch.arange(ids.shape[1], device=ids.device)).clamp_min(0)
    return model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                            use_cache=True).last_hidden_state


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits (..., V) in float32 of hidden states (..., H)."""
    logits, cap = model.get_output_embeddings()(hidden).float(), soft_cap(model)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def soft_cap(model: PreTrainedModel) -> float | None:
    """The bound that Gemma's logits approach by a tanh; None for most models."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def prefill(model: PreTrainedModel, ids: Tensor, lengths: list[int]) -> tuple[DynamicCache, Tensor]:
    """The KV cache of prompts (P, L), padded on the left, and the hidden states (P, H) of their last tokens."""
    cache, L = cache_of(model, []), ids.shape[1]
    start = torch.tensor(lengths, device=ids.device) - L  # negative: padding shifts the first token to the right
    return cache, hidden_states(model, ids, cache, start, prompt_mask(lengths, L, ids.device))[:, -1]


def prompt_mask(lengths: list[int], L: int, device: torch.device, new: int = 0) -> Tensor | None:
    """(B, L + new) bool: not the left padding of prompts of these lengths; None if there is no padding."""
    if min(lengths) == L:
        return None
    return torch.arange(L + new, device=device) >= L - torch.tensor(lengths, device=device)[:, None]


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """A LoRA adapter (arXiv 2106.09685) on every linear layer but the LM head; all other weights freeze."""
    check_peft(f"--lora-rank {rank}")
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def check_peft(wanted_by: str) -> None:
    """Raise UserError if an adapter is wanted and peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(f"{wanted_by}: needs peft, which is not installed: pip install peft") from error


@contextlib.contextmanager
def adapter_off(model: PreTrainedModel):
    """The model as it was before training, if it trains an adapter; else nothing changes."""
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    if adapted:
        model.disable_adapters()
    try:
        yield
    finally:
        if adapted:
            model.enable_adapters()


def recompute_layers(model: PreTrainedModel) -> None:
    """Gradient checkpointing that keeps the KV cache: transformers' own drops it, and with it the shared prompt.

    Raises UserError if the architecture does not mark its layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__}: its layers cannot be computed again; take --no-gradient-checkpointing")
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # no dropout, no random state


def _tiny_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token per word: specials, numbers of answers, tags, then the task's own words."""
    if not task.words:
        raise UserError(f"--model tiny: task {task.name} has no words for it here; take a language model, "
                        "--model FOLDER or a Hub id, or give Task.words")
    numbers = range(1, MAX_ANSWERS + 1)
    tags = [tag.format(task.tag, i) for i in numbers for tag in ("<{}_{}>", "</{}_{}>")]
    words = [PAD, EOS, *(f"answers={m}" for m in numbers), *tags, *task.words]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def _tiny_config(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    """A GPT-2 of 0.1 to 0.2M parameters, no dropout.

    Learned positions, because the words of a tiny prompt stand at fixed places; weights of size 1/sqrt(width), because the
    usual 0.02 leaves so narrow a model's attention uniform for hundreds of steps.
    """
    return GPT2Config(vocab_size=len(tokenizer), n_embd=64, n_inner=192, n_layer=3, n_head=4, n_positions=512,
                      activation_function="gelu_pytorch_tanh",  # the fused form of GPT-2's own
                      initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
                      bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def is_tiny(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer is the embedded one, whose language is a task's own words."""
    word = f"answers={MAX_ANSWERS}"
    id = tokenizer.convert_tokens_to_ids(word)
    return id is not None and tokenizer.convert_ids_to_tokens(id) == word


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a rollout: the model's generation config may name several, the tokenizer one more."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """An ordinary Hugging Face checkpoint: AutoModelForCausalLM and AutoTokenizer load it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
