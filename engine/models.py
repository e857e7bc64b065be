"""Models: policies in and out, and the parts of a forward pass that sampling and update put together."""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.tiny import tiny_config, tiny_tokenizer
from rewards import Task, UserError, reward_vectors, take_problems

Model, Tokenizer = PreTrainedModel, PreTrainedTokenizerBase
DECODER_ONLY = "choose a decoder-only model such as Qwen, Llama, SmolLM, Gemma or GPT-2"
ADAPTER = "adapter_config.json"  # what tells a folder of peft from an ordinary checkpoint


def load_policy(
    name: str,
    task: Task,
    *,
    seed: int = 0,
    device: str = "cpu",
    lora_rank: int = 0,
    empty: bool = False,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer: `tiny` with fresh weights, or a Hugging Face checkpoint, with a new adapter if it has
    a lora_rank; an adapter's folder brings its start model along. `empty`: no weights are read, for the meta device.
    Raises UserError if there is no such model, it cannot be read, or its rollouts could not be sampled or scored."""
    config, tokenizer = load_config_and_tokenizer(name, task)
    torch.manual_seed(seed)
    if name == "tiny" or empty:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    else:
        with _explained(name):
            model, loaded = AutoModelForCausalLM.from_pretrained(
                config.name_or_path,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **_hub(name),
            )
        if wrong := sorted(
            [*loaded["missing_keys"], *(each[0] for each in loaded["mismatched_keys"])]
        ):
            raise UserError(
                f"--model {name}: incomplete, its files lack {wrong[0]} and {len(wrong) - 1} more of its "
                "tensors, or have them in another size than config.json; fetch or save it again"
            )
        if unused := sorted(loaded["unexpected_keys"]):
            print(
                f"--model {name}: {len(unused)} tensors of its files are not used, as {unused[0]}",
                file=sys.stderr,
            )
        check_model(model, name)
    if not eos_ids(model, tokenizer):
        raise UserError(
            f"--model {name}: its tokenizer has no EOS token, so no rollout would ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    model = model if empty else model.to(device)
    if (Path(name) / ADAPTER).exists():
        check_peft(name)
        with _explained(name):
            model.load_adapter(name, is_trainable=True)
    elif (
        lora_rank
    ):  # arXiv 2106.09685, on every linear layer but the LM head; all other weights freeze
        check_peft(f"--lora-rank {lora_rank}")
        from peft import LoraConfig  # optional

        model.add_adapter(
            LoraConfig(
                "CAUSAL_LM", r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear"
            )
        )
    if gradient_checkpointing:
        recompute_layers(model)
    return model, tokenizer


def load_config_and_tokenizer(name: str, task: Task) -> tuple[PreTrainedConfig, Tokenizer]:
    """The small files of a policy; UserError as in load_policy."""
    if name == "tiny":
        tokenizer = tiny_tokenizer(task)
        return tiny_config(tokenizer), tokenizer
    folder, file, adapter = Path(name), Path(name) / "config.json", (Path(name) / ADAPTER).is_file()
    if folder.exists() and not file.is_file() and not adapter:
        raise UserError(f"--model {name}: there is no {file}, so it is no Hugging Face checkpoint")
    if file.is_file() and '"flags"' in file.read_text(errors="replace"):
        raise UserError(
            f"--model {name}: a run folder; name a checkpoint in it, as {folder}/vpo/checkpoint-000200"
        )
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(
            f"--model {name}: no such folder; choose tiny, a local checkpoint, or a Hub id (OWNER/NAME)"
        )
    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(name, **_hub(name))
        config = AutoConfig.from_pretrained(
            folder.parent.parent / "start" if adapter else name, **_hub(name)
        )
    if len(tokenizer) > (rows := config.get_text_config().vocab_size):
        raise UserError(
            f"--model {name}: its tokenizer has {len(tokenizer)} tokens, its embeddings have {rows} rows; "
            "take the tokenizer that the model was trained with, or resize the embeddings"
        )
    return config, tokenizer


@functools.cache
def _hub(name: str) -> dict[str, bool]:
    """Tells `from_pretrained` to ask no Hub for a folder, or a cached model out of its reach: it would ask for long."""
    if not Path(name).exists():
        try:
            model_info(name, timeout=10)
            return {"local_files_only": False}
        except Exception:
            if not isinstance(try_to_load_from_cache(name, "config.json"), str):
                raise
    return {"local_files_only": True}


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers, safetensors, tokenizers, peft and the Hub raise, each their own kinds, into one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        why = " ".join(str(error).split())[:400] or type(error).__name__
        if not Path(name).exists():
            why = (
                "not in the local cache, and the Hub did not give it: no connection (or HF_HUB_OFFLINE is set), no "
                f"such model, or a gated one: accept its terms, then `hf auth login`. The Hub's own words: {why}"
            )
        raise UserError(
            f"--model {name}: cannot be loaded ({why}){'; save it again' * Path(name).exists()}"
        ) from error


def check_model(model: Model, name: str) -> None:
    """Raise UserError unless prompts in a KV cache, then rollouts after them, give the logits of a plain forward pass:
    an architecture may keep no cache, take positions from elsewhere, or do more to its logits than its LM head."""
    kind, lengths = type(model).__name__, [2, 3]  # the shorter prompt is padded
    prompts, rollouts = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[3, 4], [4, 3]])
    whole = [torch.cat([prompts[i, 3 - lengths[i] :], rollouts[i]])[None] for i in (0, 1)]
    try:
        with torch.no_grad():
            cache, _ = prefill(model, prompts, lengths)
            if any(layer.keys is None for layer in cache.layers):
                raise UserError(
                    f"--model {name}: {kind} keeps no KV cache of all its layers; {DECODER_ONLY}"
                )
            after = cache_of(
                model, [PromptLayer(layer.keys, layer.values) for layer in cache.layers]
            )
            mask = prompt_mask(lengths, 3, prompts.device, 2)
            ours = head(model, hidden_states(model, rollouts, after, torch.tensor(lengths), mask))
            expected = torch.stack([model(input_ids=ids).logits[0, -2:].float() for ids in whole])
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"--model {name}: {kind} takes no KV cache as others do ({error}); {DECODER_ONLY}"
        ) from error
    if not expected.isfinite().all():
        raise UserError(
            f"--model {name}: its logits are not finite, so its weights are not; fetch or save it again"
        )
    if not torch.allclose(ours, expected, atol=2e-2 * expected.abs().max().item()):
        raise UserError(
            f"--model {name}: {kind} gives other logits after a cached prompt, or does more to them than "
            f"its LM head, so log-probabilities would be wrong here; {DECODER_ONLY}"
        )


def check_device(name: str, dtype: str = "float32", must_exist: bool = True) -> str:
    """The device of this name, for auto cuda if there is one, else cpu. UserError if it or the dtype is not there."""
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    device = name if name != "auto" else "cuda" if here["cuda"] else "cpu"
    if must_exist and not here[device]:
        raise UserError(f"--device {name}: this machine has none; take --device cpu")
    try:
        if here[device]:
            torch.ones(1, device=device, dtype=getattr(torch, dtype)).square()
            if (device, dtype) == ("cuda", "bfloat16") and not torch.cuda.is_bf16_supported(
                including_emulation=False
            ):
                raise TypeError("only emulated")
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"--dtype {dtype}: the device {device} does not compute in it; take --dtype float32"
        ) from error
    return device


def check_flags(args: argparse.Namespace, task: Task) -> None:
    """Raise UserError for flags that do not go together."""
    if args.pool < args.m:
        raise UserError(
            f"--pool {args.pool}: must hold at least one rollout of --m {args.m} answers"
        )
    if (args.subset or 1) >= args.group_size:
        raise UserError(
            f"--subset {args.subset}: must be below --group-size {args.group_size}, or no signal is left"
        )
    if "goal_conditioned" in args.method and not task.objectives:
        raise UserError(
            f"--method goal_conditioned: task {args.task} names no objectives to be weighed; leave it out"
        )
    for method in ("max_at_k", "group_vpo"):
        if method in args.method and not args.subset and args.group_size < 3:
            raise UserError(
                f"--group-size {args.group_size}: {method} forms sets of two or more, smaller than the "
                "group; take 3 or more, or leave it out of --method"
            )
    if (args.data or args.test_data) and "data" not in task.flags:
        raise UserError(
            f"--data {args.data or args.test_data}: task {args.task} takes no file, unlike code"
        )
    if args.lora_rank:
        check_peft(f"--lora-rank {args.lora_rank}")
    if (Path(args.model) / ADAPTER).exists():
        raise UserError(
            f"--model {args.model}: an adapter, not a model; merge it first (merge_and_unload of peft)"
        )


def check_task(task: Task, m: int) -> None:
    """Ask a task for all that a run will need, before minutes are spent. UserError for what is not as it should be."""
    for problem in (
        problem for split in ("train", "test") for problem in take_problems(task, split, 2)
    ):
        try:
            json.dumps(problem.data)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"task {task.name}: data of {problem.id!r} is not plain JSON ({error})"
            ) from error
        if not isinstance(prompt := task.prompt(problem, m), str):
            raise UserError(
                f"task {task.name}: prompt of problem {problem.id!r} must be text, not {prompt!r:.80}"
            )
        reward_vectors(task, [(problem, "")])
    if len(task.tag.split()) != 1:
        raise UserError(f"task {task.name}: the tag {task.tag!r} must be one word")


class PromptLayer(DynamicLayer):
    """A KV cache layer that holds prompts and nothing after them, so that it can be used again: made empty it takes
    them in, with their keys and values (B, heads, L, head size) it puts them before those of the rollouts."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, keys is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            return torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


def cache_of(model: Model, layers: list[DynamicLayer]) -> DynamicCache:
    """A cache with these layers. Full ones serve sliding-window attention too: the model's mask cuts the window out."""
    cache = DynamicCache(config=model.config)
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise UserError(
            f"--model {model.config.name_or_path}: {type(model).__name__} keeps no KV cache, but other "
            f"states; {DECODER_ONLY}"
        )
    cache.layers = layers or [PromptLayer() for _ in cache.layers]
    return cache


def hidden_states(
    model: Model, ids: Tensor, cache: DynamicCache, at: Tensor, mask: Tensor | None
) -> Tensor:
    """Last hidden states (B, T, H) of ids (B, T), the first at position `at` (B), after what the cache holds; mask (B,
    all in the cache + T) hides left padding; None, where there is none, is faster."""
    positions = (at[:, None] + torch.arange(ids.shape[1], device=ids.device)).clamp_min(0)
    return model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state


def head(model: Model, hidden: Tensor) -> Tensor:
    """Logits (..., V) in float32 of hidden states (..., H)."""
    logits, cap = model.get_output_embeddings()(hidden).float(), soft_cap(model)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def soft_cap(model: Model) -> float | None:
    """The bound that Gemma's logits approach by a tanh; None for most models."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def prefill(model: Model, ids: Tensor, lengths: list[int]) -> tuple[DynamicCache, Tensor]:
    """The KV cache of prompts (P, L), padded on the left, and the hidden states (P, H) of their last tokens."""
    cache, L = cache_of(model, []), ids.shape[1]
    start = (
        torch.tensor(lengths, device=ids.device) - L
    )  # negative: padding shifts the first token to the right
    return cache, hidden_states(model, ids, cache, start, prompt_mask(lengths, L, ids.device))[
        :, -1
    ]


def prompt_mask(lengths: list[int], L: int, device: torch.device, new: int = 0) -> Tensor | None:
    """(B, L + new) bool: not the left padding of prompts of these lengths; None if there is no padding."""
    if min(lengths) == L:
        return None
    return torch.arange(L + new, device=device) >= L - torch.tensor(lengths, device=device)[:, None]


def check_peft(wanted_by: str) -> None:
    """Raise UserError if an adapter is wanted and peft is not installed."""
    if not importlib.util.find_spec("peft"):
        raise UserError(f"{wanted_by}: needs peft, which is not installed: pip install peft")


def adapter_off(model: Model | None) -> contextlib.ExitStack:
    """For `with`: the model as it was before training, if it trains an adapter; else nothing changes."""
    after = contextlib.ExitStack()
    if getattr(model, "_hf_peft_config_loaded", False):
        model.disable_adapters()
        after.callback(model.enable_adapters)
    return after


def recompute_layers(model: Model) -> None:
    """Gradient checkpointing that keeps the KV cache, which transformers' own drops. UserError if it cannot be."""

    def recomputed(forward, *args, **kwargs):
        if torch.is_grad_enabled():  # there is no dropout, so no random state to keep
            forward = functools.partial(
                checkpoint, forward, use_reentrant=False, preserve_rng_state=False
            )
        return forward(*args, **kwargs)

    if not (
        layers := [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
    ):
        raise UserError(
            f"{type(model).__name__}: cannot compute its layers again; take --no-gradient-checkpointing"
        )
    for layer in layers:
        layer.forward = functools.partial(recomputed, layer.forward)


def eos_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every token id that ends a rollout: the model's generation config may name several, the tokenizer one more."""
    ids = model.generation_config.eos_token_id
    return sorted({*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None})


def save_policy(model: Model, tokenizer: Tokenizer, folder: str | Path) -> None:
    """An ordinary Hugging Face checkpoint: AutoModelForCausalLM and AutoTokenizer load it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
