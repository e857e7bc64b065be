"""The study's figure of best@k, and how its policies are named and drawn."""

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from study.entries import Entry
from study.eval_report import EvalReport, best_at_k, crossing

pytestmark = pytest.mark.draws


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
    assert crossing(ours, theirs) == position


def test_a_learning_rate_changes_the_title_and_the_line_but_not_the_color():
    main, other = Entry("grpo", 2e-5), Entry("grpo", 5e-5)
    assert (main.title, other.title) == ("GRPO at 2e-05", "GRPO at 5e-05")
    assert (main.line_style["ls"], other.line_style["ls"]) == ("-", ":")
    assert main.color == other.color == Entry("grpo").color


def test_best_at_k_of_several_learning_rates(tmp_path, drawn):
    """The other rate is dotted, and no ring compares policies that differ in more than the method."""
    policies = [Entry("grpo", 2e-5), Entry("vpo", 2e-5), Entry("vpo", 5e-5)]
    best_at_k(make_report(policies=policies), tmp_path / "rates.svg")
    lines = drawn[0].axes[0].lines
    curves, intervals = lines[::2], lines[1::2]
    assert [line.get_label() for line in curves] == [policy.title for policy in policies]
    assert [line.get_linestyle() for line in curves] == ["-", "-", ":"]
    assert all(line.get_xdata()[0] > 6 for line in intervals), "beside the largest k"


def test_a_caption_counts_the_seeds_of_every_policy():
    report = make_report(seeds=2)
    assert "mean of 2 seeds" in report.caption()
    for name, values in report.measures[Entry("vpo")].items():
        report.measures[Entry("vpo")][name] = values[:1]
    assert "mean of 1 to 2 seeds, bands: 95% over seeds and problems" in report.caption()
    assert "one run, bands: 95% over problems" in make_report(seeds=1).caption()


def test_best_at_k_marks_the_crossing_and_names_the_bands(tmp_path, drawn):
    best_at_k(make_report(), tmp_path / "one.svg")
    best_at_k(
        make_report(passes=0.3, seeds=3, policies=[Entry("grpo"), Entry("vpo")]),
        tmp_path / "three.svg",
    )
    best_at_k(
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
    best_at_k(noisy, tmp_path / "noisy.svg")
    best_at_k(below, tmp_path / "below.svg")
    for figure in drawn:
        assert not any(text.startswith("k = ") for text in texts(figure))
