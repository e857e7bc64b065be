"""The headlines: what earns, which cheats earn nothing, held-out words."""

from itertools import permutations
from random import Random

import pytest
from helpers import save_random_model

import train
from engine.config import Config
from engine.tasks import check_task, load_task, take_problems
from rewards import parse_answers
from rollout import load_policy
from tasks.headline import FACTS, FOLLOWERS, facts_told

STORY = {"event": "fire", "place": "market", "day": "monday"}
STORY |= {"person": "nurse", "number": "twelve", "cause": "lightning"}
RATS = STORY | {"cause": "rats"}

# None of these looks at English, or at the truth, as it must: keywords, seven words, what is not in the text, another
# number, the names of the facts, who did not light it, two facts in one, the other way round, two headlines.
NOTHING = """Crash|fire market Monday nurse twelve lightning|Fire at market on Monday: nurse|Fire, market, Monday|
Nurse at fire at market on Monday|Fire at fire|A plane at the airport|Fire at the market in Paris|event at place|
Forty people saw the fire|12 people saw the fire|Fire by nurse|Nurse saw lightning fire at market|Fire on the market|
Lightning on Monday after fire|Nurse in fire at market|Nurse in lightning causes fire|Fire at the|On Monday||
Nurse at market seen by twelve|Nurse saw lightning at market fire|Nurse and twelve sees fire"""


@pytest.mark.parametrize(
    ("headline", "told"),
    [
        ("Fire at the market on Monday", "event place day"),
        ("**Fire at market**", "event place"),
        ("Nurse saw Monday fire at market.", "person day event place"),
        ("Nurse and twelve saw market fire", "person number place event"),
        ("Lightning causes Monday fire at market", "cause day event place"),
        ("Fire seen by nurse on Monday", "event person day"),
        ("Twelve people saw the fire", "number event"),
        ("Fire at market\nNurse saw the fire", ""),
        *((headline.strip(), "") for headline in NOTHING.split("|")),
    ],
)
def test_what_a_headline_tells(headline, told):
    assert facts_told(STORY, headline, 6) == set(told.split())


def test_verbs_agree_with_their_cause():
    assert facts_told(RATS, "Rats cause fire at the market", 6) == {"cause", "event", "place"}
    for headline in ("Rats causes fire", "A rats at the market"):
        assert not facts_told(RATS, headline, 6)
    assert not facts_told(STORY, "Lightning cause fire", 6)


def test_six_words_tell_at_most_four_facts():
    """So the conflict is real. Five facts leave room for one word more."""
    others = [word for word in FOLLOWERS if word.islower()]
    for other in others:
        for headline in permutations([*STORY.values(), other], 6):
            assert len(facts_told(STORY, " ".join(headline), 6)) < 5


def test_how_many_facts_a_longer_headline_tells():
    """Guards against a flag that changes the prompt alone."""
    seven = "Fire at market on Monday after lightning"
    eight = "Nurse and twelve saw market fire after lightning"
    assert [len(facts_told(STORY, seven, n)) for n in (6, 7, 8)] == [0, 4, 4]
    assert [len(facts_told(STORY, eight, n)) for n in (7, 8)] == [0, 5]
    task = load_task("headline", max_words=8)
    [problem] = take_problems(task, "test", 1)
    assert "at most eight words." in task.prompt(problem, 1)
    assert "at most eight words each" in task.prompt(problem, 3)


def test_the_splits_share_no_word_but_the_days():
    task = load_task("headline")
    seen = {}
    for split in ("train", "validation", "test"):
        problems = task.problems(split, 300)
        for name in FACTS:
            seen[split, name] = {problem.data[name] for problem in problems}
    for name in FACTS:
        assert seen["train", name].isdisjoint(seen["test", name] | seen["validation", name])
        assert seen["validation", name].isdisjoint(seen["test", name])
    assert task.problems("train", 3, start=5)[0] == task.problems("train", 8)[5]


def test_demonstrations_tell_two_facts_of_the_text():
    task = load_task("headline", "some/model")
    check_task(task, 3)
    for problem in task.problems("demonstrations", 50):
        text = problem.data["text"].lower()
        assert all(problem.data[name] in text for name in task.objectives)
        for seed in range(10):
            assert sum(task.reward(problem, task.demonstration(problem, Random(seed)))) == 2


def test_sets_that_a_language_model_imitates(tmp_path):
    """Guards against warm-up sets of m equal answers, and against a form that is not read again."""
    task = load_task("headline", "some/model")
    policy = load_policy(save_random_model(tmp_path, "llama"), task)
    config = Config(m=3, warm_steps=3)
    prompts, texts = train.demonstrations(policy, task, config, 2)
    problems = take_problems(task, "demonstrations", 8, start=16)
    for problem, prompt, text in zip(problems, prompts, texts, strict=True):
        assert "3 different headlines" in prompt
        answers = parse_answers(text, task, 3)
        assert [sum(task.reward(problem, answer)) for answer in answers] == [2, 2, 2]
        assert len(set(answers)) > 1
    assert len(set(texts)) == 8
