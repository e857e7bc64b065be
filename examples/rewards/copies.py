"""Four copies of one number, the maze's scalar: collinear, so that a vector can say nothing more."""

from blended import Blended


class Copies(Blended):
    name = "copies"

    def blend(self, vector, problem, answer):
        return [sum(vector) / 4] * 4
