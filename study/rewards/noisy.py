"""Four copies of the maze's scalar, each with an error of at most 0.05, as reward models have."""

from blended import Blended


class Noisy(Blended):
    name = "noisy"

    def blend(self, vector, problem, answer):
        completion = vector[0]
        scalar = sum(vector) / 4
        return [scalar + 0.05 * completion * self.noise(problem, answer, copy) for copy in range(4)]
