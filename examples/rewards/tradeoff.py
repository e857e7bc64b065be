"""What one objective gains the other loses: among routes that reach the exit the scalar is the same for all."""

from blended import Blended


class Tradeoff(Blended):
    name, objectives = "tradeoff", ("rather gold", "rather diamond")

    def blend(self, vector, problem, answer):
        completion, gold, diamond, _ = vector
        return [completion * (1 + gold - diamond) / 2, completion * (1 + diamond - gold) / 2]
