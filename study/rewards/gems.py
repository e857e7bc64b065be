"""Gold and diamonds alone: no route brings all of both."""

from blended import Blended


class Gems(Blended):
    name = "gems"
    objectives = ("gold", "diamond")

    def blend(self, vector, problem, answer):
        return vector[1:3]
