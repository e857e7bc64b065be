"""A task to copy: menus of three courses, for Ann, who eats light, and Bob, who eats rich.

    cp examples/my_task.py my_task.py
    python train.py --task my_task.py
    python train.py --task my_task.py --model HuggingFaceTB/SmolLM2-135M-Instruct --method vpo --steps 2 --eval-problems 0 --out runs/menu-lm

The second command takes half a minute. On average pasta is best, so GRPO serves it three times. VPO
and Group VPO keep menus for Ann and for Bob. The third command shows what a language model writes.
"""

from random import Random

from rewards import Problem, Task

LIGHT = {"salad": 1.0, "soup": 0.7, "pasta": 0.6, "burger": 0.2, "cake": 0.0}  # for Ann
RICH = {"salad": 0.0, "soup": 0.2, "pasta": 0.6, "burger": 0.7, "cake": 1.0}  # for Bob


class Menu(Task):
    name = "menu"
    objectives = ("ann", "bob")
    form = "lines"  # a language model answers in numbered lines
    defaults = {"steps": 40, "eval_problems": 50}
    tiny_defaults = {"warm_steps": 60, "lr": ["1.5e-3"]}
    language_defaults = {
        "lr": ["2e-5"],
        "temperature": 0.7,
        "max_new_tokens": 16,  # for each answer
        "prompts_per_step": 2,
    }

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        return [Problem(f"{split}-{start + i}", None) for i in range(n)]

    def prompt(self, problem: Problem, m: int) -> str:
        question = f"Write a menu of three dishes. They may be {', '.join(LIGHT)}."
        examples = ["soup cake burger", "salad burger soup", "cake soup salad"]
        return self.request(question, m, examples)

    def reward(self, problem: Problem, answer: str) -> list[float]:
        dishes = answer.lower().replace(",", " ").split()
        if len(dishes) != 3 or not set(dishes) <= LIGHT.keys():
            return [0.0, 0.0]
        ann = sum(LIGHT[dish] for dish in dishes) / 3
        bob = sum(RICH[dish] for dish in dishes) / 3
        return [ann, bob]

    # The tiny model knows these words alone, and first imitates demonstrations.
    words = ("menu", *LIGHT)
    answer_words = 3

    def tiny_prompt(self, problem: Problem) -> str:
        return "menu"

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return " ".join(rng.choices(list(LIGHT), k=3))
