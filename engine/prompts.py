"""Prompts of language models: chat templates, what a model can take, and tokens that are no text."""

import contextlib
import itertools
import math
import re

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.answers import THOUGHTS
from rewards import UserError

QUESTION = "Red or blue?"
ANSWER = "Perhaps grey."
CHAT = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": QUESTION},
]
MARK = re.compile(r"<\S+>|\[\S+\]")


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A user's text in the model's chat template. Raises UserError if it cannot be used."""
    try:
        messages = [{"role": "user", "content": text}]
        chat = render(tokenizer, messages, add_generation_prompt=True)
        if text.strip() not in chat:
            raise ValueError("it leaves out what the user says")
    except Exception as error:  # Jinja has many kinds
        problem = f"its chat template cannot be used ({error!s:.200})"
        raise UserError(f"--model {tokenizer.name_or_path}: {problem}") from error
    return chat


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **options) -> str:
    """A conversation without tools and thoughts in the chat template."""
    return tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False, **options)


def conversations(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Two made-up conversations after their first question: one is answered, one goes on."""
    rendered = []
    if tokenizer.chat_template is not None:
        for turns in (CHAT[:2], CHAT):
            with contextlib.suppress(Exception):  # `chat_prompt` tells of it
                rendered.append(render(tokenizer, turns).split(QUESTION, 1)[-1])
    return rendered


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a rollout, first the one that a taught rollout ends with.

    They are the mark with which the chat template ends an answer, and those that the tokenizer and
    the generation config name.
    """
    ids = [tokenizer.eos_token_id]
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    for chat in conversations(tokenizer):
        _, answer, rest = chat.rpartition(ANSWER)
        marks = [token for token in vocabulary if answer and rest.lstrip().startswith(token)]
        marks = [token for token in marks if vocabulary[token] in added or MARK.fullmatch(token)]
        if marks:
            ids.insert(0, vocabulary[max(marks, key=len)])
            break
    named = model.generation_config.eos_token_id
    ids += named if isinstance(named, list) else [named]
    rows = model.get_input_embeddings().weight.shape[0]
    return [i for i in dict.fromkeys(ids) if isinstance(i, int) and 0 <= i < rows]


def silent_ids(tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> torch.Tensor:
    """Token ids that stand for no text: ends, padding, and what the chat template writes around texts.

    Other special tokens may be marks of thoughts, of calls or of a task.
    """
    silent = {*eos_ids, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    marks = " ".join(itertools.chain(*THOUGHTS))
    frame = "".join(conversations(tokenizer))
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token.content in frame and token.content not in marks:
            silent.add(token_id)
    return torch.tensor(sorted(silent - {None}))


def check_context(model: PreTrainedModel, L: int, max_new_tokens: int) -> None:
    """Raise UserError if a prompt of L tokens and new ones are more than a model takes."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_factor" in rope:  # a longer text has other factors; the keys in the cache keep theirs
        original = rope.get("original_max_position_embeddings")
        context = original or config.original_max_position_embeddings
    needed = L + max_new_tokens
    if needed > context:
        tokens = f"a prompt of {L} tokens and {max_new_tokens} new ones need a context of {needed}"
        advice = "shorten Task.prompt, lower --max-new-tokens or --m, or take another --model"
        raise UserError(f"{tokens}, the model's is {context}; {advice}")


def check_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    """Raise UserError if a text holds a token that has no row in the embeddings."""
    rows = model.get_input_embeddings().weight.shape[0]
    if ids and max(ids) >= rows:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        problem = f"a text holds the token {token!r}, which is none of the model's {rows}"
        raise UserError(f"--model {tokenizer.name_or_path}: {problem}; write it in another way")
