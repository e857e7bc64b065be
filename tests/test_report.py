"""The figures: what they say, that they are written, and that drawing leaves nothing behind."""

import shutil

import matplotlib
import pytest
import torch
from helpers import ROOT, Prose, table_of
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from engine.config import Config
from engine.evaluations import Evaluation, Pool, Row, Settings
from engine.files import add_record
from engine.tasks import load_task
from report import plots, style
from report.drawings import Drawing, FenceDrawing, drawing_of
from report.looks import LOOKS, look_of
from rewards import Fence, Problem, Task
from vpo import ADVANTAGES


class Squares(Drawing, Task):
    """A task whose answers can be drawn."""

    name = "squares"

    def draw(self, axes, problem, answers, color):
        axes.plot([0, len(answers)], [0, problem.data or 0], color=color)

    def summary(self, rewards):
        return f"{rewards.shape[1]} objectives, costs $2, then $3"


@pytest.fixture
def drawn(monkeypatch):
    figures, savefig = [], Figure.savefig

    def save(self, *args, **options):
        figures.append(self)
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


@pytest.mark.draws
@pytest.mark.parametrize("task", [Squares(), Prose()])
def test_the_figures_of_a_run(tmp_path, drawn, monkeypatch, task):
    """Guards against views that know our methods and tasks alone: both are of one's own here; against two methods of
    one's own that look alike; against files that differ where the numbers do not; and against older logs without a figure."""
    for name in ("my_method", "other_method"):
        monkeypatch.setitem(ADVANTAGES, name, ADVANTAGES["grpo"])
    colors = [look_of(name).color for name in (*LOOKS, "my_method", "other_method")]
    assert len(set(colors)) == len(colors)
    row = {"best@1": 0.1, "best@4": 0.2, "W@4": 0.3} | dict.fromkeys(plots.TRAINING_PANELS, 0.5)
    row["different"] = row.pop("distinct")  # as older logs name it
    (tmp_path / "my_method").mkdir()
    for step in range(1, 13):
        for log in ("metrics", "evaluations"):
            add_record(tmp_path / f"my_method/{log}.jsonl", row | {"step": step})
    problems = [Problem(str(i), i) for i in range(2)]
    mask = torch.ones(2, 2, dtype=torch.bool)
    pools = {}
    for seed, name in enumerate(("start", "start_sets", "my_method")):
        rewards = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(seed))
        pools[Row(name)] = Pool(problems, [["x"] * 4] * 2, rewards, rewards.mean(-1), mask)
    measures = {row: {"diversity": torch.arange(2.0)} for row in pools}
    evaluation = Evaluation(tmp_path, Config(pool=4), Settings("test", 2, 4, 0.7), tmp_path, {})
    written = []
    for _ in range(2):
        paths = plots.run_figures(evaluation, task, pools, measures, "svg")
        written.append([path.read_bytes() for path in paths])
    expected = [f"{name}.svg" for name in ("diversity", "progress", "reward_vectors")]
    if isinstance(task, Drawing):  # texts are read on the page
        expected.append("answers.svg")
    assert [path.name for path in paths] == expected and written[0] == written[1]
    words = drawn[0].get_supxlabel()
    assert "temperature 1 (the table's candidates: 0.7)" in words and "W@m: of a rollout" in words
    (own,) = [line for line in drawn[0].axes[0].lines if line.get_label() == "my_method"]
    assert own.get_color() == look_of("my_method").color
    assert own.get_xdata()[0] == 2, "the first mean of three steps lies at a whole one"

    shutil.rmtree(tmp_path / "my_method")  # a run without its logs is evaluated, too
    paths = plots.run_figures(evaluation, task, pools, measures, "svg")
    assert [path.name for path in paths] == expected[2:]


def test_a_film_of_fences_can_be_read(tmp_path, drawn):
    """Of three policies on a page of 830 pixels. Guards against a mean over candidates, by which GRPO seems to win."""
    fence = Fence()
    pools = {}
    painted = {"grpo": ["grey"] * 3, "vpo": ["red", "blue", "green"], "max_at_k": ["red"] * 3}
    for method, boards in painted.items():
        fences = [" ".join([board] * 6) for board in boards]
        rewards = [fence.reward(None, text) for text in fences]
        pools[look_of(method)] = ([fences], [torch.tensor(rewards)])
    plots.answers(pools, fence.problems("test", 1), drawing_of(fence), tmp_path / "a.png", "a film")
    (figure,) = drawn
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles == [f"best of 3 for each user: {best}" for best in ("0.35", "1.00", "0.33")]
    assert FenceDrawing.legend in figure.get_supxlabel() and figure.get_suptitle() == "a film"
    assert "row is a fence" in FenceDrawing.legend and "Ann likes red" in FenceDrawing.legend
    assert style.SMALL / 72 / figure.get_figwidth() * 830 >= 11


def test_the_color_blind_tell_fences_apart():
    """The light colors of the playground. Protanopia and deuteranopia: Machado and others, 2009."""
    css = (ROOT / "docs/playground.html").read_text("utf-8").partition("@media")[0]
    assert all(f"--{name}: {color}" in css for name, color in FenceDrawing.paint.items())
    colors = torch.tensor([to_rgb(color) for color in FenceDrawing.paint.values()])  # (4, 3)
    linear = torch.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    protan = [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]
    deutan = [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
    for matrix in (protan, deutan):
        seen = (linear @ torch.tensor(matrix).T).clamp(0, 1) ** (1 / 2.4)
        assert torch.pdist(seen).min() > 0.25


def test_a_figure_of_headlines_has_a_key(tmp_path, drawn):
    """Guards against a key to grey where no headline is, and headlines without the text that they are of."""
    task = load_task("headline")
    (problem,) = task.problems("test", 1)
    headline = f"{problem.data['event']} on {problem.data['day']}"
    for other, labels in ((headline, []), ("nonsense", ["earns nothing"])):
        texts = [headline, other]
        rewards = [task.reward(problem, text) for text in texts]
        pools = {look_of("vpo"): ([texts], [torch.tensor(rewards)])}
        plots.answers(pools, [problem], task, tmp_path / "a.png", "a film")
        (key,) = drawn[-1].legends
        assert key.get_title().get_text() == "a film", "a heading of the figure lies on its key"
        assert [text.get_text() for text in key.get_texts()] == [*task.objectives, *labels]
        assert problem.data["text"] in [text.get_text() for text in drawn[-1].axes[0].texts]


def test_reward_vectors_show_the_conflict(tmp_path, drawn):
    """The two objectives that exclude each other. Those that problems lack or that are constant have no correlation."""
    gold = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.5]])
    rewards = gold[:, [0, 2, 1]].expand(4, 4, 3)
    lower = torch.cat([rewards - 5, torch.full((4, 20, 3), -5.0)], 1)  # and many empty slots
    padded = torch.nn.functional.pad(rewards[..., :2], (0, 2))
    cases = [
        (rewards, ["gold", "lava", "gems"], 0.0, {"gold", "gems"}),
        (lower, ["gold", "lava", "gems"], -5.0, {"gold", "gems"}),
        (padded, [], 0.0, {"objective 1", "objective 2"}),
    ]
    for pool, objectives, minimum, shown in cases:
        pools = dict.fromkeys(map(look_of, "abcde"), pool)
        plots.reward_vectors(pools, 0, objectives, tmp_path / "a.png", minimum=minimum)
        axes = drawn[-1].axes[0]
        assert {axes.get_xlabel(), axes.get_ylabel()} == shown
        words = drawn[-1].get_supxlabel().replace("\n", " ")
        assert ("not shown: lava, which answers at 0, 0 may earn" in words) == bool(objectives)


@pytest.mark.parametrize("n_rows, is_crowded", [(6, False), (7, True)])
def test_many_curves_have_no_bands_and_no_rows_of_one_answer(n_rows, is_crowded, tmp_path, drawn):
    table = table_of()
    for row in (Row("vpo", 1), Row("max_at_k"), Row("group_vpo"))[: n_rows - 4]:
        table.measures[row] = table.measures[Row("grpo")]
    plots.best_at_k(table, tmp_path / "a.png")
    axes = drawn[-1].axes[0]
    assert len(axes.lines) == n_rows - is_crowded and bool(axes.collections) != is_crowded
    assert ("left out" in drawn[-1].get_supxlabel()) == is_crowded
    table.clusters = torch.zeros(20, dtype=torch.long)
    plots.best_at_k(table, tmp_path / "a.png")
    assert ("no bands: there is only one problem" in drawn[-1].get_supxlabel()) != is_crowded


@pytest.mark.draws
def test_a_pdf_has_truetype_fonts_and_a_users_own(tmp_path):
    """Guards against Type 3 fonts, which journals refuse, and DejaVu Sans where a matplotlibrc asks for another."""
    own = matplotlib.rc_context({"font.family": "DejaVu Serif", "text.usetex": True})
    with own, style.new_figure(1, 1, (2, 2)) as axes:
        axes[0, 0].set_title("a title")
        style.finish(axes, tmp_path / "a.pdf", "a caption")
    text = (tmp_path / "a.pdf").read_bytes()
    assert b"DejaVuSerif" in text and b"/CIDFontType2" in text
    assert b"DejaVuSans" not in text and b"/Type3" not in text
