"""Programs that are judged test by test: a component of the reward vector for each test."""

import ast
import collections
import contextlib
import functools
import re
import textwrap
import warnings
from random import Random

from torch import Tensor

from engine.answers import LIST_NUMBER
from engine.cores import cores
from report.drawings import Drawing
from rewards import Problem, UserError
from tasks import code_files, small_programs
from tasks.files import FileTask, shuffled
from tasks.sandbox import Job, Sandbox, SandboxError

# A line that opens or closes a block: maybe the number or dash of a list, the fence, and what follows.
FENCE = re.compile(rf"(\s*+(?:{LIST_NUMBER}\s*+|[-*+]\s++)?)(`{{3,}}+|~{{3,}}+)([^`]*)")
LANGUAGE = re.compile(r"[\s{.]*(\w*)")  # of what follows: `python title="a.py"`
# No power, whose result may be huge, no comma, no name but x and abs. The last + keeps a match from
# trying again with other parts, which would take for ever with a long number.
ARITHMETIC = re.compile(r"(?!.*\*\*)(?:abs|if|else|x|\d{1,3}|//|[<>=!]=|[-+*%()<> ]){1,200}+")
MAX_PER_PROCESS = 48  # arithmetic answers
ARITHMETIC_PROGRAM = """
FUNCTIONS = [{}]

def f(number, places):
    outputs = []
    for x in places:
        try:
            output = FUNCTIONS[number](x)
        except Exception:
            output = None
        outputs.append(output if isinstance(output, int) else None)
    return outputs
"""
LATE = "2025-02-01"  # problems from here on are held out, as in the paper's code


class Code(Drawing, FileTask):
    """Programs, with a component for each test: 1.0 if the program passes it (paper, section 4).

    The number of components d may differ from problem to problem.

    Args:
        data: a file of problems; "" takes the small ones.
        test_data: a file of held-out problems; "" holds out a part of `data`.
        limits: those of `Sandbox` for each test: `seconds`, `memory_mb`, and `unconfined`.
    """

    name = "code"
    tag = "program"
    source = "docs/own.md#your-own-code-problems"
    ends = ">`~"  # no newline, which programs are full of: a closing fence counts without it
    wide = True
    may_test_on_training = True  # to try a few problems of one's own
    flags = ("data", "test_data", "seconds", "memory_mb", "unconfined")
    defaults = {"steps": 300, "eval_problems": 500}
    tiny_defaults = {
        "warm_steps": 1500,
        # The best of a grid on validation problems (study/README.md).
        "lr": ["8e-4", "grpo=5e-4", "maxrl=1.2e-3", "multi_rlvr=1.2e-3"],
    }

    def __init__(self, data: str = "", test_data: str = "", **limits: float):
        try:
            self.sandbox = Sandbox(cores(), **limits)
        except SandboxError as error:
            raise UserError(f"--task {self.name}: {error}") from error
        if data or test_data:
            super().__init__(data, test_data)
        else:
            self.parts = small_programs.small_problems()
            self.words = small_programs.words_of(self.parts)
            self.answer_words = small_programs.LONGEST
            self.objectives = tuple(f"f({x})" for x in small_programs.HIDDEN)

    def load(self, flag: str, path: str) -> list[dict]:
        return shuffled(code_files.load_problems(flag, path, self._verdicts))

    def hold_out(self, data: list[dict]) -> tuple[list[dict], list[dict]]:
        """Hold the late problems out if all have dates, else one in five."""
        if not all(problem["date"] for problem in data):
            n_test = len(data) // self.share
            return data[n_test:], data[:n_test]
        early = [problem for problem in data if problem["date"] < LATE]
        late = [problem for problem in data if problem["date"] >= LATE]
        return early, late

    def prompt(self, problem: Problem, m: int) -> str:
        name = problem.data["entry_point"]
        starter = problem.data["starter"]
        form = "a complete Python program that reads from stdin and writes to stdout"
        if name:
            form = f"a Python function named {name}"
        parts = [problem.data["text"], f"The solution is {form}."]
        if starter:
            parts.append(f"Start from:\n```python\n{starter}\n```")

        request = "Write it in one ```python block."
        if m > 1:
            request = (
                f"Write {m} different solutions, each complete and in a ```python block of its own, "
                "one after the other."
            )
        return "\n\n".join([*parts, request])

    def find_answers(self, text: str, m: int, finished: bool) -> list[str] | None:
        has_blocks = "```" in text or "~~~" in text
        return find_blocks(text, finished)[:m] if has_blocks else None

    def canonical(self, problem: Problem, answer: str) -> str:
        return canonical(answer) or super().canonical(problem, answer)

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return self.rewards([(problem, answer)])[0]

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        rewards = [[0.0] * len(problem.data["tests"]) for problem, _ in pairs]
        packed = pack([(problem.data, answer) for problem, answer in pairs])
        verdicts = self.sandbox.run([job for _, job in packed])
        for (indices, _), passed in zip(packed, verdicts, strict=True):
            remaining = iter(passed)
            for i in indices:
                rewards[i] = [float(next(remaining)) for _ in rewards[i]]
        return rewards

    def reachable(self, problem: Problem) -> list[list[float]]:
        """All tests passed, as the reference does."""
        if type(self).rewards is not Code.rewards:  # a subclass that judges programs in another way
            return []
        return [[1.0] * len(problem.data["tests"])]

    def summary(self, rewards: Tensor) -> str:
        """The number of programs of a pool (n, d) that pass every test."""
        return f"{int((rewards >= 1).all(-1).sum())} of {len(rewards)} solve"

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> None:
        """Draw the most frequent programs, a square per test: filled if passed, bold if all."""
        counts = collections.Counter(answers).most_common(6)
        vectors = self.rewards([(problem, answer) for answer, _ in counts])
        d = len(problem.data["tests"])

        title = problem.data.get("tiny_prompt", problem.id)
        axes.text(0, -0.3, title, va="bottom", fontsize=8, parse_math=False)
        for row, ((answer, count), vector) in enumerate(zip(counts, vectors, strict=True)):
            colors = [color if passed else "white" for passed in vector]
            squares = {"align": "edge", "color": colors, "edgecolor": "#dddddd", "lw": 0.5}
            axes.bar(range(d), 0.9, 1, row, **squares)

            weight = "bold" if all(vector) else "normal"
            label = f"{count:2}\u00d7 {_in_one_line(answer)}"
            if len(label) > 37:
                label = label[:36] + "\u2026"
            style = {"va": "center", "fontsize": 8, "family": "monospace", "weight": weight}
            axes.text(d * 1.05, row + 0.5, label, parse_math=False, **style)
        axes.set(xlim=(0, 4 * d), ylim=(6, -1), xticks=[], yticks=[])

    def tiny_prompt(self, problem: Problem) -> str:
        return problem.data["tiny_prompt"]

    def demonstration(self, problem: Problem, rng: Random) -> str:
        """The reference solution, or a program of which often a part is wrong if it is small."""
        if problem.data.get("small"):
            return small_programs.demonstration(problem.data, rng)
        reference = problem.data["reference"].strip()
        if not reference:
            raise UserError(f"problem {problem.id!r} has no reference that --warm-steps could show")
        return f"```python\n{reference}\n```"

    def _verdicts(self, pairs: list[tuple[dict, str]]) -> list[list[bool]]:
        """A verdict for each test, of (problem, program) pairs."""
        return self.sandbox.run([job(problem, program) for problem, program in pairs])


def find_blocks(text: str, finished: bool = False) -> list[str]:
    """The Python code blocks of a text; unlabelled ones count if they are Python.

    A block is what stands between two fences, ``` or ~~~, also in a list. What all its lines are
    indented by is left out. A last block without a closing fence counts if the rollout ended by
    itself (`finished`): one that was cut off is no whole program.
    """
    blocks = []
    opening = None  # the fence of the block in which a line stands
    lines: list[str] = []
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line)
        if opening is None:
            opening = fence
            lines = []
        elif fence is not None and _closes(fence, opening):
            blocks += _programs(opening, lines)
            opening = None
        else:
            lines.append(f"{line}\n")
    if opening is not None and finished and "".join(lines).strip():
        blocks += _programs(opening, lines)
    return blocks


def _closes(fence: re.Match, opening: re.Match) -> bool:
    """Whether a fence closes a block. One that is indented further is part of the program."""
    indent, marks, rest = fence.groups()
    is_bare = not indent.strip() and not rest.strip()
    is_deeper = len(indent) >= len(opening[1]) + 4
    return is_bare and not is_deeper and marks.startswith(opening[2])


def _programs(opening: re.Match, lines: list[str]) -> list[str]:
    """The program of a block; none if it names another language, or no language and is no Python."""
    language = LANGUAGE.match(opening[3])[1].lower()
    if language not in ("", "py", "python", "python3"):
        return []
    program = "".join(lines)
    if program[:1].isspace():
        program = textwrap.dedent(program)
    if not language and not canonical(program):
        return []  # such as the input of an example
    return [program]


@functools.lru_cache(maxsize=4096)
def canonical(source: str) -> str:
    """The syntax tree as text, equal for programs that differ only in layout; "" if not Python."""
    if not source.strip() or len(source) > 2**16:
        return ""
    # The parser warns about odd literals and raises more than SyntaxError.
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
        return ast.dump(ast.parse(source))
    return ""


def is_expression(source: str) -> bool:
    """Whether a program begins with an expression, which one of a single line is."""
    return canonical(source).startswith("Module(body=[Expr(")


def job(problem: dict, answer: str) -> Job:
    """The sandbox's job for an answer, which stands between the source of its problem.

    The answer to a small problem may be an expression, the value of f(x).
    """
    if problem.get("small") and is_expression(f"({answer}\n)"):
        answer = f"def f(x):\n    return {answer.strip()}"

    imports = "" if problem.get("small") else f"{code_files.IMPORTS}sys.setrecursionlimit(50_000)\n"
    future, source = split_future(problem["before"] + answer)
    program = f"{future}{imports}{source}{problem['after']}"
    true_is_one = problem.get("true_is_one", False)
    return Job(program, problem["tests"], problem["call"], true_is_one=true_is_one)


def split_future(source: str) -> tuple[str, str]:
    """The lines `from __future__ import ...`, which must come first in a program, and the rest of a source."""
    if "__future__" in source:
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
            future = []
            rest = []
            for node in ast.parse(source).body:
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    future.append(ast.unparse(node))
                else:
                    rest.append(ast.unparse(node))
            if future:
                return "\n".join([*future, ""]), "\n".join([*rest, ""])
    return "", source


def pack(pairs: list[tuple[dict, str]]) -> list[tuple[list[int], Job]]:
    """Jobs for all answers that are Python, with the indices of the (problem, answer) pairs that they judge.

    An answer has a process of its own unless it is arithmetic, which can do no harm. Arithmetic
    answers share processes, since a tiny model writes thousands of them in a minute. Such a job
    judges test by test, one pair after the other.
    """
    jobs = []
    arithmetic = []
    for i, (problem, answer) in enumerate(pairs):
        if problem.get("small") and _is_arithmetic(answer):
            arithmetic.append(i)
        elif canonical(answer):
            jobs.append(([i], job(problem, answer)))

    for start in range(0, len(arithmetic), MAX_PER_PROCESS):
        indices = arithmetic[start : start + MAX_PER_PROCESS]
        jobs.append((indices, _arithmetic_job([pairs[i] for i in indices])))
    return jobs


def _is_arithmetic(answer: str) -> bool:
    """Whether an answer is a formula in x: no statement like x <<= 3 and no starred * x."""
    is_formula = ARITHMETIC.fullmatch(answer) and is_expression(answer)
    return bool(is_formula) and "Starred" not in canonical(answer)


def _arithmetic_job(pairs: list[tuple[dict, str]]) -> Job:
    """One job for many problems and formulas; it calls each formula at all places of its tests."""
    functions = ", ".join(f"lambda x: ({answer})" for _, answer in pairs)
    tests = []
    for number, (problem, _) in enumerate(pairs):
        places = [x for (x,), _ in problem["tests"]]
        expected = [y for _, y in problem["tests"]]
        tests.append([[number, places], expected])
    return Job(ARITHMETIC_PROGRAM.format(functions), tests, "f", each=True)


def _in_one_line(program: str) -> str:
    """A program without line breaks; a formula of a tiny model also without needless blanks."""
    if is_expression(program):
        program = ast.unparse(ast.parse(program))
    return " ".join(program.split())
