"""Gold and diamonds alone: no route can bring all of both."""

from blended import Blended


class Gems(Blended):
    name, objectives = "gems", ("gold", "diamond")

    def blend(self, vector, problem, answer):
        return vector[1:3]
