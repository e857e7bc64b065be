"""Policies on disk and in memory: tiny models, Hugging Face checkpoints, LoRA adapters."""

import contextlib
import functools
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PreTrainedConfig

from engine.forward import (
    DECODER_ONLY,
    PromptLayer,
    attention_mask,
    cache_of,
    hidden_states,
    lm_logits,
    prefill,
)
from engine.tiny import tiny_config, tiny_tokenizer
from rewards import Task, UserError

Model = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase
ADAPTER_FILE = "adapter_config.json"  # tells a folder of peft from an ordinary checkpoint


def load_policy(
    name: str, task: Task, *, seed: int = 0, device: str = "cpu", dtype: str = "float32"
) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer: `tiny` with fresh weights, or a Hugging Face checkpoint.

    An adapter's folder brings its start model along.

    Raises:
        UserError: there is no such model, it cannot be read, or it could not be sampled or scored.
    """
    config, tokenizer = load_config_and_tokenizer(name, task)
    torch.manual_seed(seed)
    if name == "tiny":
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    else:
        model = _load_weights(name, config, dtype)
        check_model(model, name)
    check_eos(model, tokenizer, name)
    model = model.to(device)
    if is_adapter(name):
        check_peft(name)
        with _explained(name):
            model.load_adapter(name, is_trainable=True)
    return model, tokenizer


def empty_policy(name: str, task: Task, dtype: str) -> tuple[Model, Tokenizer]:
    """The same without reading weights, for the meta device."""
    config, tokenizer = load_config_and_tokenizer(name, task)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    check_eos(model, tokenizer, name)
    return model, tokenizer


def add_adapter(model: Model, rank: int) -> None:
    """Freeze the weights and add a LoRA adapter (arXiv 2106.09685) to all linear layers but the LM head.

    Raises:
        UserError: peft is not installed.
    """
    check_peft(f"--lora-rank {rank}")
    from peft import LoraConfig  # optional

    config = LoraConfig("CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model.add_adapter(config)


def save_policy(model: Model, tokenizer: Tokenizer, folder: str | Path) -> None:
    """An ordinary Hugging Face checkpoint: AutoModelForCausalLM and AutoTokenizer load it.

    Of the base model's generation settings only the special tokens are kept: the policy was trained
    at a plain temperature, without top-p, top-k or penalties.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def eos_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every token id that ends a rollout, those of the generation config and of the tokenizer."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def is_adapter(name: str) -> bool:
    return (Path(name) / ADAPTER_FILE).is_file()


def load_config_and_tokenizer(name: str, task: Task) -> tuple[PreTrainedConfig, Tokenizer]:
    """The small files of a policy. Raises UserError as load_policy does."""
    if name == "tiny":
        tokenizer = tiny_tokenizer(task)
        return tiny_config(tokenizer), tokenizer
    _check_name(name)
    config_source = Path(name).parent.parent / "start" if is_adapter(name) else name
    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(name, **_hub_options(name))
        config = AutoConfig.from_pretrained(config_source, **_hub_options(name))
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise UserError(
            f"--model {name}: its tokenizer has {len(tokenizer)} tokens, its embeddings have {rows} rows; "
            "take the tokenizer that the model was trained with, or resize the embeddings"
        )
    return config, tokenizer


def _check_name(name: str) -> None:
    """Raise UserError for a folder that holds no checkpoint."""
    file = Path(name) / "config.json"
    is_checkpoint = file.is_file() and '"flags"' not in file.read_text(errors="replace")
    if name.startswith(("/", "./", "../", "~")) and not Path(name).exists():
        raise UserError(f"--model {name}: there is no such folder")
    if Path(name).exists() and not is_checkpoint and not is_adapter(name):
        raise UserError(
            f"--model {name}: no Hugging Face checkpoint; of a run folder name a checkpoint in it, "
            f"as {name}/vpo/checkpoint-000200"
        )


def _load_weights(name: str, config: PreTrainedConfig, dtype: str) -> Model:
    with _explained(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            config.name_or_path,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_hub_options(name),
        )
    mismatched = [entry[0] for entry in report["mismatched_keys"]]
    wrong = sorted([*report["missing_keys"], *mismatched])
    if wrong:
        raise UserError(
            f"--model {name}: incomplete, its files lack {wrong[0]} and {len(wrong) - 1} more of its "
            "tensors, or have them in another size than config.json; fetch or save it again"
        )
    return model


@functools.cache
def _hub_options(name: str) -> dict[str, bool]:
    """Options of `from_pretrained` that ask no Hub for a folder, or for a cached model out of reach.

    Without a connection it would ask for minutes.
    """
    if Path(name).exists():
        return {"local_files_only": True}
    try:
        model_info(name, timeout=10)
    except Exception:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise
        return {"local_files_only": True}
    return {"local_files_only": False}


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers, safetensors, tokenizers, peft and the Hub raise into one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise UserError(
            f"--model {name}: cannot be loaded ({reason}); save it again; or, from the Hub: no connection "
            "(or HF_HUB_OFFLINE is set), no such model, or a gated one: accept its terms, then `hf auth login`"
        ) from error


def check_model(model: Model, name: str) -> None:
    """Raise UserError unless rollouts after cached prompts give the logits of a plain forward pass.

    An architecture may keep no cache, take positions from elsewhere, or do more to its logits than its
    LM head.
    """
    architecture = type(model).__name__
    try:
        with torch.no_grad():
            cached, plain = _cached_and_plain_logits(model)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"--model {name}: {architecture} takes no KV cache as others do ({error}); {DECODER_ONLY}"
        ) from error
    if not plain.isfinite().all():
        raise UserError(
            f"--model {name}: its logits are not finite, so its weights are not; fetch or save it again"
        )
    if not torch.allclose(cached, plain, atol=2e-2 * plain.abs().max().item()):
        raise UserError(
            f"--model {name}: {architecture} gives other logits after a cached prompt, or does more to "
            f"them than its LM head, so log-probabilities would be wrong here; {DECODER_ONLY}"
        )


def _cached_and_plain_logits(model: Model) -> tuple[Tensor, Tensor]:
    """Logits (1, 2, V) after a padded prompt, computed as in the update, and those of the plain pass."""
    length = [2]  # of the prompt; its first token is padding
    cache, _ = prefill(model, torch.tensor([[0, 5, 6]]), length)
    cache = cache_of([PromptLayer(layer.keys, layer.values) for layer in cache.layers])
    start = torch.tensor(length)
    mask = attention_mask(length, 3, start.device, 2)
    hidden = hidden_states(model, torch.tensor([[3, 4]]), cache, start, mask)
    plain = model(input_ids=torch.tensor([[5, 6, 3, 4]])).logits[:, -2:].float()
    return lm_logits(model, hidden), plain


def check_eos(model: Model, tokenizer: Tokenizer, name: str) -> None:
    if not eos_ids(model, tokenizer):
        raise UserError(
            f"--model {name}: its tokenizer has no EOS token, so no rollout would ever end; "
            "set eos_token in its tokenizer_config.json"
        )


def check_peft(wanted_by: str) -> None:
    """Raise UserError if an adapter is wanted and peft is not installed."""
    if not importlib.util.find_spec("peft"):
        raise UserError(f"{wanted_by}: needs peft, which is not installed: pip install peft")
