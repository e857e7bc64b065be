"""EUREQA (arXiv 2311.09702): chains of five masked entities, of which only the last is told; one component for each."""

from rewards import Problem, UserError
from tasks.files import FileTask, field, normalized, shuffled, tagged

NAMES = "ABCDE"


class Eureqa(FileTask):
    """entity_X is 1 if the entity in its tag equals the true one after normalisation ('_' is a blank). With --test-data
    half of that file, by its ids, is trained on too, as in the paper: all normal questions and 681 of the hard ones."""

    name, tag = "eureqa", "response"
    objectives = tuple(f"entity_{name}" for name in NAMES)
    source = "questions_normal_5 and --test-data questions_hard_5 of huggingface.co/datasets/vincentleebang/EUREQA"

    def read(self, record: dict) -> dict:
        masks, entities = (
            field(record, name, list, "a list") for name in ("entity_masks", "entities")
        )
        question = record.get("question")
        question = question if isinstance(question, list) else [question]
        texts = (*masks, *entities, *(question or [None]))
        if min(len(masks), len(entities)) < 5 or not all(
            isinstance(x, str) and x.strip() for x in texts
        ):
            raise UserError(
                "fields question, entity_masks, entities: must be texts, of the latter two five or more"
            )
        return {
            "id": f"eureqa-{field(record, 'idx', int | str, 'a number or text')}-{entities[0]}",
            "question": "\n".join(question),
            "masks": masks[:5],
            "entities": entities[:5],
        }

    def hold_out(self, data: list[dict], test: list[dict] | None) -> tuple[list[dict], list[dict]]:
        if test is None:
            return super().hold_out(data, test)
        return shuffled(data + test[: len(test) // 2]), test[len(test) // 2 :]

    def prompt(self, problem: Problem, m: int) -> str:
        tags = "".join(
            f"<entity_{x}>{mask}</entity_{x}>"
            for x, mask in zip(NAMES, problem.data["masks"], strict=True)
        )
        form = "\n".join(f"<response_{i + 1}>{tags}</response_{i + 1}>" for i in range(m))
        return (
            f"Some names in this text are masked; the last sentence tells one that is not, from which the others "
            f"follow.\n\n{problem.data['question']}\n\nName what each mask stands for, as Wikipedia does. Write "
            f"{'one response' if m == 1 else f'{m} different responses'} in exactly this form, with a name in the "
            f"place of every mask:\n{form}"
        )

    def reward(self, problem: Problem, answer: str) -> list[float]:
        pairs = zip(
            (tagged(answer, f"entity_{name}") for name in NAMES),
            problem.data["entities"],
            strict=True,
        )
        return [
            float(
                bool(ours)
                and normalized(ours.replace("_", " ")) == normalized(gold.replace("_", " "))
            )
            for ours, gold in pairs
        ]
