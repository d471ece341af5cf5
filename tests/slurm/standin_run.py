"""A stand-in for `megasharp train`: counts steps, saves when USR1 comes, and ends as STANDIN says.

`saves`: USR1 makes it save and end with 75; started again after two saves it ends with 0. `stuck`: ends with 75 and has
saved nothing. `fails`: ends with 2. `waits`: does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

runs = Path(sys.argv[sys.argv.index("--runs") + 1])
latest = runs / os.environ["STANDIN_NAME"] / "checkpoints" / "latest"


def save(*_: object) -> None:
    latest.parent.mkdir(exist_ok=True)
    before = int(latest.read_text().removeprefix("step_")) if latest.exists() else 0
    latest.write_text(f"step_{before + 20:06d}\n")
    print(f"saved step {before + 20}", flush=True)
    sys.exit(75)


signal.signal(signal.SIGUSR1, save)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
mode = os.environ["STANDIN"]
print(f"{mode}, RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}", flush=True)
if mode == "stuck":
    sys.exit(75)
if mode == "fails":
    print("megasharp: the user's mistake", flush=True)
    sys.exit(2)
if mode == "saves" and latest.exists() and latest.read_text() == "step_000040\n":
    sys.exit(0)
time.sleep(600)
