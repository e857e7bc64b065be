"""MuSiQue (arXiv 2108.00573): questions that need two to four paragraphs.

The reward vector judges the evidence of every hop, and the answer.
"""

import itertools
import random
import re

from torch import Tensor

from rewards import Problem, UserError
from tasks.files import FileTask, field, tagged, text_field, texts_field, word_f1

HOPS = 4  # of the longest questions; also how many citations count


class Musique(FileTask):
    """Questions over paragraphs, with d = 5 components; all are 0 without an answer.

    hop_i is 1 if the paragraph of step i is among the first four that are cited, or if there is no
    such step. answer_f1 is the best word F1 over the answer and its aliases. In the scalar the
    answer weighs three times as much as a hop.
    """

    name = "musique"
    tag = "response"
    objectives = ("hop_1", "hop_2", "hop_3", "hop_4", "answer_f1")
    defaults = {"eval_problems": 300}
    source = "musique_ans_v1.0_train.jsonl, --test-data ..._dev.jsonl, of github.com/StonyBrookNLP/musique, CC BY 4.0"

    def read(self, record: dict) -> dict:
        if record.get("answerable") is False:
            raise UserError("field answerable: is false; take the files of musique_ans")
        paragraphs = {}
        for paragraph in field(record, "paragraphs", list, "a list"):
            index = field(paragraph, "idx", int, "a number")
            if index in paragraphs:
                raise UserError(f"field paragraphs: two of them have the idx {index}")
            title = text_field(paragraph, "title")
            text = text_field(paragraph, "paragraph_text")
            paragraphs[index] = f"[{index}] {title}: {text}"

        support = []
        for step in field(record, "question_decomposition", list, "a list"):
            support.append(field(step, "paragraph_support_idx", int, "a number"))
        if not paragraphs.keys() >= set(support) or len(support) > HOPS:
            known = f"the idx of at most {HOPS} of the paragraphs"
            raise UserError(f"field question_decomposition: must be {known}, not {support}")

        aliases = texts_field(record, "answer_aliases") if record.get("answer_aliases") else []
        answer = text_field(record, "answer")
        return {
            "id": text_field(record, "id"),
            "question": text_field(record, "question"),
            "paragraphs": "\n".join(paragraphs.values()),
            "support": support,
            "answers": [answer, *aliases],
        }

    def order(self, split: str, part: list[dict], rng: random.Random) -> list[dict]:
        """Let questions of two, three and four hops take turns where they are held out.

        So 300 of them hold 100 of each.
        """
        part = super().order(split, part, rng)
        if split == "train":
            return part
        by_hops: list[list[dict]] = [[] for _ in range(HOPS + 1)]
        for problem in part:
            by_hops[len(problem["support"])].append(problem)
        turns = itertools.zip_longest(*by_hops)
        return [problem for problem in itertools.chain(*turns) if problem]

    def prompt(self, problem: Problem, m: int) -> str:
        data = problem.data
        body = "<support>paragraph numbers, by commas</support><answer>short answer</answer>"
        responses = "your response" if m == 1 else f"{m} different responses"
        return (
            f"{data['paragraphs']}\n\nQuestion: {data['question']}\n\nThink about which paragraphs are needed, one "
            f"for each step; cite at most {HOPS}. Then write {responses} in exactly this form:\n{self.write_form(body, m)}"
        )

    def reward(self, problem: Problem, answer: str) -> list[float]:
        text = tagged(answer, "answer")
        if not text:
            return [0.0] * len(self.objectives)
        # Brackets and words around the numbers do not matter. [0-9] rather than \d or str.isdigit,
        # which take other digits too: int() refuses superscripts.
        numbers = re.findall(r"(?<![0-9])[0-9]{1,6}(?![0-9])", tagged(answer, "support"))
        cited = list(dict.fromkeys(int(number) for number in numbers))[:HOPS]
        support = problem.data["support"]
        hops = [float(index in cited) for index in support]
        missing_hops = [1.0] * (HOPS - len(support))
        answer_f1 = max(word_f1(text, gold) for gold in problem.data["answers"])
        return [*hops, *missing_hops, answer_f1]

    def scalar(self, rewards: Tensor) -> Tensor:
        hops = rewards[..., :HOPS].sum(-1)
        return (hops + 3 * rewards[..., HOPS]) / (HOPS + 3)
