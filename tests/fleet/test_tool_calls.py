"""The calls that our parsers find in a turn are those that a user of SGLang's server would get."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from engines import PYTHON
from tool_calls import HERMES, LLAMA3
from waiting import HANG_S

pytestmark = pytest.mark.long("fleet")


def test_sglang_finds_the_same_calls() -> None:
    script = Path(__file__).with_name("sglang_calls.py")
    texts = [turn.text for turn in (*HERMES, *LLAMA3)]
    done = subprocess.run(
        [str(PYTHON), str(script)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for names, turns in ((("hermes", "qwen25"), HERMES), (("llama3",), LLAMA3)):
        for turn in turns:
            for name in names:
                calls = [(call, arguments) for call, arguments in found[texts.index(turn.text)][name]]
                assert calls == dict(turn.sglang).get(name, turn.calls), (name, turn.text)
