"""A headline for unknown readers: a short text tells six facts, and a few words cannot hold them all.

Each objective is a reader who cares for one fact: the event, the place, the day, the person, the number or
the cause. A headline pays every reader whose fact it tells. At most four facts fit into six words of plain
English, so which four is a choice.

`problem.data` holds the six facts and "text", the text that tells them.
"""

import re
import textwrap
from collections import Counter
from itertools import pairwise
from random import Random

from torch import Tensor

from report.drawings import Drawing
from rewards import Problem, Task

NUMERALS = {5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
# Of each list three fifths are for training, one fifth for validation and one fifth is held out.
WORDS = {
    "event": """
        fire flood crash blackout collapse explosion panic evacuation rescue leak stampede
        outage accident delay closure landslide derailment breakdown scare alarm""",
    "place": """
        market harbor museum station school library bridge airport stadium castle hospital
        factory theater park hotel church bakery zoo mall prison""",
    "person": """
        teacher baker sailor doctor farmer mayor nurse driver singer student lawyer pilot priest
        butcher painter banker waiter plumber tailor judge""",
    "number": """
        two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty
        fifty sixty seventy eighty ninety""",
    "cause": """
        lightning rain snow wind ice smoke heat fog mud dust rats wasps bees bats mice crows
        frost hail pigeons squirrels""",
}
FACTS = {name: words.split() for name, words in WORDS.items()}
TEXTS = (
    "There was {an_event} at the {place} on {day}. The cause was {cause}. {A_person} saw it, and so did "
    "{number} other people.",
    "On {day} {cause} led to {an_event} at the {place}. {A_person} and {number} other people saw it.",
    "{A_person} and {number} other people saw {an_event} at the {place} on {day}. It was caused by {cause}.",
)
DEMONSTRATIONS = (
    "{event} at the {place}",
    "{event} on {day}",
    "{cause} at the {place}",
    "{cause} on {day}",
    "{person} at the {place}",
    "{number} people at the {place}",
    "{number} people saw {cause}",
    "{number} people saw the {event}",
    "{person} saw {cause}",
    "{person} saw the {event}",
)
# The kinds of word that may follow one another, articles aside: facts in capitals, all other words as they
# are. What is not here is no English, or not what the text says.
GRAMMAR = {
    "EVENT": "at in on after from amid hits seen",
    "PLACE": "on after in amid seen",
    "DAY": "at in after seen",
    "PERSON": "and at in on saw",
    "NUMBER": "people and at in on saw",
    "people": "and at in on saw",
    "CAUSE": "at in on seen hits causes",
    "CAUSES": "at in on seen hit cause",
    "at": "PLACE",
    "in": "PLACE CAUSE",
    "on": "DAY",
    "after": "CAUSE CAUSES",
    "from": "CAUSE CAUSES",
    "amid": "CAUSE CAUSES",
    "by": "PERSON NUMBER",
    "seen": "at in on by",
    "and": "PERSON NUMBER",
    "saw": "EVENT CAUSE CAUSES",
    "hit": "PLACE",
    "hits": "PLACE",
    "cause": "EVENT",
    "causes": "EVENT",
}
FOLLOWERS = {kind: followers.split() for kind, followers in GRAMMAR.items()}
OPENERS = ("EVENT", "PERSON", "NUMBER", "CAUSE", "CAUSES")
NOUNS = (*OPENERS, "PLACE", "DAY", "people")
MODIFIERS = ("DAY", "PLACE")  # in front of the event: "Monday fire", "market fire"
ARTICLES = {  # and the kinds of word that they stand before
    "a": ("EVENT", "PLACE", "PERSON"),
    "an": ("EVENT", "PLACE", "PERSON"),
    "the": ("EVENT", "PLACE", "PERSON", "CAUSE", "CAUSES"),
}
VERBS = ("saw", "seen", "hit", "hits", "cause", "causes")  # at most one of them
PEOPLE = ("PERSON", "NUMBER")  # they see; they are not seen, and neither hit nor cause anything
COLORS = {  # of the facts in a drawing
    "event": "#b2182b",
    "place": "#1b7837",
    "day": "#7b3294",
    "person": "#2166ac",
    "number": "#8c510a",
    "cause": "#e08214",
}
GREY = "#aaaaaa"  # of a headline that earns nothing
LINES = 5  # headlines in a drawing
LETTERS = 38  # of a line, as many as a drawing is wide
FONT_SIZE = 8  # points
LETTER_WIDTH = 0.602 * FONT_SIZE  # of the monospaced font


class Headline(Drawing, Task):
    """A headline of a few words.

    The reward vector has a 1 for every fact that the headline tells. It is zero if the headline is too long,
    is not plain English, or says what the text does not say.

    Args:
        max_words: of a headline, 5 to 9.
    """

    name = "headline"
    form = "lines"
    tag = "headline"
    flags = ("max_words",)
    objectives = ("event", "place", "day", "person", "number", "cause")
    wide = True
    width = 3.1
    legend = "equal headlines are counted; a colored word tells a fact"
    defaults = {"steps": 60, "eval_problems": 40}
    language_defaults = {
        "max_new_tokens": 16,
        "micro_batch_tokens": 512,
        # The best of a grid with SmolLM2-135M on validation texts (version 3).
        "lr": ["2e-5", "multi_rlvr=4e-5", "vpo=4e-5", "group_vpo=4e-5"],
        "warm_steps": 60,  # after thirty VPO unlearns the list in two runs of five
        "prompts_per_step": 6,
        "kl": 0.0,  # a fifth of a step would go to the reference policy
        "temperature": 0.7,  # at 1 a small model often loses the thread
        "gradient_checkpointing": False,
    }

    def __init__(self, max_words: int = 6):
        self.max_words = max_words

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        found = []
        for i in range(start, start + n):
            id = f"{split}-{seed}-{i}"
            rng = Random(id)
            facts = {name: rng.choice(share_of(words, split)) for name, words in FACTS.items()}
            facts["day"] = rng.choice(DAYS)
            facts["text"] = rng.choice(TEXTS).format(
                **facts | {"day": facts["day"].capitalize()},
                an_event=with_article(facts["event"]),
                A_person=with_article(facts["person"]).capitalize(),
            )
            found.append(Problem(id, facts))
        return found

    def prompt(self, problem: Problem, m: int) -> str:
        text = problem.data["text"]
        most = f"at most {NUMERALS[self.max_words]} words"
        if m == 1:
            return f"{text}\nWrite a headline of {most}."
        return f"{text}\nWrite {m} different headlines of {most} each, as a numbered list."

    def reward(self, problem: Problem, answer: str) -> list[float]:
        names = facts_told(problem.data, answer, self.max_words)
        return [float(name in names) for name in self.objectives]

    def canonical(self, problem: Problem, answer: str) -> str:
        return " ".join(words_of(answer))

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> None:
        """Draw the most frequent headlines with their counts, and add the facts' colors to the key."""
        key = dict(COLORS)
        counts = Counter(" ".join(words_of(answer)) or "(nothing)" for answer in answers)
        for row, (headline, count) in enumerate(counts.most_common(LINES)):
            marks = self.marks(problem, headline)
            draw_line(axes, row, f"{count:2}\u00d7", headline, marks)
            if not marks:
                key["earns nothing"] = GREY
        for name, word_color in key.items():
            axes.scatter([], [], marker="s", color=word_color, label=name)
        n_hidden = len(counts) - LINES
        if n_hidden > 0:
            axes.text(0, LINES, f"and {n_hidden} others", va="center", fontsize=8, style="italic")
        axes.set(xlim=(0, 1), ylim=(LINES + 0.6, -0.6), xticks=[], yticks=[])

    def text_of(self, problem: Problem) -> str:
        return problem.data["text"]

    def marks(self, problem: Problem, answer: str) -> dict[str, str]:
        """The words that tell a fact, in the fact's color; none if the headline earns nothing."""
        names = facts_told(problem.data, answer, self.max_words)
        return {problem.data[name]: color for name, color in COLORS.items() if name in names}

    def summary(self, rewards: Tensor) -> str:
        facts = rewards.sum(-1)  # (n)
        n_distinct = int((rewards > 0).any(0).sum())
        return f"{facts.mean():.1f} facts each, {n_distinct} of 6 in all"

    def demonstration(self, problem: Problem, rng: Random) -> str:
        """A headline that tells two facts."""
        return rng.choice(DEMONSTRATIONS).format(**problem.data)


def share_of(words: list[str], split: str) -> list[str]:
    """The words of a split: no held-out fact but the day occurs in training."""
    fifth = len(words) // 5
    if split == "test":
        return words[:fifth]
    if split == "validation":
        return words[fifth : 2 * fifth]
    return words[2 * fifth :]


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def words_of(answer: str) -> list[str]:
    """The words of an answer in small letters, without punctuation; empty if it holds anything else."""
    if not re.fullmatch(r"[A-Za-z ,.:;!?'\"*-]*", answer):
        return []
    return re.findall(r"[a-z]+", answer.lower())


def facts_told(facts: dict[str, str], answer: str, max_words: int) -> set[str]:
    """The names of the facts that a headline tells; empty if it is not one."""
    words = words_of(answer)
    names = {facts[name]: name for name in Headline.objectives}
    found = [names[word] for word in words if word in names]
    is_headline = 2 <= len(words) <= max_words and len(found) == len(set(found))
    if is_headline and is_english(kinds_of(words, names)):
        return set(found)
    return set()


def kinds_of(words: list[str], names: dict[str, str]) -> list[str]:
    """The kinds of the words as in FOLLOWERS. An event and the day or place before it are one kind."""
    kinds = []
    for word in words:
        kind = names[word].upper() if word in names else word
        if kind == "CAUSE" and is_plural(word):
            kind = "CAUSES"
        if kind == "EVENT" and kinds and kinds[-1] in MODIFIERS:
            kinds.pop()
        kinds.append(kind)
    return kinds


def is_plural(word: str) -> bool:
    return word == "mice" or (word.endswith("s") and not word.endswith("ss"))


def is_english(kinds: list[str]) -> bool:
    """Whether the words of a headline, given by their kinds, follow one another as FOLLOWERS says."""
    sequence = []  # without articles
    for kind, following in pairwise([*kinds, ""]):
        if kind in ARTICLES:
            if following not in ARTICLES[kind]:
                return False
        elif kind in FOLLOWERS:
            sequence.append(kind)
        else:
            return False
    if not sequence or sequence[0] not in OPENERS or sequence[-1] not in NOUNS:
        return False
    verbs = [kind for kind in sequence if kind in VERBS]
    if len(verbs) > 1 or (sequence[0] in PEOPLE and verbs not in ([], ["saw"])):
        return False
    return all(after in FOLLOWERS[before] for before, after in pairwise(sequence))


def draw_line(axes, row: int, count: str, headline: str, marks: dict[str, str]) -> None:
    """Draw one headline, its marked words in their colors; grey if it has none and so earns nothing."""
    style = {
        "xy": (0, row),
        "textcoords": "offset points",
        "va": "center",
        "fontsize": FONT_SIZE,
        "family": "monospace",
        "parse_math": False,
    }
    axes.annotate(count, xytext=(0, 0), **style)
    column = len(count) + 1
    for word in textwrap.shorten(headline, LETTERS, placeholder=" ...").split():
        color = "#222222" if marks else GREY
        weight = "normal"
        if word in marks:
            color = marks[word]
            weight = "bold"
        place = (column * LETTER_WIDTH, 0)
        axes.annotate(word, xytext=place, color=color, weight=weight, **style)
        column += len(word) + 1
