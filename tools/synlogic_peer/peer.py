"""The other end of `their_process.py`: a verdict of SynLogic's verifier for each response."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = Path(__file__).with_name("their_process.py")
# A process that does not answer is killed and begun again: a verifier may be in code that no alarm interrupts.
LONGEST_S = 20
LONGEST_GENERATION_S = 600
KILLED = "killed"


class Peer:
    """A process of SynLogic's code, begun again where it hangs.

    Example: `with Peer(Path("/tmp/venv/bin/python"), Path("/tmp/SynLogic")) as peer: peer.verdict(task, data, text)`.
    """

    def __init__(self, python: str, repository: Path) -> None:
        self._command = [python, "-I", str(PROGRAM), str(repository)]
        self._process = self._start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def generate(
        self, module: str, name: str, options: Mapping[str, Any], count: int, seed: int
    ) -> list[dict[str, Any]]:
        """Games of a generator. Raises RuntimeError with what it raised."""
        asked = {"generate": [module, name, options], "count": count, "seed": seed}
        answer = self._ask(asked, LONGEST_GENERATION_S)
        if not isinstance(answer, list):
            raise RuntimeError(f"{module}: {answer}")
        return answer

    def verdict(self, task: str, data: Mapping[str, Any], text: str) -> bool | str:
        """Their verdict; a text, the name of the error, where it raised or took too long."""
        answer = self._ask({"task": task, "data": data, "text": text}, LONGEST_S)
        return answer if isinstance(answer, bool) else str(answer)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def _ask(self, asked: Mapping[str, Any], limit_s: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        watch = threading.Timer(limit_s, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if line:
            return json.loads(line)
        if self._process.wait() > 0:
            raise RuntimeError(f"{' '.join(self._command)} ended; run it by hand to see why")
        self._process = self._start()
        return KILLED
