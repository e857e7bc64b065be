"""Every objective half its own, half the maze's scalar: between the copies and the maze."""

from blended import Blended


class Halfway(Blended):
    name = "halfway"

    def blend(self, vector, problem, answer):
        return [0.5 * value + 0.125 * sum(vector) for value in vector]
