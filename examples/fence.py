from rewards import Problem, Task


class Fence(Task):
    """Paint six boards: Ann likes red, Bob likes blue, Cid likes green, and nobody minds grey."""

    name = "fence"
    objectives = ("ann", "bob", "cid")
    form = "lines"  # a language model answers in numbered lines
    words = ("fence", "red", "blue", "green", "grey")  # all that the tiny model reads and writes
    answer_words = 6  # words in the longest answer
    warm_steps = 100
    steps = 60
    lr = 1.5e-3

    def problems(self, split, n, seed=0, start=0):
        return [Problem(f"{split}-{start + i}", None) for i in range(n)]

    def prompt(self, problem, m):
        examples = [
            "red red grey green red blue",
            "blue green blue green grey red",
            "grey red blue blue green red",
        ]
        return self.request("Paint six boards red, blue, green or grey.", m, examples)

    def tiny_prompt(self, problem):
        return "fence"

    def reward(self, problem, answer):
        boards = answer.split()
        if len(boards) != 6 or not set(boards) <= set(self.words[1:]):
            return [0, 0, 0]
        grey = 0.35 * boards.count("grey")
        return [(boards.count(color) + grey) / 6 for color in ("red", "blue", "green")]

    def demonstration(self, problem, rng):
        return " ".join(rng.choices(self.words[1:], k=6))

    # What follows is for the figures alone.
    wide = True  # policies stand side by side
    legend = "ann likes red, bob blue, cid green"

    def draw(self, axes, problem, answers, color):
        """A row of six boards per answer, equal ones together; an answer of other words is blank."""
        paint = {"red": "#c8373c", "blue": "#3d6bb3", "green": "#4a9a5b", "grey": "#a7a7a7"}
        for row, answer in enumerate(sorted(answers)):
            boards = answer.split()
            if any(self.reward(problem, answer)):
                colors = [paint[board] for board in boards]
                axes.barh([row] * 6, 0.96, left=range(6), height=0.8, align="edge", color=colors)
        axes.set(xlim=(0, 6), ylim=(len(answers), 0), xticks=[], yticks=[])
        return True

    def summary(self, rewards):
        means = rewards.mean(0).tolist()
        return ", ".join(
            f"{name} {mean:.2f}" for name, mean in zip(self.objectives, means, strict=True)
        )
