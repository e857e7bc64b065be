"""Four copies of the maze's scalar: collinear objectives, so that a vector says nothing more."""

from blended import Blended


class Copies(Blended):
    name = "copies"

    def blend(self, vector, problem, answer):
        return [sum(vector) / 4] * 4
