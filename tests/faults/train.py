"""`python -m tests.faults.train RUN_FOLDER train ...`: the command with the faults of the folder in FAULTS_FOLDER.

Ranks import this module before they begin, so what stands at its top level happens in them too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megasharp.cli.main import app
from megasharp.common.exit_codes import run_command
from tests.faults.injector import VARIABLE, Injector

_INJECTOR = Injector(Path(os.environ[VARIABLE]))
_INJECTOR.install()

if __name__ == "__main__":
    _INJECTOR.start(Path(sys.argv.pop(1)) / "checkpoints")
    run_command(app)
