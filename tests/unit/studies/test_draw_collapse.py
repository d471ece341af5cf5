"""Pictures of docs/explanation/why-rlvr-collapses.md: the page shows what the tool draws, with its figures."""

from __future__ import annotations

import re
from pathlib import Path

import draw_collapse
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "why-rlvr-collapses.md"


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_the_page_shows_the_pictures_that_the_tool_draws() -> None:
    shown = re.findall(r"\.\./images/collapse/(\w+)\.png", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(draw_collapse.PICTURES)


def test_advantages_of_a_group_with_six_of_eight_correct() -> None:
    """GRPO's are (r - 3/4) / 0.4629; IAC takes a quarter of the positive ones, DS adds 0.3 times the log-prob."""
    grpo, iac, ds, negative = (heights(axes) for axes in draw_collapse.advantages().axes)
    assert grpo == pytest.approx([0.5401] * 6 + [-1.6202] * 2, abs=1e-4)
    assert iac == pytest.approx([0.1350] * 6 + [-1.6202] * 2, abs=1e-4)
    assert negative == pytest.approx([0.0] * 6 + [-1.6202] * 2, abs=1e-4)
    terms = [0.03, 0.06, 0.09, 0.15, 0.27, 0.48, -0.06, -0.36]
    assert ds == pytest.approx([a + term for a, term in zip(grpo, terms, strict=True)], abs=1e-9)


def test_a_batch_leaves_rare_correct_trajectories_with_less_than_they_had() -> None:
    """Of five, eight samples show the two most probable ones; of those that are not shown each loses."""
    base, sampled, known, smoothed = (heights(draw_collapse.selection().axes[1])[5 * i : 5 * i + 5] for i in range(4))
    assert all(after > before for before, after in zip(base[:2], sampled[:2], strict=True))
    assert all(after < before for before, after in zip(base[2:], sampled[2:], strict=True))
    assert [b / a for a, b in zip(base, known, strict=True)] == pytest.approx([known[0] / base[0]] * 5)
    assert smoothed[0] / smoothed[4] < known[0] / known[4]
