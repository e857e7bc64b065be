"""Programs judged test by test, a component of the reward vector per test; and what is a program in a text."""

import ast
import collections
import contextlib
import functools
import hashlib
import random
import re
import warnings
from pathlib import Path

from torch import Tensor

from rewards import Problem, UserError
from tasks import code_files, small_programs
from tasks.files import FileTask
from tasks.sandbox import Job, Sandbox, SandboxError

BLOCK = re.compile(r"^```(\w*)[^\S\n]*\n(.*?)(^```[^\S\n]*$|\Z)", re.DOTALL | re.MULTILINE)
EXPRESSION = "Module(body=[Expr("  # how the syntax tree of a single expression begins
ARITHMETIC = re.compile(r"(?!.*\*\*)(?:abs|if|else|x|\d{1,3}|//|[<>=!]=|[-+*%()<> ]){1,200}")
PACKED = """
FUNCTIONS = [{}]
def f(i, xs):
    ys = []
    for x in xs:
        try:
            ys.append(y if isinstance(y := FUNCTIONS[i](x), int) else None)
        except Exception:
            ys.append(None)
    return ys
"""


class Code(FileTask):
    """Programs, a component per test: 1 if the program passes it; k may differ from problem to problem (section 4).
    Problems come from a file (`data`; `test_data`, or a part of `data`, is held out), else they are the small ones. The
    limits per test are seconds of CPU time and MiB. UserError for a bad file or limit, or where `Sandbox` refuses."""

    name, tag, wide = "code", "program", True
    flags = ("data", "test_data", "seconds", "memory_mb", "unconfined")
    warm_steps, steps, eval_problems = 1500, 300, 500

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        seconds: float = 2.0,
        memory_mb: int = 512,
        unconfined: bool = False,
    ):
        if test_data and not data:
            raise UserError(f"--test-data {test_data}: needs --data to train on")
        try:
            self.sandbox = Sandbox(seconds=seconds, memory_mb=memory_mb, unconfined=unconfined)
        except (SandboxError, ValueError) as error:
            raise UserError(f"--task code: {error}") from error
        if data:
            self.parts = code_files.load(
                data, test_data, lambda pairs: self.sandbox.run([job(*p) for p in pairs])
            )
            files = b"".join(Path(path).read_bytes() for path in (data, test_data) if path)
            self.fingerprint = hashlib.sha256(files).hexdigest()
        else:
            self.parts = small_programs.small_problems()
            self.words, self.answer_words = small_programs.words(), small_programs.LONGEST
            self.objectives = tuple(f"f({x})" for x in small_programs.HIDDEN)

    def prompt(self, problem: Problem, m: int) -> str:
        data = problem.data
        form = (
            f"a Python function named {data['entry_point']}"
            if data["entry_point"]
            else "a complete Python program that reads from stdin and writes to stdout"
        )
        starter = f"\n\nStart from:\n```python\n{data['starter']}\n```" if data["starter"] else ""
        ask = (
            "Write it in one ```python block."
            if m == 1
            else (
                f"Write {m} different solutions, each complete and in a ```python block of its own, one after the other."
            )
        )
        return f"{data['text']}\n\nThe solution is {form}.{starter}\n\n{ask}"

    def find_answers(self, text: str, m: int) -> list[str] | None:
        return find_blocks(text)[:m] if "```" in text else None

    def canonical(self, problem: Problem, answer: str) -> str:
        return canonical(answer) or super().canonical(problem, answer)

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return self.rewards([(problem, answer)])[0]

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        rewards = [[0.0] * len(problem.data["tests"]) for problem, _ in pairs]
        jobs = pack([(problem.data, answer) for problem, answer in pairs])
        for (indices, _), passed in zip(
            jobs, self.sandbox.run([job for _, job in jobs]), strict=True
        ):
            verdicts = iter(passed)
            for i in indices:
                rewards[i] = [float(next(verdicts)) for _ in rewards[i]]
        return rewards

    def reachable(self, problem: Problem) -> list[list[float]]:
        return [[1.0] * len(problem.data["tests"])]  # the reference passes

    def summary(self, rewards: Tensor) -> str:
        """How many programs of a pool (n, k) pass every test."""
        return f"{int((rewards >= 1).all(-1).sum())} of {len(rewards)} solve"

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        """The most frequent programs: a square per test, filled if passed; how often; the code, bold if all pass."""
        counts, k = collections.Counter(answers).most_common(6), len(problem.data["tests"])
        vectors = self.rewards([(problem, answer) for answer, _ in counts])
        axes.text(
            0,
            -0.3,
            problem.data.get("tiny_prompt", problem.id),
            fontsize=8,
            va="bottom",
            parse_math=False,
        )
        for row, ((answer, count), vector) in enumerate(zip(counts, vectors, strict=True)):
            axes.bar(
                range(k),
                0.9,
                1,
                row,
                align="edge",
                color=[color if passed else "white" for passed in vector],
                edgecolor="#dddddd",
                lw=0.5,
            )
            text = " ".join(answer.split())
            if canonical(answer).startswith(
                EXPRESSION
            ):  # without the blanks that it can do without
                text = re.sub(r"(?<!if)(?<!else) (?=\W)|(?<=\W) (?!if|else)", "", text)
            text = f"{count:2}\u00d7 {text}"
            axes.text(
                k * 1.05,
                row + 0.5,
                text if len(text) < 38 else text[:36] + "\u2026",
                va="center",
                fontsize=8,
                family="monospace",
                weight="bold" if all(vector) else "normal",
                parse_math=False,
            )
        axes.set(xlim=(0, 4 * k), ylim=(6, -1), xticks=[], yticks=[])
        return True

    def tiny_prompt(self, problem: Problem) -> str:
        return problem.data["tiny_prompt"]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        if not problem.data.get("small"):
            if not problem.data["reference"]:
                raise UserError(
                    f"problem {problem.id!r} has no reference that --warm-steps could show"
                )
            return f"```python\n{problem.data['reference'].strip()}\n```"
        return small_programs.demonstration(problem.data, rng)


def find_blocks(text: str) -> list[str]:
    """The closed ```python blocks of a text, in order, those of a model's thoughts aside; unlabelled ones count."""
    blocks = BLOCK.findall(text.rpartition("</think>")[2])
    return [
        block
        for language, block, end in blocks
        if end and language.lower() in ("", "py", "python", "python3")
    ]


@functools.lru_cache(maxsize=4096)
def canonical(source: str) -> str:
    """The abstract syntax tree as text, equal for programs that differ in layout and comments alone; "" if none."""
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):  # of the parser
        if source.strip() and len(source) <= 2**16:
            return ast.dump(ast.parse(source))
    return ""


def job(problem: dict, answer: str) -> Job:
    """What runs: the answer between the problem's own source; to a small problem an expression is the function f."""
    if problem.get("small") and canonical(f"({answer}\n)").startswith(EXPRESSION):
        answer = f"def f(x):\n    return {answer.strip()}"
    future = "".join(
        line for line in answer.splitlines(True) if line.startswith("from __future__ ")
    )  # must come first
    program = future + problem["before"] + answer.replace(future, "") + problem["after"]
    return Job(program, problem["tests"], problem["call"])


def pack(pairs: list[tuple[dict, str]]) -> list[tuple[list[int], Job]]:
    """The jobs for (problem, answer) pairs that are Python, each with the indices of the answers that it judges. Only
    pure arithmetic, which can touch nothing, shares a process by the dozen: a tiny model writes thousands a minute."""
    trees = {i: canonical(answer) for i, (_, answer) in enumerate(pairs) if canonical(answer)}
    pure = [
        i
        for i, tree in trees.items()
        if pairs[i][0].get("small")
        and ARITHMETIC.fullmatch(pairs[i][1])
        and tree.startswith(EXPRESSION)
        and "Starred" not in tree
    ]  # no statement such as x <<= 3
    jobs = [([i], job(*pairs[i])) for i in sorted({*trees} - {*pure})]
    for group in (pure[i : i + 48] for i in range(0, len(pure), 48)):
        functions = ", ".join(f"lambda x: ({pairs[i][1]})" for i in group)
        columns = [
            zip(*pairs[i][0]["tests"], strict=True) for i in group
        ]  # arguments [x], expected y
        tests = [[[place, [x for (x,) in xs]], list(ys)] for place, (xs, ys) in enumerate(columns)]
        jobs.append((group, Job(PACKED.format(functions), tests, "f", each=True)))
    return jobs
