"""MuSiQue (arXiv 2108.00573): questions that need two to four paragraphs; the evidence of every hop, and the answer."""

import itertools
import random
import re

from torch import Tensor

from rewards import Problem, UserError
from tasks.files import FileTask, field, normalized, tagged, word_f1

HOPS = 4


class Musique(FileTask):
    """hop_i is 1 if the paragraph of step i is among the first four that are cited, or there is no such step; answer_f1
    is the best word F1 over answer and aliases; all 0 without an answer. The scalar weighs the answer thrice."""

    name, tag = "musique", "response"
    objectives = (*(f"hop_{i + 1}" for i in range(HOPS)), "answer_f1")
    eval_problems = 300
    source = "musique_ans_v1.0_train.jsonl, --test-data ..._dev.jsonl, of github.com/StonyBrookNLP/musique, CC BY 4.0"

    def read(self, record: dict) -> dict:
        if record.get("answerable") is False:
            raise UserError("field answerable: is false; take the files of musique_ans")
        paragraphs = [
            [
                field(p, "idx", int, "a number"),
                field(p, "title", str, "text"),
                field(p, "paragraph_text", str, "text"),
            ]
            for p in field(record, "paragraphs", list, "a list")
        ]
        steps = field(record, "question_decomposition", list, "a list")
        support = [
            field(step, "paragraph_support_idx", int, "the idx of a paragraph") for step in steps
        ]
        if not set(support) <= {idx for idx, *_ in paragraphs} or len(support) > HOPS:
            raise UserError(
                f"field question_decomposition: {support} are not up to {HOPS} paragraphs of the record"
            )
        aliases = record.get("answer_aliases") or []
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise UserError(f"field answer_aliases: must be a list of texts, not {aliases!r:.60}")
        texts = {name: field(record, name, str, "text") for name in ("id", "question", "answer")}
        answers = [texts["answer"], *filter(normalized, aliases)]
        return texts | {"paragraphs": paragraphs, "support": support, "answers": answers}

    def order(self, split: str, part: list[dict], rng: random.Random) -> list[dict]:
        """Of what is held out, questions of two, three and four hops take turns, so that 300 hold 100 of each."""
        part = super().order(split, part, rng)
        if split == "train":
            return part
        by_hops = [[p for p in part if len(p["support"]) == hops] for hops in range(1, HOPS + 1)]
        return [p for turn in itertools.zip_longest(*by_hops) for p in turn if p]

    def prompt(self, problem: Problem, m: int) -> str:
        paragraphs = "\n".join(
            f"[{idx}] {title}: {text}" for idx, title, text in problem.data["paragraphs"]
        )
        form = "\n".join(
            f"<response_{i}><support>paragraph numbers, by commas</support><answer>short answer</answer>"
            f"</response_{i}>"
            for i in range(1, m + 1)
        )
        what = "your response" if m == 1 else f"{m} different responses"
        return (
            f"{paragraphs}\n\nQuestion: {problem.data['question']}\n\nThink about which paragraphs are needed, one "
            f"for each step; cite at most {HOPS}. Then write {what} in exactly this form:\n{form}"
        )

    def reward(self, problem: Problem, answer: str) -> list[float]:
        if not (text := tagged(answer, "answer")):
            return [0.0] * (HOPS + 1)
        # No str.isdigit, which takes superscripts for digits; brackets and words around the numbers do not matter.
        numbers = re.findall(r"(?<![0-9])[0-9]{1,6}(?![0-9])", tagged(answer, "support"))
        cited, steps = list(dict.fromkeys(map(int, numbers)))[:HOPS], problem.data["support"]
        hops = [float(i >= len(steps) or steps[i] in cited) for i in range(HOPS)]
        return [*hops, max(word_f1(text, gold) for gold in problem.data["answers"])]

    def scalar(self, rewards: Tensor) -> Tensor:
        return (rewards[..., :HOPS].sum(-1) + 3 * rewards[..., HOPS]) / (HOPS + 3)
