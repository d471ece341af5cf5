"""The model that a benchmark is of: its folder, by the name that was given."""

from __future__ import annotations

import json
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.convert.model_folder import CONFIG_FILE

REPOSITORY = Path(__file__).resolve().parents[1]


def saved(model: str) -> Path:
    """The folder of a model with weights: a path, or the quickstart's. Raises UserError for another name."""
    folder = REPOSITORY / "examples" / "quickstart" / "base" if model == "quickstart" else Path(model)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"--model {model} is no folder with {CONFIG_FILE}; --random-init takes names of configs/model")
    return folder


def drawn(model: str, layers: int | None, folder: Path) -> Path:
    """`folder`, with the config.json of a model to be drawn, and as many layers as were asked for.

    Raises UserError for a name that is neither a folder with one nor one of configs/model.
    """
    named = REPOSITORY / "examples" / "quickstart" / "base" if model == "quickstart" else Path(model)
    known = REPOSITORY / "configs" / "model"
    found = next((each for each in (named, known / model) if (each / CONFIG_FILE).is_file()), None)
    if found is None:
        names = ", ".join(sorted(each.name for each in known.iterdir() if (each / CONFIG_FILE).is_file()))
        raise UserError(f"--model {model} is no folder with {CONFIG_FILE}, nor one of configs/model ({names})")
    config = json.loads((found / CONFIG_FILE).read_text())
    if layers is not None:
        config |= {"num_hidden_layers": layers}
        # Its kinds of layers are read anew from the rest.
        config.pop("layer_types", None)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder
