"""The tiny model: a GPT-2 of 0.1 to 0.2 million weights whose whole language is the words of one task."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.config import MAX_ANSWERS
from rewards import Task, UserError

PAD = "<pad>"
EOS = "<eos>"


def tiny_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token per word: special tokens, numbers of answers, tags, then the task's own words.

    Raises:
        UserError: the task has no words, or one of them is not a single word.
    """
    if not task.words:
        raise UserError(
            f"--model tiny: task {task.name} has no words for it here; take a language model, "
            "--model FOLDER or a Hub id, or give Task.words"
        )
    words = [PAD, EOS]
    words += [f"answers={m}" for m in range(1, MAX_ANSWERS + 1)]
    for i in range(1, MAX_ANSWERS + 1):
        words += [f"<{task.tag}_{i}>", f"</{task.tag}_{i}>"]
    words += task.words
    for word in words:
        if not isinstance(word, str) or len(word.split()) != 1:
            raise UserError(
                f"--model tiny: {word!r} in the words or the tag of task {task.name}: must be one word"
            )
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    """The architecture, without dropout.

    Positions are learned, because the words of a prompt stand at fixed places. Weights start with size
    1/sqrt(width): with the usual 0.02 the attention of so narrow a model stays uniform for hundreds of
    steps.
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


def is_tiny(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer is the tiny model's."""
    word = f"answers={MAX_ANSWERS}"
    token = tokenizer.convert_tokens_to_ids(word)
    return token is not None and tokenizer.convert_ids_to_tokens(token) == word
