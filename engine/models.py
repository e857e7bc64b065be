"""The tiny model, Hugging Face checkpoints and LoRA adapters: making, reading, adding, writing."""

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import model_info, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.errors import did_you_mean, is_out_of_memory
from engine.files import listed
from engine.prompts import eos_ids
from rewards import MAX_ANSWERS, Task, UserError

ADAPTER_FILE = "adapter_config.json"  # tells a folder of peft from an ordinary checkpoint
FILE_KINDS = (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt")  # of a checkpoint
OTHER_MODEL = "choose a decoder-only model such as Qwen, Llama, SmolLM, Gemma or GPT-2"
TWO_ROPES = ("gemma3_text", "gemma3n_text", "olmo3")  # one for layers with a window
GPT_NEOX_ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
PAD = "<pad>"
EOS = "<eos>"


def tiny_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token per word: special tokens, numbers of answers, tags, then the task's own words."""
    if not task.words:
        advice = "take --model FOLDER or a Hub id"
        raise UserError(f"--model tiny: task {task.name} has no words for it; {advice}")
    words = [PAD, EOS]
    words += [f"answers={m}" for m in range(1, MAX_ANSWERS + 1)]
    for i in range(1, MAX_ANSWERS + 1):
        words += [f"<{task.tag}_{i}>", f"</{task.tag}_{i}>"]
    words += task.words
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    """A GPT-2 of 0.1 to 0.2 million weights, without dropout.

    Weights start with size 1/sqrt(width): with the usual 0.02 the attention of so narrow a model
    stays uniform for hundreds of steps.
    """
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_inner=192,
        n_layer=3,
        n_head=4,
        n_positions=512,
        activation_function="gelu_pytorch_tanh",  # the fused form of GPT-2's own
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def load_hugging_face(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode and the tokenizer of a folder or a Hub id, on the CPU.

    An adapter's folder brings its start model along.
    """
    config, tokenizer = load_config_and_tokenizer(name)
    with _explained(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            config.name_or_path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_hub_options(name),
        )
        if is_adapter(name):
            model.load_adapter(name, is_trainable=True)
            for adapter in model.peft_config.values():
                adapter.base_model_name_or_path = config.name_or_path  # peft reads it to save
    mismatched = [entry[0] for entry in report["mismatched_keys"]]
    wrong = sorted([*report["missing_keys"], *mismatched])
    if wrong:
        lacking = f"its files lack {wrong[0]} and {len(wrong) - 1} more, or in another size"
        advice = _remedy(name)
        if config.architectures and type(model).__name__ not in config.architectures:
            advice = f"they are of a {config.architectures[0]}; {OTHER_MODEL}"
        raise UserError(f"--model {name}: incomplete, {lacking}; {advice}")
    return model.eval(), tokenizer


def load_config_and_tokenizer(name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The small files of a checkpoint. Raises UserError as `load_hugging_face` does."""
    if (Path(name) / "start").is_dir() and (Path(name) / "config.json").exists():
        advice = f"name a checkpoint in it, such as {name}/vpo/checkpoint-000200"
        raise UserError(f"--model {name}: a run folder; {advice}")
    if _belongs_to_run(name):
        _check_files(name)
    source = str(Path(name).parent.parent / "start") if is_adapter(name) else name
    with _explained(name):
        config = AutoConfig.from_pretrained(source, **_hub_options(name))
    check_kind(config, name)
    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(name, config=config, **_hub_options(name))
    return config, tokenizer


def check_kind(config: PreTrainedConfig, name: str) -> None:
    """Raise UserError for a model that is not decoder-only. Its attention becomes one that runs here."""
    is_masked = "MaskedLM" in str(config.architectures)
    has_encoder = getattr(config, "is_encoder_decoder", False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or has_encoder or is_masked:
        kind = (config.architectures or [config.model_type])[0]
        raise UserError(f"--model {name}: is a {kind}; {OTHER_MODEL}")
    attention = config._attn_implementation  # of its config.json
    if attention not in (None, "sdpa", "eager"):
        change = f"attention by sdpa, not by {attention} of its config.json"
        print(f"--model {name}: {change}", file=sys.stderr)
        config._attn_implementation = None  # sdpa, or eager where a model has no other


def is_adapter(name: str) -> bool:
    return (Path(name) / ADAPTER_FILE).exists()


def _belongs_to_run(name: str) -> bool:
    """Whether a folder is the start model or a checkpoint of a run."""
    folder = Path(name)
    is_checkpoint = folder.exists() and (folder.parent.parent / "config.json").exists()
    return is_checkpoint or folder.name == "start"


@functools.cache
def _hub_options(name: str) -> dict[str, bool]:
    """Options of `from_pretrained`: no request to the Hub for a folder, or for a cached model offline.

    Without a connection the requests would take minutes. A model's own code is never run.
    """
    is_local = Path(name).exists()
    if not is_local:
        try:
            model_info(name, timeout=10)
        except Exception:
            if not isinstance(try_to_load_from_cache(name, "config.json"), str):
                raise
            is_local = True
    return {"local_files_only": is_local, "trust_remote_code": False}


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers, safetensors, tokenizers, peft and the Hub raise into one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own, which is not run here"
            advice = "choose a model whose code is in transformers"
        elif _is_gguf(name):
            reason = "GGUF files hold rounded weights, for llama.cpp"
            advice = "take the model that they were made from, with config.json and safetensors"
        elif Path(name).is_file():
            reason = "a file"
            advice = "name the folder that holds config.json and the weights"
        elif not Path(name).exists():
            beside = [path.name for path in listed(Path(name).parent)]
            hint = did_you_mean(Path(name).name, beside)
            if Path(name).is_absolute() or name.startswith((".", "~")):
                problem = f"no such folder, and no id of the Hub{hint}"
                raise UserError(f"--model {name}: {problem}") from error
            advice = "no such folder or Hub model, no connection, or it is gated: `hf auth login`"
            advice += hint
        else:
            _check_files(name)
            version = transformers.__version__
            advice = f"install what it lacks, or try another transformers than {version}"
            if isinstance(error, OSError) and error.errno is None:  # transformers misses a file
                advice = _remedy(name)
        raise UserError(f"--model {name}: cannot be loaded ({reason}); {advice}") from error


def _check_files(name: str) -> None:
    """Raise UserError for a file of a checkpoint that is missing or damaged, or a folder. The weights are not read."""
    folder = Path(name)
    kind = ADAPTER_FILE if is_adapter(name) else "config.json"
    paths = {folder / kind}
    if _belongs_to_run(name):  # it has the files of the run's start
        start = folder.parent.parent / "start"
        paths |= {folder / path.name for path in listed(start, "tokenizer*.json")}
    paths |= {path for path in listed(folder) if path.suffix in FILE_KINDS}
    for path in sorted(paths):
        try:
            if path.is_dir():
                raise ValueError("a folder, not a file")
            if path.suffix == ".json":
                json.loads(path.read_text("utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt"):  # which looks at its size
                    pass
        except (FileNotFoundError, NotADirectoryError, ValueError, SafetensorError) as error:
            problem = f"cannot be loaded ({path.name} is missing or damaged: {error})"
            raise UserError(f"--model {name}: {problem}; {_remedy(name)}") from error


def _is_gguf(name: str) -> bool:
    """Whether a model is there as GGUF files alone."""
    files = listed(Path(name)) if Path(name).is_dir() else [Path(name)]
    is_whole = any(file.suffix in (".safetensors", ".bin") for file in files)
    return not is_whole and any("gguf" in file.name.lower() for file in files)


def _remedy(name: str) -> str:
    """Advice about a checkpoint whose files are damaged."""
    if Path(name).name == "start":
        return "restore it from a copy, or train with another --out"
    if _belongs_to_run(name):
        return f"delete the folder {name}, and --resume does without it"
    return "fetch or save it again"


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    temperature: float = 1.0,
) -> None:
    """An ordinary Hugging Face checkpoint: AutoModelForCausalLM and AutoTokenizer load it.

    Of the base model's generation settings only the special tokens are kept: `generate` samples as
    the training did, at this temperature, without top-p, top-k or penalties.
    """
    model.generation_config = GenerationConfig(
        bos_token_id=model.generation_config.bos_token_id,
        eos_token_id=eos_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # other engines look for no file
    _change(Path(folder, "config.json"), _name_rope)
    _change(Path(folder, "tokenizer_config.json"), _name_tokenizer)


def _name_rope(config: dict) -> None:
    """Add to a config.json what transformers 4, and engines that follow it, read for rope_parameters."""
    for part in (config, config.get("text_config") or {}):
        kind = part.get("model_type")
        rope = part.get("rope_parameters") or {}
        if kind in TWO_ROPES:
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        if "rope_theta" not in rope:  # as of models that transformers 4 has not got
            continue
        names = GPT_NEOX_ROPE if kind == "gpt_neox" else {name: name for name in GPT_NEOX_ROPE}
        part |= {names[name]: rope[name] for name in rope.keys() & names}
        scaling = {name: value for name, value in rope.items() if name not in names}
        if kind == "phi3":  # it takes three fields alone
            scaling["type"] = scaling.pop("rope_type")
            scaling.pop("original_max_position_embeddings", None)
        part["rope_scaling"] = None if rope["rope_type"] == "default" else scaling


def _name_tokenizer(config: dict) -> None:
    """Change what transformers 4 refuses in a tokenizer_config.json."""
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")


def _change(path: Path, change: Callable[[dict], None]) -> None:
    """Change a file of JSON, if there is one: an adapter has no config.json."""
    if path.exists():
        record = json.loads(path.read_text("utf-8"))
        change(record)
        path.write_text(json.dumps(record, indent=2), "utf-8")


def add_adapter(model: PreTrainedModel, rank: int) -> None:
    """Freeze the weights and add a LoRA adapter (arXiv 2106.09685) to all linear layers but the LM head."""
    model.add_adapter(adapter_config(model, rank))


@contextlib.contextmanager
def merged_adapter(model: PreTrainedModel, rank: int) -> Iterator[None]:
    """A context that trains a LoRA adapter in place of the weights, then adds it to them; rank 0: none."""
    if not rank:
        yield
        return
    from peft import get_peft_model  # optional

    adapted = get_peft_model(model, adapter_config(model, rank), autocast_adapter_dtype=False)
    yield
    adapted.merge_and_unload()


def adapter_config(model: PreTrainedModel, rank: int) -> Any:
    """The LoraConfig from which peft makes an adapter."""
    from peft import LoraConfig  # optional

    config = LoraConfig("CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    if not has_plain_cache(model):
        config.exclude_modules = ["out_proj", "conv1d"]  # kernels of Mamba read the weights alone
    return config


def name_start(checkpoint: Path, start: str) -> None:
    """Let an adapter's folder name its start model, a folder or a Hub id, as peft does."""
    _change(checkpoint / ADAPTER_FILE, lambda record: record.update(base_model_name_or_path=start))


def recompute_layers(model: PreTrainedModel) -> None:
    """Switch on gradient checkpointing that keeps the KV cache, which transformers' own drops."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        problem = f"{type(model).__name__}: cannot compute its layers again"
        raise UserError(f"{problem}; take --no-gradient-checkpointing")
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward, *args, **kwargs):
    """Call a layer's forward pass, and once more in the backward pass if there will be one."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Nothing in the layer is random: the model is in eval mode, without dropout.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def has_plain_cache(model: PreTrainedModel) -> bool:
    """Whether a model's cache is keys and values alone, without states that go on from token to token."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
