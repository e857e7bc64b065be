"""What one objective gains the other loses: all routes that reach the exit have the same scalar."""

from blended import Blended


class Tradeoff(Blended):
    name = "tradeoff"
    objectives = ("rather gold", "rather diamond")

    def blend(self, vector, problem, answer):
        completion, gold, diamond, _ = vector
        return [completion * (1 + gold - diamond) / 2, completion * (1 + diamond - gold) / 2]
