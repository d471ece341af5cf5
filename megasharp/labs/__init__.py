"""The papers' own small studies, each in under a minute on a laptop: `megasharp toy NAME`.

A study is one module with a `STUDY`; its row here makes it a command.
"""

from __future__ import annotations

from megasharp.labs.actions import STUDY as ACTIONS
from megasharp.labs.bounds import STUDY as BOUNDS
from megasharp.labs.cats import STUDY as CATS
from megasharp.labs.smoothing import STUDY as SMOOTHING
from megasharp.labs.squeeze import STUDY as SQUEEZE
from megasharp.labs.study import Study
from megasharp.labs.tree import STUDY as TREE

STUDIES: dict[str, Study] = {study.name: study for study in (CATS, ACTIONS, TREE, BOUNDS, SQUEEZE, SMOOTHING)}
