"""EUREQA (arXiv 2311.09702): chains of five masked entities, and a component for each of them."""

from rewards import Problem, UserError
from tasks.files import FileTask, field, normalized, tagged, texts_field

NAMES = "ABCDE"


class Eureqa(FileTask):
    """Name the masked entities of a text. Only the last sentence tells one that is not masked.

    entity_X is 1 if the entity in its tag equals the true one after normalisation, where '_' is a
    blank. Of `test_data` half, chosen by the ids, is trained on too. So the paper trains on all
    normal questions and on 681 of the hard ones.
    """

    name = "eureqa"
    tag = "response"
    trained_share = 0.5
    objectives = tuple(f"entity_{name}" for name in NAMES)
    source = "questions_normal_5 and --test-data questions_hard_5 of huggingface.co/datasets/vincentleebang/EUREQA"

    def read(self, record: dict) -> dict:
        masks = texts_field(record, "entity_masks")
        entities = texts_field(record, "entities")
        for name, texts in (("entity_masks", masks), ("entities", entities)):
            if len(texts) < len(NAMES) or not all(text.strip() for text in texts):
                wanted = f"{len(NAMES)} or more texts, none of them empty"
                raise UserError(f"field {name}: must be {wanted}, not {texts!r:.60}")
        index = field(record, "idx", int | str, "a number or text")
        return {
            "id": f"eureqa-{index}-{entities[0]}",
            "question": "\n".join(texts_field(record, "question")),
            "masks": masks[: len(NAMES)],
            "entities": entities[: len(NAMES)],
        }

    def prompt(self, problem: Problem, m: int) -> str:
        tags = ""
        for name, mask in zip(NAMES, problem.data["masks"], strict=True):
            tags += f"<entity_{name}>{mask}</entity_{name}>"
        responses = "one response" if m == 1 else f"{m} different responses"
        return (
            "Some names in this text are masked; the last sentence tells one that is not, from which the others "
            f"follow.\n\n{problem.data['question']}\n\nName what each mask stands for, as Wikipedia does. Write "
            f"{responses} in exactly this form, with a name in the place of every mask:\n{self.write_form(tags, m)}"
        )

    def reward(self, problem: Problem, answer: str) -> list[float]:
        rewards = []
        for name, gold in zip(NAMES, problem.data["entities"], strict=True):
            entity = tagged(answer, f"entity_{name}")
            is_right = entity != "" and _normalized(entity) == _normalized(gold)
            rewards.append(float(is_right))
        return rewards


def _normalized(entity: str) -> str:
    return normalized(entity.replace("_", " "))
