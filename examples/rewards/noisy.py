"""Four copies of the maze's scalar, each with an error of its own of at most 0.05: near-collinear, as reward models."""

from blended import Blended


class Noisy(Blended):
    name = "noisy"

    def blend(self, vector, problem, answer):
        return [
            sum(vector) / 4 + 0.05 * vector[0] * self.noise(problem, answer, i) for i in range(4)
        ]
