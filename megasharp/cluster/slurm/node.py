"""The program of one node of a job (`python -m megasharp.cluster.slurm.node --folder ATTEMPT -- COMMAND`), run by srun.

Node 0 runs the command; on several nodes Ray is started on each before, and the command finds it by RAY_ADDRESS. The
command's exit code is written to `exit_code` in the attempt's folder, by which the other nodes know that it is over. A
node whose Ray ends before is named in `ray_ended` there, by which the job knows that another start may help. A file
`time_is_up` there becomes SIGUSR1 for the command. The command begins with that signal blocked and unblocks it when it
listens (as `signals.save_heard` does), so none is lost. Where the file is there first, the command is not started.
SIGTERM and Ctrl-C are passed on to the command; while nodes still join, they end this program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from megasharp.cluster.slurm import ray_node
from megasharp.cluster.slurm.ray_node import RayNode, follow_until_ready, publish
from megasharp.common.errors import RunFailed, UserError
from megasharp.common.exit_codes import run_command
from megasharp.common.files import write_text
from megasharp.common.group_environment import adapters
from megasharp.common.signals import AGAIN, SAVE, Stopped, TimeIsUp, save_kept_from_children

TIME_IS_UP, EXIT_CODE, RAY_ENDED = "time_is_up", "exit_code", "ray_ended"
DEADLINE = "MEGASHARP_JOIN_SECONDS"
_POLL_S = 0.5


class _Signals:
    """SIGTERM and Ctrl-C, kept for the command. USR1 is ignored here."""

    def __init__(self) -> None:
        self.arrived: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.signal(SAVE, signal.SIG_IGN)

    def check(self) -> None:
        """Raise `Stopped`, after one line, if one has arrived: for where no command runs that it could be passed to."""
        if self.arrived is not None:
            stopped = Stopped(signal.Signals(self.arrived), "the command was not started, for not all nodes had joined")
            sys.stderr.write(f"megasharp: {stopped}\n")
            raise stopped

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.arrived = number


def main() -> None:
    """Run the program. Raises UserError, which ends it with one line and 2, or RunFailed: 1."""
    arguments = sys.argv[1:]
    if len(arguments) < 4 or arguments[0] != "--folder" or arguments[2] != "--":
        raise UserError("usage: python -m megasharp.cluster.slurm.node --folder ATTEMPT -- COMMAND")
    folder, command = Path(arguments[1]), arguments[3:]
    names = os.environ.get("MEGASHARP_NODES", "").split(",")
    number = int(os.environ.get("SLURM_NODEID", "0"))
    deadline = time.monotonic() + float(os.environ.get(DEADLINE, "600"))
    signals = _Signals()
    if number == 0:
        try:
            code = _lead(folder, command, names, deadline, signals)
        except (Stopped, TimeIsUp) as ended:
            _record(folder, ended.code)
            raise
        except UserError as error:
            _record(folder, error.exit_code)
            raise
        sys.exit(code)
    _follow(folder, names, number, deadline, signals)


def _lead(folder: Path, command: Sequence[str], names: Sequence[str], deadline: float, signals: _Signals) -> int:
    if len(names) == 1:
        return drive(command, {}, folder, signals)
    interface = ray_node.choose(ray_node.interfaces(), names[1:], os.environ)
    os.environ.update(ray_node.variables(interface, adapters()))
    with ExitStack() as stack:
        node = RayNode(names[0], interface, deadline)
        stack.callback(node.close)
        node.lead()
        publish(folder, "head", node.address)
        node.await_nodes(names, lambda: _check(folder, signals))
        publish(folder, "ready", " ".join(names))
        address = {"RAY_ADDRESS": node.address}
        return drive(command, address, folder, signals, lambda: _check_ray(node, folder, names[0]))


def _record(folder: Path, code: object) -> None:
    write_text(folder / EXIT_CODE, f"{code}\n")


def _check(folder: Path, signals: _Signals) -> None:
    signals.check()
    if (folder / TIME_IS_UP).exists():
        raise TimeIsUp("time is nearly up and not all nodes have joined; the command is left to the next start")


def _follow(folder: Path, names: Sequence[str], number: int, deadline: float, signals: _Signals) -> None:
    interface = ray_node.choose(ray_node.interfaces(), names[:1], os.environ)
    os.environ.update(ray_node.variables(interface, adapters()))
    over = folder / EXIT_CODE
    with ExitStack() as stack:
        node = RayNode(names[number], interface, deadline)
        stack.callback(node.close)
        follow_until_ready(node, folder, deadline, over, signals.check)
        while not over.exists():
            if signals.arrived is not None:
                sys.exit(128 + signals.arrived)
            _check_ray(node, folder, names[number])
            time.sleep(_POLL_S)


def _check_ray(node: RayNode, folder: Path, name: str) -> None:
    if node.ended():
        write_text(folder / RAY_ENDED, f"{name}\n")
        raise RunFailed(f"node {name}: Ray ended here while the run was under way; see above")


def drive(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    signals: _Signals,
    check: Callable[[], object] = bool,
) -> int:
    """Run the command to its end; return its exit code, or 128 + the number of a signal that ended it.

    The code is recorded here, before this node's Ray ends, because those of other nodes may end with it. It is 75, and
    nothing is run, where time is up already. `check` is called now and then; where it raises, the command is
    killed.
    """
    if (folder / TIME_IS_UP).exists():
        _record(folder, AGAIN)
        return AGAIN
    with save_kept_from_children():
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
    passed_on: int | None = None
    asked = False
    try:
        while process.poll() is None:
            if signals.arrived is not None and passed_on is None:
                passed_on = signals.arrived
                process.send_signal(passed_on)
            if not asked and (folder / TIME_IS_UP).exists():
                asked = True
                process.send_signal(SAVE)
            check()
            time.sleep(_POLL_S)
    except RunFailed:
        process.kill()
        process.wait()
        raise
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    _record(folder, code)
    return code


if __name__ == "__main__":
    run_command(main)
