"""The look of this project's pictures: resolution, colours, axes, and writing a figure to PNG."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megasharp.common.errors import UserError
from megasharp.common.files import completed

DPI = 150
INK, MUTED, GRID, PAPER = "#1f2328", "#6b7280", "#e5e7eb", "#ffffff"
LOSS = "#c2410c"
# Distinct also for people with the common forms of colour blindness (Okabe and Ito 2008, darkened for white).
COLOURS = ("#6b7280", "#0060a8", "#b8560f", "#00795a", "#a3478a", "#8a6d00")


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, sizes in inches. It draws by Agg and touches no global state of matplotlib."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes) -> None:
    """Give axes a light grid, no box and small grey tick labels."""
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write `path` as PNG in one step.

    Raises:
        UserError: the name does not end in .png, or the file cannot be written.
    """
    if path.suffix != ".png":
        raise UserError(f"{path}: pictures are PNG files; give a name that ends in .png")
    with completed(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)
    return path
