"""The papers' own small studies and one of ours, each in under a minute on a laptop: `megasharp toy NAME`.

A study is one module with a `STUDY`; its row here makes it a command.
"""

from __future__ import annotations

from megasharp.studies.actions import STUDY as ACTIONS
from megasharp.studies.bounds import STUDY as BOUNDS
from megasharp.studies.cats import STUDY as CATS
from megasharp.studies.corrections import STUDY as CORRECTIONS
from megasharp.studies.smoothing import STUDY as SMOOTHING
from megasharp.studies.squeeze import STUDY as SQUEEZE
from megasharp.studies.study import Study
from megasharp.studies.tree import STUDY as TREE

STUDIES: dict[str, Study] = {
    study.name: study for study in (CATS, ACTIONS, TREE, BOUNDS, SQUEEZE, SMOOTHING, CORRECTIONS)
}
