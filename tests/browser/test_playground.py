"""The playground in a real browser: its arithmetic is vpo.py's and eval.py's, and it shows what its texts say."""

import json
import random
from pathlib import Path

import pytest
import torch
from tab import LAYOUT, UNNAMED, Tab

import eval as evaluation
import vpo
from rewards import Fence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/playground.html"
COLORS = ("red", "blue", "green", "grey")
METHODS = ("grpo", "max_at_k", "multi_rlvr", "vpo", "group_vpo")
GOLDEN = json.loads((ROOT / "tests/golden.json").read_text())


@pytest.fixture(scope="module")
def tab(browser):
    """The page. It asks for nothing and complains of nothing."""
    tab = Tab(browser)
    tab.open(PAGE, 390)
    wait_for(tab, "isTrained()")
    yield tab
    tab.page.close()
    assert not tab.errors
    assert set(tab.requests) == {PAGE.as_uri()}


def wait_for(tab, condition: str) -> None:
    """Let the page train and draw until a condition holds, at most two minutes."""
    tab.page.wait_for_function(condition, timeout=120_000)
    tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def turn(tab, **knobs: float | str) -> None:
    """Turn knobs, all of them before the page draws again."""
    script = ""
    for knob, value in knobs.items():
        script += f"byId('{knob}').value = {json.dumps(value)};"
        script += f"byId('{knob}').dispatchEvent(new Event('input'));"
    tab.run(script)


def text(tab, element: str) -> str:
    return tab.run(f"byId('{element}').innerText")


# The arithmetic.


def advantages(tab, method: str, group: dict) -> torch.Tensor:
    """What the page's function of a method gives a group."""
    pay = f"METHODS.find(({{ name }}) => name === '{method}').pay({json.dumps(group)})"
    return torch.tensor(tab.run(f"groupNormalize({pay})"))


@pytest.mark.parametrize("method", METHODS)
def test_advantages_are_those_of_vpo(method, tab, monkeypatch):
    """On the golden groups, under the golden weights, in double precision, as JavaScript computes."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    several = method in vpo.SEVERAL_ANSWERS
    inputs = GOLDEN["inputs"]["three answers" if several else "one answer"]
    weights = torch.tensor(GOLDEN["cases"]["vpo, given weights"]["weights"])  # (P, K, d)
    rewards = torch.tensor(inputs["rewards"])  # (P, G, m, d)
    scalars = torch.tensor(inputs["scalars"])  # (P, G, m)
    is_repeat = torch.zeros_like(scalars, dtype=torch.bool)
    if several:
        is_repeat[0, 1, 2] = is_repeat[1, 3, 1] = True
    for subset in (1, 2, 3):
        if method in ("vpo", "group_vpo"):
            s = subset if method == "group_vpo" else 1
            expected = vpo.group_normalize(vpo.set_reward(rewards, weights, subset=s))
        else:
            everywhere = torch.ones_like(is_repeat)
            objectives = torch.ones(len(rewards), rewards.shape[-1], dtype=torch.bool)
            missing = torch.zeros(len(rewards), 1)
            scored = vpo.Scored(rewards, scalars, everywhere, is_repeat, objectives, missing)
            expected = vpo.ADVANTAGES[method](scored, vpo.Options(subset=subset))
        for p in range(len(rewards)):
            group = {"rewards": rewards[p], "scalars": scalars[p], "isRepeat": is_repeat[p]}
            group = {name: x.tolist() for name, x in (group | {"weights": weights[p]}).items()}
            group["subset"] = subset
            found = advantages(tab, method, group)
            torch.testing.assert_close(found, expected[p], atol=1e-9, rtol=1e-9)


def test_rewards_and_measures_are_those_of_python(tab):
    rng = random.Random(0)
    fences = [rng.choices(range(4), k=6) for _ in range(30)]
    found = tab.run(f"{fences}.map((fence) => rewardOf(fence, {{ ...DEFAULTS, grey: 0.35 }}))")
    words = [" ".join(COLORS[board] for board in fence) for fence in fences]
    rewards = torch.tensor([Fence().reward(None, fence) for fence in words]).double()  # (n, d)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), rewards)

    scalars = rewards.mean(-1)
    spread = json.dumps(evaluation.spread_weights(3).tolist())
    for k in (1, 2, 7, 30):
        weighted = evaluation.weighted_best_at_k(rewards[None], k).item()
        cases = [
            (f"ascending({scalars.tolist()})", evaluation.best_at_k(scalars, k).item(), 1e-6),
            (f"meanRanks({rewards.tolist()}, {spread})", weighted, 1e-6),
            (f"meanRanks({rewards.tolist()}, spreadWeights(3))", weighted, 2e-3),
        ]
        for ranks, expected, close in cases:
            assert tab.run(f"bestAtK({ranks}, {k})") == pytest.approx(expected, abs=close)
    found = tab.run(f"diversity({rewards.tolist()})")
    assert found == pytest.approx(evaluation.diversity(rewards[None]).item(), abs=1e-6)


# The experiments.


def outcomes(tab) -> dict[str, dict]:
    """Of every method at the last step: best@1, W@k for every k, the shares of the colors, the fences."""
    return tab.run(
        """Object.fromEntries(METHODS.map(({ name }) => {
          const record = trainings[name].records[STEPS];
          const boards = record.fences.flat();
          return [name, {
            best1: bestAtK(record.ranks, 1),
            W: times(POOL, (i) => bestAtK(record.userRanks, i + 1)),
            colors: COLORS.map((_, c) => boards.filter((board) => board === c).length / boards.length),
            fences: String(record.fences),
            start: bestAtK(trainings[name].records[0].userRanks, 30),
          }];
        }))"""
    )


def grpo_is_grey(found: dict[str, dict]) -> None:
    """And poor at k = 30; VPO and Group VPO paint every user's color."""
    assert found["grpo"]["colors"][3] > 0.9 and found["grpo"]["W"][29] < 0.4
    for name in ("vpo", "group_vpo"):
        assert min(found[name]["colors"][:3]) > 0.2 and found[name]["W"][29] > 0.59


def two_users_get_two_colors(found: dict[str, dict]) -> None:
    assert found["grpo"]["colors"][3] > 0.9 and found["grpo"]["W"][29] < 0.6
    for name in ("vpo", "group_vpo"):
        assert min(found[name]["colors"][:2]) > 0.2 and found[name]["W"][29] > 0.68


def all_equal_with_thirty(found: dict[str, dict]) -> None:
    assert all(found[name]["W"][29] > 0.9995 for name in METHODS)
    assert found["max_at_k"]["fences"] == found["group_vpo"]["fences"]
    assert found["vpo"]["best1"] < 0.9 and found["grpo"]["best1"] > 0.95


def ahead_from_two_or_three(found: dict[str, dict]) -> None:
    pairs = zip(found["vpo"]["W"], found["grpo"]["W"], strict=True)
    ahead = [k for k, (several, one) in enumerate(pairs, 1) if several > one]
    assert ahead[0] in (2, 3) and len(ahead) == 31 - ahead[0]


def speckled(found: dict[str, dict]) -> None:
    """With an entropy bonus GRPO's fences are worth less than before, VPO's less than without; Group VPO's hardly."""
    assert 0.6 < found["grpo"]["colors"][3] < 0.9
    assert found["grpo"]["W"][29] < found["grpo"]["start"] < 0.51
    assert found["grpo"]["W"][29] + 0.03 < found["vpo"]["W"][29] < 0.605
    assert found["group_vpo"]["W"][29] > 0.605


@pytest.mark.parametrize(
    "experiment, check, right",
    [
        (0, grpo_is_grey, "Grey."),
        (1, two_users_get_two_colors, "Red and blue."),
        (2, all_equal_with_thirty, "All five are equal."),
        (3, ahead_from_two_or_three, "From 2 or 3 on."),
        (4, speckled, "Less than random fences."),
    ],
)
def test_an_experiment_asks_trains_and_answers(experiment, check, right, tab):
    """Guards against an answer before the guess, an answer that the training contradicts, a text that is cut off."""
    tab.run(f"byId('experiments').children[{experiment}].click()")
    wait_for(tab, "isTrained() && !byId('card').hidden")
    assert tab.run("shownStep()") == 0 and not text(tab, "answer")
    tab.run("byId('choices').children[0].click()")
    wait_for(tab, "shownStep() > 0")
    assert "Pause" in text(tab, "play") and "Then try" not in text(tab, "answer")
    turn(tab, step=60)
    wait_for(tab, "isTrained() && state.answer")
    check(outcomes(tab))
    assert text(tab, "verdict").startswith(f"{right} You said: ")
    answer = text(tab, "answer")
    assert "Then try" in answer
    assert experiment != 4 or "Group VPO's is 0.6" in answer
    turn(tab, k=10)
    tab.run("scrollTo(0, 0)")
    wait_for(tab, "byId('k-now').value === '10'")
    stale = text(tab, "answer")
    assert stale.startswith("The knobs have moved.") and stale.endswith(answer)
    assert tab.run(LAYOUT) == []


# What is seen.


@pytest.mark.parametrize(
    "knobs",
    [
        {"G": 2, "m": 1, "users": "one", "grey": 0, "rate": 0, "k": 1},
        {"G": 2, "m": 6, "users": "two", "grey": 0.7, "rate": 6, "k": 30, "kl": 1},
        {"G": 32, "m": 1, "s": 31, "users": "same", "grey": 0.7, "rate": 6, "entropy": 1},
    ],
)
def test_knobs_at_their_ends_give_numbers(knobs, tab):
    """Guards against sets as large as the group, equal rewards, a rate of 0, and a lens of fewer users."""
    turn(tab, **knobs)
    wait_for(tab, "isTrained() && shownStep() === 60")
    seen = "document.querySelector('main').innerHTML"
    for method in METHODS:
        tab.run(f"state.method = '{method}'; draw()")
        assert not tab.run(f"/NaN|undefined|Infinity/.test({seen})")
    assert tab.run("settings.s") < tab.run("settings.G")
    if knobs["rate"] == 0:
        assert tab.run(
            "METHODS.every(({ name }) => new Set(valuesOf('diversity', name)).size === 1)"
        )


def test_the_lens_adds_up_and_follows_pointer_and_keys(tab):
    tab.open(PAGE, 1280)
    wait_for(tab, "isTrained()")
    assert tab.run(LAYOUT) == [] and tab.run(UNNAMED) == 0
    turn(tab, step=10)
    wait_for(tab, "shownStep() === 10")
    tab.run("state.method = 'vpo'; byId('triangle').scrollIntoView()")
    box = tab.page.locator("#triangle").bounding_box()
    tab.page.mouse.click(box["x"] + 0.14 * box["width"], box["y"] + 0.8 * box["width"])
    wait_for(tab, "true")
    before = tab.run("userOf({ vector: true })")
    assert before[0] > 0.85, "not at Ann's corner"
    tab.run("byId('triangle').focus()")
    tab.page.keyboard.press("ArrowRight")
    wait_for(tab, "true")
    w = tab.run("userOf({ vector: true })")
    assert w[1] > before[1]

    group = tab.run("recordOf('vpo').group")
    rewards = torch.tensor([group["rewards"]], dtype=torch.float64)
    R = vpo.set_reward(rewards, torch.tensor([group["weights"]]))
    utility = (rewards[0, R[0].argmax()] @ torch.tensor(w, dtype=torch.float64)).max().item()
    row = "document.querySelector('#group tr.chosen')"
    cells = tab.run(f"[...{row}.cells].map((cell) => cell.innerText)")
    assert float(cells[3]) == pytest.approx(utility, abs=6e-3)
    assert float(cells[4]) == pytest.approx(R.max().item(), abs=6e-4)
    assert float(cells[5]) == pytest.approx(vpo.group_normalize(R).max().item(), abs=6e-2)


@pytest.mark.parametrize("typed, used", [("1000", 999), ("2.5", 2), ("", 0)])
def test_the_seed_that_is_shown_is_the_one_that_is_used(typed, used, tab):
    turn(tab, seed=typed)
    tab.run("byId('seed').dispatchEvent(new Event('change'))")
    assert tab.run("[byId('seed').value, settings.seed]") == [str(used), used]


def test_without_javascript_the_page_says_what_it_needs(browser):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(PAGE.as_uri())
        assert page.is_visible("noscript p")
