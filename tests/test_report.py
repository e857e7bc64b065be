"""The figures: what they say, that they are written, and that drawing leaves nothing behind."""

import re
import sys

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from report import plots
from report.evaluation import EvalReport
from report.style import LOOKS, Entry
from rewards import Problem

pytestmark = pytest.mark.draws


def problems(n: int) -> list[Problem]:
    return [Problem(str(i), i) for i in range(n)]


class Squares:
    """A task whose answers can be drawn."""

    wide = False
    legend = ""

    def draw(self, axes, problem, answers, color):
        axes.plot([0, len(answers)], [0, problem.data or 0], color=color)
        return True

    def summary(self, rewards):
        return f"{rewards.shape[1]} objectives, costs $2, then $3"


def make_report(passes: float = 0.0, seeds: int = 1, policies=None, ks=(1, 2, 3, 5, 6)):
    """GRPO is level at 0.5, every other policy rises with k: it overtakes at k = 2."""
    slopes = {"best": 0.25, "W": 0.3}
    measures = {}
    for policy in policies or map(Entry, ("start", "start_sets", "grpo", "vpo")):
        measures[policy] = {}
        for k in ks:
            means = {kind: slope * k + 0.1 for kind, slope in slopes.items()}
            if policy.method == "grpo":
                means = dict.fromkeys(slopes, 0.5)
            if policy.method == "start":
                means = {kind: 0.9 * mean for kind, mean in means.items()}
            for kind, mean in (means | {"pass": passes}).items():
                measures[policy][f"{kind}@{k}"] = torch.full((seeds, 20), mean)
    return EvalReport("run", "test", 20, ks[-1], 0.7, measures, prompt_ids=None)


def make_pools(names=("start", "grpo", "vpo"), N=5, n=8, k=3):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(N, n, k, generator=generator).mul(3).round() / 3 for name in names}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written while a test runs."""
    figures, savefig = [], Figure.savefig

    def save(self, *args, **options):
        figures.append(self)
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


def texts(figure) -> list[str]:
    return [
        text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "position"),
    [
        ([0.1, 0.4, 0.6, 0.7], [0.5, 0.5, 0.5, 0.5], 2),
        ([0.5, 0.5, 0.6], [0.5, 0.5, 0.5], 2),  # level is not above
        ([0.1, 0.6, 0.1, 0.6], [0.5] * 4, 1),  # the first of two
        ([0.6, 0.7], [0.5, 0.5], None),  # above from the start: nothing is overtaken
        ([0.1, 0.2], [0.5, 0.5], None),
        ([0.6], [0.5], None),
    ],
)
def test_crossing(ours, theirs, position):
    assert plots.crossing(ours, theirs) == position


def test_looks():
    assert Entry("start_sets").title == "start model, sets"
    assert Entry("my_method").title == "my_method"
    colors = [Entry(name).color for name in (*LOOKS, "my_method")]
    assert len(set(colors)) == len(colors)
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors)


def test_a_learning_rate_changes_the_title_and_the_line_but_not_the_color():
    main, other = Entry("grpo", 2e-5), Entry("grpo", 5e-5)
    assert (main.title, other.title) == ("GRPO at 2e-05", "GRPO at 5e-05")
    assert (main.line_style["ls"], other.line_style["ls"]) == ("-", ":")
    assert main.color == other.color == Entry("grpo").color


def test_best_at_k_of_several_learning_rates(tmp_path, drawn):
    """The other rate is dotted, and no ring compares policies that differ in more than the method."""
    policies = [Entry("grpo", 2e-5), Entry("vpo", 2e-5), Entry("vpo", 5e-5)]
    plots.best_at_k(make_report(policies=policies), tmp_path / "rates.svg")
    lines = drawn[0].axes[0].lines
    curves, intervals = lines[::2], lines[1::2]
    assert [line.get_label() for line in curves] == [policy.title for policy in policies]
    assert [line.get_linestyle() for line in curves] == ["-", "-", ":"]
    assert all(line.get_xdata()[0] > 6 for line in intervals), "beside the largest k"


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_every_figure_is_written_and_none_stays_open(tmp_path, suffix, drawn):
    pools = make_pools()
    logs = {
        Entry("grpo"): [
            {"step": i + 1, "diversity": 1 / (i + 1), "reward": i / 30} for i in range(30)
        ]
    }
    paths = [tmp_path / f"{name}.{suffix}" for name in ("best", "training", "vectors", "answers")]
    plots.best_at_k(make_report(), paths[0])
    plots.training(logs, 1.0, paths[1])
    plots.reward_vectors(pools, ["a", "b", "c"], paths[2])
    given = {name: ([["x"]] * 5, rewards) for name, rewards in pools.items()}
    assert plots.answers(given, problems(5), Squares(), paths[3])
    written = [path.read_bytes() for path in paths]
    assert all(len(data) > 1000 for data in written)
    if suffix == "svg":  # written again it is the same file
        plots.best_at_k(make_report(), paths[0])
        plots.training(logs, 1.0, paths[1])
        plots.reward_vectors(pools, ["a", "b", "c"], paths[2])
        assert plots.answers(given, problems(5), Squares(), paths[3])
        assert [path.read_bytes() for path in paths] == written
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )
    small = [
        (text.get_text(), text.get_size())
        for figure in drawn
        for text in figure.findobj(Text)
        if text.get_text() and text.get_size() < 8
    ]
    assert len(drawn) == 4 * (1 + (suffix == "svg")) and not small


def test_a_caption_counts_the_seeds_of_every_policy():
    report = make_report(seeds=2)
    assert "mean of 2 seeds" in report.caption()
    for name, values in report.measures[Entry("vpo")].items():
        report.measures[Entry("vpo")][name] = values[:1]
    assert "mean of 1 to 2 seeds, bands: 95% over seeds and problems" in report.caption()
    assert "one run, bands: 95% over problems" in make_report(seeds=1).caption()


def test_best_at_k_marks_the_crossing_and_names_the_bands(tmp_path, drawn):
    plots.best_at_k(make_report(), tmp_path / "one.svg")
    plots.best_at_k(
        make_report(passes=0.3, seeds=3, policies=[Entry("grpo"), Entry("vpo")]),
        tmp_path / "three.svg",
    )
    plots.best_at_k(
        make_report(policies=[Entry("start"), Entry("multi_rlvr"), Entry("new")]),
        tmp_path / "level.svg",
    )
    one, three, level = drawn
    assert texts(one).count("k = 2") == 2 and any("over problems" in text for text in texts(one))
    assert [len(figure.axes) for figure in drawn] == [
        2,
        3,
        2,
    ]  # no panel for pass@k where nothing passes
    assert (
        any("over seeds" in text for text in texts(three)) and "pass@k" in three.axes[2].get_title()
    )
    assert one.axes[0].get_ylim() == one.axes[1].get_ylim() != three.axes[2].get_ylim()
    assert [label.get_text() for label in one.axes[0].get_xticklabels()] == [
        "1",
        "2",
        "3",
        "6",
    ]  # 5 is too near to 6
    assert "new" in texts(level) and not any(
        "above" in text or text.startswith("k = ") for text in texts(level)
    )


def test_no_ring_where_the_order_may_be_noise(tmp_path, drawn):
    """VPO overtakes within the bands, or below the start model."""
    noisy = make_report()
    spread = torch.tensor([-9.0, 9.0]).repeat(10)
    below = make_report()
    for kind in ("best", "W"):
        noisy.measures[Entry("vpo")][f"{kind}@6"] += spread
        below.measures[Entry("start")][f"{kind}@2"] += 1
    plots.best_at_k(noisy, tmp_path / "noisy.svg")
    plots.best_at_k(below, tmp_path / "below.svg")
    for figure in drawn:
        assert not any(text.startswith("k = ") for text in texts(figure))


def test_training_smooths_around_the_step(tmp_path, drawn):
    rows = [{"step": i, "diversity": 2.0 * i, "reward": 0.5} for i in range(1, 21)]
    plots.training({Entry("vpo"): rows, Entry("new"): rows[:1]}, 0.8, tmp_path / "training.png")
    curve = next(line for line in drawn[0].axes[0].lines if line.get_label() == "VPO")
    assert curve.get_xydata()[0].tolist() == [5.5, 11.0] and len(curve.get_xdata()) == 11
    assert "temperature 0.8" in drawn[0].axes[0].get_title()
    assert {"VPO", "new", "start model (step 1)", "start model, sets (step 1)"} <= {
        *texts(drawn[0])
    }


def test_reward_vectors_show_the_conflict(tmp_path, drawn):
    gold = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.5]])
    rewards = gold[:, [0, 2, 1]].expand(
        4, 4, 3
    )  # the first and the last objective exclude each other
    pools = dict.fromkeys(("start", "vpo"), rewards)
    plots.reward_vectors(pools, ["gold", "lava", "gems"], tmp_path / "a.png")
    axes = drawn[0].axes
    assert [ax.get_title() for ax in axes] == [
        f"{name}\n3 distinct, 2 in this view" for name in ("start model", "VPO")
    ]
    assert {axes[0].get_xlabel(), axes[0].get_ylabel()} == {"gold", "gems"} and texts(
        axes[0]
    ).count("3") == 1
    padded = torch.zeros(2, 4, 4)  # k differs: the first problem has but two objectives
    padded[0, :, :2] = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1]])
    padded[1, :, :2] = padded[1, :2, 2] = padded[1, 2:, 3] = 1
    plots.reward_vectors(dict.fromkeys("abcde", padded), [], tmp_path / "b.png")
    axes = drawn[1].axes
    assert {axes[0].get_xlabel(), axes[0].get_ylabel()} == {"objective 1", "objective 2"}
    assert sum(ax.get_visible() for ax in axes) == 5
    below = next(
        text for text in drawn[0].findobj(Text) if text.get_text().startswith("Reward vectors")
    )
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    assert (
        below.get_window_extent(renderer).width < drawn[0].bbox.width
    )  # a long line, but two panels
    plots.reward_vectors(
        {"vpo": torch.ones(2, 4, 2)}, ["one", "two"], tmp_path / "c.png"
    )  # nothing varies
    assert {drawn[2].axes[0].get_xlabel(), drawn[2].axes[0].get_ylabel()} == {"one", "two"}
    plots.reward_vectors({"vpo": torch.full((2, 4, 1), -2.0)}, ["one"], tmp_path / "d.png")


@pytest.mark.parametrize("wide", [False, True])
def test_answers_count_the_problems_that_a_pool_solves(tmp_path, drawn, wide):
    task, pools = (
        Squares(),
        {name: ([["x", "y"]] * 3, torch.zeros(3, 2, 2)) for name in ("grpo", "vpo")},
    )
    task.wide = wide
    assert plots.answers(pools, problems(3), task, tmp_path / "a.png")
    assert len(drawn[0].axes) == 6 and {"GRPO", "VPO"} <= {*texts(drawn[0])}
    assert texts(drawn[0]).count(task.summary(torch.zeros(2, 2))) == 6
    pools["vpo"][1][:2, 1, 0] = 1  # half of it; all of it where a problem has but this objective
    own = {
        name: (given, [rewards[0][:, :1], *rewards[1:]]) for name, (given, rewards) in pools.items()
    }
    plots.answers(own, problems(3), task, tmp_path / "b.png")
    assert {"GRPO\nsolves 0 of 3 problems", "VPO\nsolves 1 of 3 problems"} <= {*texts(drawn[1])}
    assert any("1 objectives" in text for text in texts(drawn[1]))


def test_problems_in_columns_have_their_own_headings(tmp_path, drawn):
    task = Squares()
    task.wide = True
    pools = {name: ([["x"]] * 2, torch.zeros(2, 1, 2)) for name in ("start", "grpo", "vpo")}
    plots.answers(pools, problems(2), task, tmp_path / "a.png", columns=["one text", "another"])
    axes = drawn[0].axes
    assert [ax.get_ylabel() for ax in axes[::2]] == ["start model", "GRPO", "VPO"]
    assert axes[0].get_title("left").startswith("one text\n")
    assert axes[1].get_title("left").startswith("another\n")


def test_training_draws_entropy_where_all_logs_have_it(tmp_path, drawn):
    rows = [{"step": 1, "diversity": 1.0, "reward": 0.5, "answers": 1.0, "entropy": 2.0}]
    without = [{"step": 1, "diversity": 1.0, "reward": 0.5, "answers": 1.0}]
    plots.training({Entry("vpo"): rows}, 1.0, tmp_path / "a.png")
    plots.training({Entry("vpo"): rows, Entry("grpo"): without}, 1.0, tmp_path / "b.png")
    assert [len(figure.axes) for figure in drawn] == [4, 3]
    assert drawn[0].axes[3].get_ylabel() == "nats per token"


def test_a_task_without_a_picture_or_with_a_broken_one_writes_nothing(tmp_path, monkeypatch, drawn):
    import matplotlib

    pools, size = {"vpo": ([["x"]], torch.zeros(1, 1, 1))}, matplotlib.rcParams["axes.titlesize"]
    monkeypatch.setattr(Squares, "draw", lambda *_: False)
    assert plots.answers(pools, problems(1), Squares(), tmp_path / "a.svg") is False
    monkeypatch.setattr(Squares, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plots.answers(pools, problems(1), Squares(), tmp_path / "a.svg")
    assert not drawn and not [*tmp_path.iterdir()] and matplotlib.rcParams["axes.titlesize"] == size


def test_the_typical_problem_is_the_one_with_the_median_gap():
    spread = torch.tensor(
        [0.0, 4.0, 1.0, 9.0, 2.0]
    )  # diversity of VPO's pool per problem, GRPO's is none
    vpo = torch.stack([torch.zeros(5), spread], 1)[..., None]
    assert (
        plots.typical_problem(
            {"start": vpo + torch.rand(5, 2, 1), "grpo": torch.zeros(5, 2, 1), "vpo": vpo}
        )
        == 4
    )
    assert plots.typical_problem({"start": vpo, "vpo": vpo}) in range(5)


def test_problems_that_look_alike_are_drawn_once(tmp_path, drawn):
    pools = {"grpo": ([["x"]] * 3, torch.zeros(3, 1, 2))}
    same = [Problem(str(i), None) for i in range(3)]
    assert plots.answers(pools, same, Squares(), tmp_path / "a.png") is True
    assert len(drawn[0].axes) == 1 and "1 candidates per policy" in texts(drawn[0])


def test_a_table_says_in_words_what_it_shows():
    values = {
        "start": (0.5, 0.4, 0.5),
        "start_sets": (0.6, 0.3, 0.5),
        "grpo": (0.1, 0.6, 0.6),
        "vpo": (0.3, 0.5, 0.7),
    }
    measures = {}
    for name, (spread, first, all_of_them) in values.items():
        numbers = {"diversity": spread, "best@1": first, "W@30": all_of_them}
        measures[Entry(name)] = {key: torch.tensor([value]) for key, value in numbers.items()}
    report = EvalReport("run", "test", 1, 30, 0.7, measures, prompt_ids=None)
    diversity, one, several = report.in_words().splitlines()
    assert diversity.endswith("GRPO 20% (collapsed), VPO 50% (narrowed)")  # of its own start
    assert one.endswith("GRPO 0.600, VPO 0.500, start model 0.400")
    assert several.endswith("W@30: VPO 0.700, GRPO 0.600, start model 0.500")
