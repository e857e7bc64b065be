"""Models as others save them: chat templates, tokenizers, checkpoints, and files that do not fit."""

import copy
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    FENCE,
    SHAPE,
    TASK,
    byte_model,
    change_json,
    draw,
    first_stop,
    load_random_model,
    prompts_of,
    save_random_model,
    train_hybrid,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rollout
from engine.answers import write_answers
from engine.models import save_model
from engine.training.start import load_start
from rewards import Problem, Task, UserError, parse_answers
from rollout import Policy, SamplingOptions, StopRule, load_policy

ZAMBA = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16}
ZAMBA |= {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
ZAMBA |= {"hybrid_layer_ids": [2], "num_mem_blocks": 1, "chunk_size": 16, "adapter_rank": 4}
THINKING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@byte_model
@pytest.mark.parametrize(
    ("end", "opening"),
    [
        ("", ""),
        ("<think>\n\n</think>\n\n", ""),  # Qwen3 with thinking switched off
        ("<think>\n", "<think>"),  # DeepSeek-R1, Qwen3 that always thinks
        ("[THINK]", "[THINK]"),
        ("<|channel>thought\n<channel|>", ""),
    ],
)
def test_a_prompt_that_opens_a_thought(policy, end, opening, monkeypatch):
    """Guards against drafts taken for answers, and a rollout that waits for the end of no thought."""
    monkeypatch.setattr(policy.tokenizer, "chat_template", f"{THINKING}{{{{ {end!r} }}}}")
    prompt = rollout.build_prompt(policy, FENCE, FENCE.problems("train", 1)[0], 2)
    assert prompt.endswith(f"<|assistant|>{end}{'' if opening else '1.'}")
    rule = StopRule(policy, FENCE, 2)
    options = SamplingOptions(2, torch.Generator(), stop=rule)
    (text,) = rollout.sample(policy, [prompt], 1, options).texts
    assert text.startswith(opening)
    answers = policy.tokenizer(" red\n2. blue\n")["input_ids"]
    assert first_stop(rule, answers) == (None if opening else len(answers))
    if opening:  # a warm-up closes it
        written = write_answers(FENCE, ["red", "blue"], "</think>")
        assert parse_answers("<think>" + written, FENCE, 2) == ["red", "blue"]
    draft = "Okay. First ideas:\n1. red red\n2. grey grey\n3. blue\nBut maybe"
    for task in (Task(), FENCE):
        answers = parse_answers(opening + draft, task, 3, finished=False)
        assert len(answers) == (0 if opening else 3)


def policy_with(folder: Path, template: str | None, marks: list[str], **options) -> Policy:
    """A random Llama whose tokenizer has a chat template and some special tokens."""
    policy = load_policy(save_random_model(folder, "llama", vocab_size=440, **options), TASK)
    policy.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    policy.tokenizer.chat_template = template
    return Policy(policy.model, policy.tokenizer)


MARKS = ["<think>", "</think>", "<answer_1>", "</answer_1>"]
FRAME = ["<|START_RESPONSE|>", "<|END_RESPONSE|>"]


@pytest.mark.parametrize(
    ("template", "text", "read"),
    [
        (None, "<think>1. no\n</think>1. red\n", "<think>1. no\n</think>1. red\n"),
        (None, "<answer_1> red </answer_1><eos>", "<answer_1> red </answer_1>"),
        # As Command A closes a reply before its EOS.
        ("<think>".join(FRAME), "<think>a</think>red<|END_RESPONSE|>", "<think>a</think>red"),
        ("<think>".join(FRAME), "<answer_1>", "<answer_1>"),
    ],
)
def test_special_tokens_that_are_marks_stay_in_the_text(template, text, read, tmp_path):
    """Guards against thoughts that look like answers without their marks. What a template writes around is no text."""
    policy = policy_with(tmp_path, template and f"{template}{{{{ x }}}}", MARKS + FRAME)
    assert policy.decode(torch.tensor(policy.tokenizer(text)["input_ids"])) == read


ONE_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HEADERS = "<|{{ m.role }}|>\n{{ m.content }}"
LAST = "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
TOOLS = "{% if tools %}Call as <tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TOOLS + "{% for m in messages %}" + ONE_TURN + "{% endfor %}", "<|im_end|>"),
        ("Or <tool_call>. {% for m in messages %}" + ONE_TURN + "{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}" + HEADERS + "{% endfor %}", "<|user|>"),  # as of GLM-4
        ("{% for m in messages %}" + HEADERS + LAST + "{% endfor %}", "<|return|>"),  # gpt-oss
        ("{% for m in messages %}" + HEADERS + "<eos>{% endfor %}", "<eos>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "<eos>"),
    ],
)
def test_a_turn_ends_as_the_chat_template_ends_it(template, end, tmp_path):
    """Guards against a next turn that the model makes up and that is read, and against a call that loses its marks."""
    marks = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>"]
    policy = policy_with(tmp_path, template, [*marks, "<tool_call>", "</tool_call>"])
    assert policy.tokenizer.convert_ids_to_tokens(policy.eos_ids[0]) == end
    others = policy.tokenizer.convert_ids_to_tokens(policy.eos_ids[1:])
    assert set(others) <= {"<eos>", "<other_eos>"}
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert policy.decode(torch.tensor(policy.tokenizer(text + end)["input_ids"])) == text
    taught = rollout.rollouts_of_texts(policy, ["Paint!"], ["red"])
    assert taught.tokens[0, -1] == policy.eos_ids[0]


@byte_model
def test_a_tokenizer_that_appends_an_end(policy, monkeypatch):
    """Guards against rollouts that begin after the end of their prompt."""
    prompt = "Paint!"
    ids = policy.tokenizer(prompt)["input_ids"]
    original = type(policy.tokenizer).__call__

    def call(tokenizer, text, **options):
        encoded = original(tokenizer, text, **options)
        if options.get("add_special_tokens", True):
            encoded["input_ids"].append(0)
        return encoded

    monkeypatch.setattr(type(policy.tokenizer), "__call__", call)
    assert rollout.encode(policy, prompt, special=True) == ids
    assert rollout.encode(policy, "", special=True) == [0]


HARMONY = "<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant"


def test_a_chat_template_is_used_where_there_is_one(monkeypatch):
    """A list is begun in the prompt: small models go on with it, and write an essay otherwise. But not in an open
    header, as "<|start|>assistant1.": gpt-oss goes on with a channel there."""
    plain, chat = load_random_model("llama"), load_random_model("qwen2")
    problem = TASK.problems("train", 1)[0]
    prompt = rollout.build_prompt(plain, TASK, problem, 2)
    assert prompt.startswith("Find") and prompt.endswith("\n")
    prompt = rollout.build_prompt(chat, TASK, problem, 2)
    assert prompt.startswith("<|user|>Find") and prompt.endswith("<|assistant|><|nothink|>")
    for policy in (plain, chat):
        assert rollout.build_prompt(policy, FENCE, Problem("fence", None), 2).endswith("1.")
    monkeypatch.setattr(chat.tokenizer, "chat_template", HARMONY)
    prompt = rollout.build_prompt(chat, FENCE, Problem("fence", None), 2)
    assert prompt.endswith("<|start|>assistant")


def test_a_chat_template_that_cannot_be_used_is_named(monkeypatch):
    """Guards against a model that trains without having seen a problem."""
    policy = load_random_model("llama")
    for template, why in (("{{ raise_exception('not so') }}", "not so"), ("hi", "leaves out what")):
        monkeypatch.setattr(policy.tokenizer, "chat_template", template)
        with pytest.raises(UserError, match=f"its chat template cannot be used.*{why}"):
            rollout.build_prompt(policy, TASK, TASK.problems("train", 1)[0], 2)


@pytest.mark.parametrize("policy", ["tiny", "qwen2", "phi"], indirect=True)
def test_checkpoints_are_ordinary_ones(policy, tmp_path):
    """A saved policy loads in plain transformers, weights and words unchanged."""
    save_model(policy.model, policy.tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    weights = loaded.state_dict()
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    text = prompts_of(policy, 2)[0]
    assert words(text)["input_ids"] == policy.tokenizer(text)["input_ids"]


LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}


@pytest.mark.parametrize(
    ("configuration", "fields"),
    [
        ("LlamaConfig", {"rope_theta": 1e6, "rope_scaling": None}),
        ("Qwen2Config", {"rope_theta": 1e6, "rope_scaling": LINEAR}),
        ("Gemma3TextConfig", {"rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
        ("Phi3Config", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
        ("StableLmConfig", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        ("GPTNeoXConfig", {"rotary_emb_base": 1e6, "rotary_pct": 0.5}),
    ],
)
def test_a_checkpoint_can_be_read_by_transformers_4(configuration, fields, monkeypatch):
    """It takes 10000 where it finds no rope_theta, and refuses a TokenizersBackend and a list of extra tokens. With
    4.57.6 the log-probabilities of 29 small models were equal to the last bit. Engines look for the chat template in
    tokenizer_config.json, and `generate` ends with the mark that it writes, as the training did."""
    shape = SHAPE | copy.deepcopy(fields)
    monkeypatch.setitem(ARCHITECTURES, "other", (configuration, shape))
    policy = load_policy(save_random_model("m", "other"), TASK)
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    chat = "{% for m in messages %}{{ m.content }}<call>{% endfor %}"
    policy.tokenizer.chat_template = chat
    save_model(policy.model, policy.tokenizer, "saved")
    config = json.loads(Path("saved/config.json").read_text("utf-8"))
    assert {name: config[name] for name in fields} == fields
    words = json.loads(Path("saved/tokenizer_config.json").read_text("utf-8"))
    assert words["tokenizer_class"] in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")
    assert words["additional_special_tokens"] == ["<call>"] and "extra_special_tokens" not in words
    assert words["chat_template"] == chat
    settings = json.loads(Path("saved/generation_config.json").read_text("utf-8"))
    again = load_policy("saved", TASK)
    assert settings["eos_token_id"] == again.eos_ids == [len(again.tokenizer) - 1, 0, 1]
    assert again.tokenizer.chat_template == chat
    assert again.model.config.rope_parameters == policy.model.config.rope_parameters
    assert again.tokenizer.extra_special_tokens == ["<call>"]


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "kernels-x/y"])
def test_attention_that_does_not_run_here_becomes_sdpa(attention, capsys):
    folder = save_random_model("m", "llama")
    change_json(Path(folder, "config.json"), attn_implementation=attention)
    assert load_start(folder, TASK).model.config._attn_implementation == "sdpa"
    assert f"m: attention by sdpa, not by {attention}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "configuration, shape, why",
    [
        ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "KV cache|other logits"),
        ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "KV cache|other logits"),
        ("Zamba2Config", SHAPE | ZAMBA, "change with a KV cache or padding"),
        ("RwkvConfig", {"hidden_size": 32, "num_hidden_layers": 2}, "with a KV cache or padding"),
        ("CohereConfig", SHAPE, "are no LM head's"),
    ],
)
def test_a_model_that_cannot_be_scored_here_is_refused(configuration, shape, why, monkeypatch):
    """No cache, another cache, or logits that are scaled behind the head: wrong log-probabilities."""
    monkeypatch.setitem(ARCHITECTURES, "other", (configuration, shape))
    with pytest.raises(UserError, match=why):
        load_start(save_random_model("m", "other"), TASK)


def test_a_model_with_more_than_keys_and_values_trains_the_plain_way():
    """Guards against a traceback in the first step, where states of Mamba are taken for a prompt's keys."""
    train_hybrid()


def test_a_token_without_a_row_is_refused_where_a_text_holds_it(tmp_path):
    """Gemma 3's tokenizer has one for images. Guards against an index beyond the embeddings, or a model that is refused."""
    folder = save_random_model(tmp_path, "gemma3", vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = {"additional_special_tokens": ["<image_soft_token>"], "pad_token": "[PAD]"}
    tokenizer.add_special_tokens(marks)
    tokenizer.save_pretrained(folder)
    policy = load_start(folder, TASK)
    assert len(policy.tokenizer) == 402
    draw(policy)  # padded with another token than [PAD], which has no row either
    with pytest.raises(UserError, match="the token '<image_soft_token>', which is none"):
        rollout.encode_prompts(policy, ["An <image_soft_token>?"], 1)


def test_a_long_rope_is_refused_beyond_its_first_length(tmp_path, monkeypatch):
    """There it turns all positions anew, but not the cached ones: 17 nats between sampling and update."""
    shape = SHAPE | {"original_max_position_embeddings": 128, "rope_scaling": LONG}
    monkeypatch.setitem(ARCHITECTURES, "phi3", ("Phi3Config", shape))
    policy = load_start(save_random_model(tmp_path, "phi3"), TASK)
    ids, _ = rollout.encode_prompts(policy, ["Paint!"], 16)
    rollout.encode_prompts(policy, ["Paint!"], 128 - ids.shape[1])
    with pytest.raises(UserError, match="a context of 129, the model's is 128"):
        rollout.encode_prompts(policy, ["Paint!"], 129 - ids.shape[1])


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_settings_that_do_not_fit_are_left_behind(file):
    """A base model's top-p would change what a policy answers elsewhere; with a padding of -1 it could not be saved."""
    folder = save_random_model("m", "llama")
    change_json(Path(folder, "generation_config.json"), top_p=0.8, temperature=0.7)
    change_json(Path(folder, file), pad_token_id=-1)
    policy = load_start(folder, TASK)
    save_model(policy.model, policy.tokenizer, "saved")
    saved = json.loads(Path("saved/generation_config.json").read_text("utf-8"))
    del saved["transformers_version"]
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert saved == plain | {"eos_token_id": [0, 1]}


NO_END = {"eos_token_id": None}
OWN_CLASSES = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}


@pytest.mark.parametrize(
    ("options", "file", "fields", "words"),
    [
        ({}, "config", {"model_type": "own", "auto_map": OWN_CLASSES}, "needs code of its own"),
        ({}, "config", {"vocab_size": 2000}, "incomplete, its files lack .* in another size"),
        ({}, "config", {"vocab_size": 9, "architectures": ["LlamaForX"]}, "are of a LlamaForX;"),
        ({}, "config", {"model_type": "t5", "architectures": None}, "is a t5; choose a decoder"),
        ({}, "config", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "MaskedLM;"),
        (NO_END, "tokenizer_config", {"eos_token": None}, "eos_token None has no"),
        (NO_END | {"vocab_size": 400}, "tokenizer_config", {"eos_token": "<|im_end|>"}, "no row"),
    ],
)
def test_a_model_whose_files_do_not_fit_is_named(options, file, fields, words, monkeypatch):
    """transformers would ask whether it may run code, or look words up beyond the embeddings."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    folder = save_random_model("m", "llama", **options)
    if "eos_token_id" in options:
        change_json(Path(folder, "generation_config.json"), eos_token_id=None)
    change_json(Path(folder, f"{file}.json"), **fields)
    with pytest.raises(UserError, match=words) as refused:
        load_start(folder, TASK)
    assert "trust_remote_code" not in str(refused.value)


def test_weights_that_are_missing_or_no_numbers_are_named():
    """transformers would fill what is missing with random weights."""
    folder = save_random_model("m", "llama")
    file = Path(folder, "model.safetensors")
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    for changed, words in (
        (weights, "incomplete, .* lack model.norm.weight"),
        (weights | {"model.norm.weight": norm * torch.nan}, "the logits are not finite"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(UserError, match=words):
            load_start(folder, TASK)
    file.rename("m/model.q4.GGUF")
    for name in (folder, "m/model.q4.GGUF", "someone/m-GGUF"):
        with pytest.raises(UserError, match="GGUF files .*; take the model that they were made"):
            load_start(name, TASK)


def test_a_tokenizer_that_makes_no_tokens_is_named():
    """transformers loads any tokenizer of a Qwen2 as one of bytes. One of words then knows none."""
    folder = save_random_model("m", "qwen2")
    backend = Tokenizer(WordLevel({"<eos>": 0, "red": 1}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    with pytest.raises(UserError, match="a Qwen2Tokenizer here, makes no tokens"):
        load_start(folder, TASK)


def test_a_model_that_is_too_large_to_try_is_not_blamed(tmp_path, monkeypatch):
    """Guards against the advice to choose another kind of model where memory is short."""
    short = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(rollout, "lm_logits", MagicMock(side_effect=short))
    with pytest.raises(torch.OutOfMemoryError):
        load_start(save_random_model(tmp_path, "llama"), TASK)
