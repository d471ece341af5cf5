"""Pictures: what they show is checked on the drawn pixels and on the helpers' numbers."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from megasharp.common.control import ControlState, LengthChange, LengthState, Reset, ResetState
from megasharp.common.errors import UserError
from megasharp.reporting.curves import Events, events_of, plot_runs, plot_training
from megasharp.reporting.passk import plot_frontier, plot_pass_at_k, spread
from megasharp.reporting.style import COLOURS, DPI, LOSS

BEFORE = {1: 0.13, 4: 0.4, 16: 0.7, 64: 0.9}
AFTER = {1: 0.3, 4: 0.5, 16: 0.65, 64: 0.78}


def pixels(path) -> np.ndarray:
    return matplotlib.image.imread(path)[..., :3]


def count(image: np.ndarray, colour: tuple[float, float, float]) -> int:
    return int((np.abs(image - np.array(colour)) < 0.02).all(axis=-1).sum())


def shade() -> tuple[float, float, float]:
    return tuple(1 - 0.16 * (1 - channel) for channel in to_rgb(LOSS))


def test_collapse_is_shaded_and_its_absence_is_not(tmp_path):
    collapsed = pixels(plot_pass_at_k({"before": BEFORE, "after": AFTER}, tmp_path / "a.png", "title"))
    better = {k: value + 0.05 for k, value in BEFORE.items()}
    healthy = pixels(plot_pass_at_k({"before": BEFORE, "after": better}, tmp_path / "b.png", "title"))
    assert collapsed.shape == (round(4.2 * DPI), round(6.4 * DPI), 3)
    assert count(collapsed, shade()) > 3000
    assert count(healthy, shade()) < 50
    for colour in COLOURS[:2]:
        assert count(collapsed, to_rgb(colour)) > 1000


@pytest.mark.parametrize(
    "curves",
    [
        {"only": {1: 0.0}},
        {"before": {1: 0.5}, "after": {1: 0.4}},
        {"before": dict.fromkeys(range(1, 200), 1.0), "after": {1: 0.2, 512: 0.9}},
        {f"method {number}": {1: 0.9, 2: 1.0} for number in range(8)},
    ],
)
def test_odd_curves_draw(tmp_path, curves):
    image = pixels(plot_pass_at_k(curves, tmp_path / "a.png", "title"))
    assert count(image, to_rgb(COLOURS[0])) > 50


def test_distinct_answers_have_a_line_that_no_curve_reaches(tmp_path):
    """Above the axes, whose head moves down for it: a curve at 1 does not cross the text."""
    whole = {1: 1.0, 64: 1.0}
    without = pixels(plot_pass_at_k({"before": whole}, tmp_path / "a.png", "title"))
    curves = {"before": whole, "after": AFTER, "with memory": BEFORE}
    image = pixels(plot_pass_at_k(curves, tmp_path / "b.png", "title", dict.fromkeys(curves, 3.25)))
    head, line = round((1 - 0.85) * 4.2 * DPI), round(0.045 * 4.2 * DPI)
    assert (without[head - 2 : head + 2] != 1.0).any()
    text = (image[head - line : head - 4] != 1.0).any(axis=-1)
    assert text.sum() > 500, "the line of counts"
    assert not text[:, int(0.98 * text.shape[1]) :].any(), "it fits"
    assert count(image[head + line - 3 : head + line + 3], to_rgb(COLOURS[0])) > 100, "the curve, below it"
    assert count(image, to_rgb(COLOURS[2])) > 1000, "a third curve"


def test_the_loss_is_told_where_no_curve_is(tmp_path):
    """The text's own colour, in the lower right where curves rise away from it, else in the upper left."""
    low = {k: 0.02 + value / 100 for k, value in BEFORE.items()}
    for curves, rows in (
        ({"before": BEFORE, "after": AFTER}, slice(420, None)),
        ({"before": BEFORE, "after": low}, slice(0, 180)),
    ):
        image = pixels(plot_pass_at_k(curves, tmp_path / "a.png", "title"))
        assert count(image[rows], to_rgb(LOSS)) == count(image, to_rgb(LOSS)) > 100


def test_a_frontier_has_a_numbered_point_and_a_name_for_each_row(tmp_path):
    rows = {"base": [(0.1, 0.9)], "grpo": [(0.2, 0.8), (0.3, 0.7)], "none": []}
    both = pixels(plot_frontier(rows, (1, 256), "title", tmp_path / "a.png"))
    alone = pixels(plot_frontier({"base": rows["base"]}, (1, 256), "title", tmp_path / "b.png"))
    assert count(both, to_rgb(COLOURS[1])) > 100 > 0 == count(alone, to_rgb(COLOURS[1]))
    assert count(both, to_rgb(COLOURS[2])) == 0
    with pytest.raises(UserError, match="nothing to draw"):
        plot_frontier({"none": []}, (1, 256), "title", tmp_path / "c.png")


def test_nothing_to_draw_is_one_line(tmp_path):
    for curves in ({}, {"before": {}}):
        with pytest.raises(UserError, match="nothing to draw"):
            plot_pass_at_k(curves, tmp_path / "a.png", "title")
    with pytest.raises(UserError, match="nothing to draw"):
        plot_training([{"step": 1, "loss": 0.5}], tmp_path / "a.png")
    with pytest.raises(UserError, match=r"ends in \.png"):
        plot_pass_at_k({"before": BEFORE}, tmp_path / "a.jpg", "title")
    assert list(tmp_path.iterdir()) == []


def test_labels_move_apart_and_stay_below_the_top():
    assert spread([0.1, 0.5], 0.1, 1.0) == [0.1, 0.5]
    assert spread([0.5, 0.5, 0.52], 0.1, 1.0) == pytest.approx([0.5, 0.6, 0.7])
    assert spread([0.95, 0.97, 0.99], 0.1, 1.0) == pytest.approx([0.8, 0.9, 1.0])


def test_training_curves_have_a_panel_per_figure(tmp_path):
    rows = [{"step": step, "time": 0.0, "reward/mean": 0.1 + step / 100} for step in range(1, 40)]
    narrow = pixels(plot_training(rows, tmp_path / "a.png"))
    rows += [{"step": 10, "reward/mean": None, "entropy/policy": 0.4}, {"step": 20, "entropy/policy": 0.3}]
    rows += [
        {"step": step, "eval/dev/pass@1": 0.2, "eval/dev/pass@4": 0.3, "eval/dev/pass@64": 0.9} for step in (0, 30)
    ]
    wide = pixels(plot_training(rows, tmp_path / "b.png"))
    assert wide.shape[1] - narrow.shape[1] == pytest.approx(3 * 2.7 * DPI, abs=2)
    panels = np.array_split(wide, 4, axis=1)
    assert all(count(panel, to_rgb(COLOURS[1])) > 100 for panel in panels)


def test_resets_and_stages_are_lines_after_the_step_they_followed(tmp_path):
    rows = [{"step": step, "reward/mean": 0.1} for step in range(1, 11)]
    resets = ResetState(done=(Reset(4, "every", ("reference",)), Reset(8, "every", ("reference",))))
    lengths = LengthState(1, changes=(LengthChange(3, 16, "step 3"), LengthChange(7, 4, "step 7")))
    events = events_of(ControlState(resets, lengths))
    assert events == Events((4, 8), ((3, 16), (7, 4)))
    assert events.explanation == "dashed: reset    dotted: response limit 16 after step 3, 4 after step 7"
    assert events_of(ControlState()).explanation == ""
    marked, without = (
        pixels(plot_training(rows, tmp_path / "a.png", one)) for one in (events, events_of(ControlState()))
    )
    # Thin lines are blended with the paper, so any red counts.
    red, none = (int((image[..., 0] - image[..., 1] > 0.1).sum()) for image in (marked, without))
    assert red > 200 and none == 0


def test_axes_of_runs_say_over_how_many_steps_their_lines_are_means(tmp_path, monkeypatch):
    """One number where the runs are as long, else the smallest and the largest; nothing where points are drawn."""
    drawn: list[Figure] = []
    monkeypatch.setattr("megasharp.reporting.curves.save_figure", lambda figure, path: drawn.append(figure) or path)

    def points(count: int) -> list[tuple[int, float]]:
        return [(step, 0.5) for step in range(count)]

    of_steps = {"a": points(200), "b": points(100), "c": points(20)}
    plot_runs({"reward/mean": of_steps}, tmp_path / "a.png")
    plot_runs({"loss": {"a": points(90)}, "eval/dev/pass@1": of_steps, "short": {"a": points(19)}}, tmp_path / "b.png")
    labels = [axes.get_xlabel() for figure in drawn for axes in figure.axes]
    assert labels == ["step (means over 3 to 20 steps)", "step (means over 9 steps)", "step", "step"]
