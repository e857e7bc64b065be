"""The figures: what they say, that they are written, and that drawing leaves nothing behind."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from engine.config import Config
from engine.looks import LOOKS, look_of
from eval import Pool
from report import plots
from report.plots import TrainingCurve
from rewards import Drawing, Problem, Task, UserError
from vpo import ADVANTAGES


def problems(n: int) -> list[Problem]:
    return [Problem(str(i), i) for i in range(n)]


class Squares(Drawing, Task):
    """A task whose answers can be drawn."""

    name = "squares"

    def draw(self, axes, problem, answers, color):
        axes.plot([0, len(answers)], [0, problem.data or 0], color=color)

    def summary(self, rewards):
        return f"{rewards.shape[1]} objectives, costs $2, then $3"


class Plain(Task):
    """A task of one's own without drawings, whose objectives have no names."""

    name = "plain"


def make_pools(names=("start", "grpo", "vpo"), N=5, n=8, k=3):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(N, n, k, generator=generator).mul(3).round() / 3 for name in names}


def curve(method: str, rows: list[dict]) -> TrainingCurve:
    return TrainingCurve(method, look_of(method), rows)


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


def test_looks(monkeypatch):
    """Guards against two methods of one's own that look alike in a figure."""
    for name in ("my_method", "other_method"):
        monkeypatch.setitem(ADVANTAGES, name, ADVANTAGES["grpo"])
    assert look_of("start_sets").title == "start model, sets"
    assert look_of("my_method").title == "my_method"
    colors = [look_of(name).color for name in (*LOOKS, "my_method", "other_method")]
    assert len(set(colors)) == len(colors)
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors)
    assert look_of("not_registered").color == look_of("my_method").color


@pytest.mark.draws
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_every_figure_is_written_and_none_stays_open(tmp_path, suffix, drawn):
    pools = make_pools()
    rows = [{"step": i + 1, "diversity": 1 / (i + 1), "reward": i / 30} for i in range(30)]
    given = {name: ([["x"]] * 5, rewards) for name, rewards in pools.items()}
    paths = [tmp_path / f"{name}.{suffix}" for name in ("training", "vectors", "answers")]

    def draw_all() -> list[bytes]:
        plots.training([curve("grpo", rows)], 1.0, paths[0])
        plots.reward_vectors(pools, ["a", "b", "c"], paths[1])
        plots.answers(given, problems(5), Squares(), paths[2])
        return [path.read_bytes() for path in paths]

    written = draw_all()
    assert all(len(data) > 1000 for data in written)
    if suffix == "svg":  # written again it is the same file
        assert draw_all() == written
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )
    small = [
        (text.get_text(), text.get_size())
        for figure in drawn
        for text in figure.findobj(Text)
        if text.get_text() and text.get_size() < 8
    ]
    assert len(drawn) == 3 * (1 + (suffix == "svg")) and not small


@pytest.mark.draws
@pytest.mark.parametrize("task, names", [(Squares(), ["answers"]), (Plain(), [])])
def test_the_figures_of_a_run(tmp_path, drawn, monkeypatch, task, names):
    """Guards against views that know our methods and tasks alone: both are of one's own here."""
    monkeypatch.setitem(ADVANTAGES, "my_method", ADVANTAGES["grpo"])
    (tmp_path / "my_method").mkdir()
    row = {"step": 1, "diversity": 1.0, "reward": 0.5, "answers": 1.0, "entropy": 2.0}
    (tmp_path / "my_method/metrics.jsonl").write_text(json.dumps(row) + "\n")
    mask = torch.ones(2, 2, dtype=torch.bool)
    pools = {}
    for name, rewards in make_pools(("start", "start_sets", "my_method"), 2, 4, 2).items():
        pools[name] = Pool(problems(2), [["x"] * 4] * 2, rewards, rewards.mean(-1), mask)
    evaluation = SimpleNamespace(run=tmp_path, folder=tmp_path, config=Config())
    paths = plots.run_figures(evaluation, task, pools, "svg")
    expected = [tmp_path / f"{name}.svg" for name in ("diversity", "reward_vectors", *names)]
    assert paths == expected and all(path.stat().st_size for path in paths)
    assert "my_method" in texts(drawn[0])
    own = [line for line in drawn[0].axes[0].lines if line.get_label() == "my_method"]
    assert own[0].get_color() == look_of("my_method").color
    assert {"objective 1", "objective 2"} <= {*texts(drawn[1])}

    (tmp_path / "my_method/metrics.jsonl").unlink()  # a run without its logs is evaluated, too
    assert plots.run_figures(evaluation, task, pools, "svg") == expected[1:]


def test_training_smooths_around_the_step(tmp_path, drawn):
    rows = [{"step": i, "diversity": 2.0 * i, "reward": 0.5} for i in range(1, 21)]
    curves = [curve("vpo", rows), curve("new", rows[:1]), curve("grpo", [])]
    plots.training(curves, 0.8, tmp_path / "training.png")
    line = next(line for line in drawn[0].axes[0].lines if line.get_label() == "VPO")
    assert line.get_xydata()[0].tolist() == [5.5, 11.0] and len(line.get_xdata()) == 11
    shown = {*texts(drawn[0])}
    assert any("temperature 0.8" in text for text in shown)
    assert all(ax.get_ylim()[0] == 0 for ax in drawn[0].axes), "0.35 would tower above 0.34"
    assert {"VPO", "new", "start model (step 1)", "start model, sets (step 1)"} <= shown
    assert "GRPO" not in shown


def test_training_draws_entropy_where_all_logs_have_it(tmp_path, drawn):
    rows = [{"step": 1, "diversity": 1.0, "reward": 0.5, "answers": 1.0, "entropy": 2.0}]
    without = [{"step": 1, "diversity": 1.0, "reward": 0.5, "answers": 1.0}]
    plots.training([curve("vpo", rows)], 1.0, tmp_path / "a.png")
    plots.training([curve("vpo", rows), curve("grpo", without)], 1.0, tmp_path / "b.png")
    assert [len(figure.axes) for figure in drawn] == [4, 3]
    assert drawn[0].axes[3].get_ylabel() == "nats per token"


def test_reward_vectors_show_the_conflict(tmp_path, drawn):
    gold = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.5]])
    # The first and the last objective exclude each other.
    rewards = gold[:, [0, 2, 1]].expand(4, 4, 3)
    pools = dict.fromkeys(("start", "vpo"), rewards)
    plots.reward_vectors(pools, ["gold", "lava", "gems"], tmp_path / "a.png")
    axes = drawn[0].axes
    titles = [f"{name}\n3 different, 2 in this view" for name in ("start model", "VPO")]
    assert [ax.get_title() for ax in axes] == titles
    assert {axes[0].get_xlabel(), axes[0].get_ylabel()} == {"gold", "gems"}
    assert texts(axes[0]).count("3") == 1
    assert any(text.endswith("2 of 3 objectives are shown") for text in texts(drawn[0]))

    lower = torch.cat([rewards - 5, torch.full((4, 20, 3), -5.0)], 1)  # and many empty slots
    plots.reward_vectors({"vpo": lower}, ["gold", "lava", "gems"], tmp_path / "e.png", minimum=-5.0)
    axes = drawn.pop().axes
    assert {axes[0].get_xlabel(), axes[0].get_ylabel()} == {"gold", "gems"}

    padded = torch.zeros(2, 4, 4)  # k differs: the first problem has but two objectives
    padded[0, :, :2] = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1]])
    padded[1, :, :2] = padded[1, :2, 2] = padded[1, 2:, 3] = 1
    plots.reward_vectors(dict.fromkeys("abcde", padded), [], tmp_path / "b.png")
    axes = drawn[1].axes
    assert {axes[0].get_xlabel(), axes[0].get_ylabel()} == {"objective 1", "objective 2"}
    assert sum(ax.get_visible() for ax in axes) == 5

    below = [text for text in drawn[0].findobj(Text) if text.get_text().startswith("Reward")]
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    width = below[0].get_window_extent(renderer).width
    assert width < drawn[0].bbox.width, "a long line, but two panels"

    constant = {"vpo": torch.ones(2, 4, 2)}
    plots.reward_vectors(constant, ["one", "two"], tmp_path / "c.png")
    assert {drawn[2].axes[0].get_xlabel(), drawn[2].axes[0].get_ylabel()} == {"one", "two"}
    plots.reward_vectors({"vpo": torch.full((2, 4, 1), -2.0)}, ["one"], tmp_path / "d.png")


@pytest.mark.parametrize("wide", [False, True])
def test_answers_count_the_problems_that_a_pool_solves(tmp_path, drawn, wide):
    task = Squares()
    task.wide = wide
    pools = {name: ([["x", "y"]] * 3, torch.zeros(3, 2, 2)) for name in ("grpo", "vpo")}
    plots.answers(pools, problems(3), task, tmp_path / "a.png")
    assert len(drawn[0].axes) == 6 and {"GRPO", "VPO"} <= {*texts(drawn[0])}
    assert texts(drawn[0]).count(task.summary(torch.zeros(2, 2))) == 6
    # Half of it; all of it where a problem has but this objective.
    pools["vpo"][1][:2, 1, 0] = 1
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


def test_a_drawing_that_fails_is_named_and_leaves_nothing(tmp_path, monkeypatch, drawn):
    """Guards against a traceback of the user's code after the evaluation's minutes."""
    import matplotlib

    pools = {"vpo": ([["x"]], torch.zeros(1, 1, 1))}
    size = matplotlib.rcParams["axes.titlesize"]
    for method, place in (("draw", "draw of problem '0' failed"), ("summary", "summary failed")):
        with monkeypatch.context() as patch:
            patch.setattr(Squares, method, lambda *_: 1 / 0)
            with pytest.raises(UserError, match=f"task squares: {place}.*ZeroDivisionError"):
                plots.answers(pools, problems(1), Squares(), tmp_path / "a.svg")
    assert not drawn and not [*tmp_path.iterdir()]
    assert matplotlib.rcParams["axes.titlesize"] == size


def test_a_summary_without_names_of_objectives():
    """Guards against a zip of no names with k means."""

    class Nameless(Drawing, Task):
        pass

    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert plots.summary_of(Nameless(), rewards) == "mean reward 0.25"
    assert plots.summary_of(Plain(), rewards) == "1 of 2 earn something"


def test_the_typical_problem_is_the_one_with_the_median_gap():
    # The diversity of VPO's pool per problem; GRPO's is none.
    spread = torch.tensor([0.0, 4.0, 1.0, 9.0, 2.0])
    vpo = torch.stack([torch.zeros(5), spread], 1)[..., None]
    start = vpo + torch.rand(5, 2, 1)
    pools = {"start": start, "grpo": torch.zeros(5, 2, 1), "vpo": vpo}
    assert plots.typical_problem(pools) == 4
    assert plots.typical_problem({"start": vpo, "vpo": vpo}) in range(5)


def test_problems_that_look_alike_are_drawn_once(tmp_path, drawn):
    pools = {"grpo": ([["x"]] * 3, torch.zeros(3, 1, 2))}
    same = [Problem(str(i), None) for i in range(3)]
    plots.answers(pools, same, Squares(), tmp_path / "a.png")
    assert len(drawn[0].axes) == 1 and "1 candidates per policy" in texts(drawn[0])
