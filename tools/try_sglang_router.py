"""Print what SGLang's own router does with requests that megasharp's engines get, beside the same requests without it.

    python3 -m venv .venv-router && .venv-router/bin/pip install sglang-router==0.3.2
    .venv/bin/python tools/try_sglang_router.py --router-python .venv-router/bin/python

Two real engines with tiny random models and a memory network, as in `tests/fleet/parity.py`, and the router before
them; requests are greedy, so that equal requests have equal answers. One engine is then killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / folder) for folder in ("fleet", "support")]

import engines  # noqa: E402 (its folder had to be named first)
import parity  # noqa: E402

_SETUP = "Qwen3 + Qwen3"
_START_S = 60.0
_AFTER_DEATH = 20
# What a token must come back with: docs/explanation/sglang.md.
_OURS = ("sampler_logprob", "policy_logprob", "memory_logprob", "argmax_moved", "calibration_kl", "weight_versions")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="SGLang's router in front of megasharp's engines.")
    parser.add_argument("--router-python", type=Path, required=True, help="a Python with sglang-router")
    python: Path = parser.parse_args().router_python
    with (
        tempfile.TemporaryDirectory() as folder,
        parity.pair_of(Path(folder) / "one", _SETUP) as one,
        parity.pair_of(Path(folder) / "two", _SETUP) as two,
        _router(python, Path(folder), [one.engine.port, two.engine.port]) as port,
    ):
        routed = replace(one.engine, port=port)
        _print_table(_answers(one.engine), _answers(routed))
        os.killpg(_leader(two.engine.port), signal.SIGKILL)
        assert _status(two.engine.port, {})[0] == 0, "it still answers"
        print(f"\nof {_AFTER_DEATH} requests, one every 0.5 s, once an engine was killed: {_statuses(routed)}")
    return 0


@contextmanager
def _router(python: Path, folder: Path, workers: Sequence[int]) -> Iterator[int]:
    """The port of a router before these engines, which hold the same weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    urls = [f"http://127.0.0.1:{worker}" for worker in workers]
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--api-key", engines.KEY]
    command = [str(python.absolute()), "-m", "sglang_router.launch_router", *options, "--worker-urls", *urls]
    with (folder / "router.log").open("wb") as log:
        router = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_S
        while _status(port, {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}})[0] != 200:
            if router.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "router.log").read_text(errors="replace")[-3000:])
            time.sleep(0.5)
        yield port
    finally:
        router.kill()
        router.wait()


def _answers(engine: engines.Engine) -> dict[str, str]:
    """What came of each question, in a few words."""
    prompt = parity.prompt_of(12, 1)
    found = {}
    for mu in (0.0, 0.9):
        status, answer = _status(engine.port, _body(prompt, mu))
        tokens = answer["output_ids"] if status == 200 else answer
        found[f"greedy tokens at mu = {mu:g}"] = " ".join(map(str, tokens))[:80]
    status, answer = _status(engine.port, _body(prompt, 0.9))
    present = [name for name in _OURS if name in answer["meta_info"]] if status == 200 else []
    found["of the figures per token"] = f"{len(present)} of {len(_OURS)}"
    custom = {"nu": 1.0}
    sampling = {"max_new_tokens": 2, "custom_params": custom}
    status, answer = _status(engine.port, {"input_ids": prompt, "sampling_params": sampling})
    found["custom_params that no engine takes"] = f"{status}"
    several = {**_body(prompt, 0.9), "input_ids": [prompt] * 2}
    status, answer = _status(engine.port, {**several, "sampling_params": [several["sampling_params"]] * 2})
    found["two samples, parameters for each"] = f"{status} {'' if status == 200 else str(answer)[:120]}"
    status, _ = _status(engine.port, {"rid": "none"}, "/abort_request")
    found["/abort_request"] = f"{status}"
    return found


def _body(prompt: Sequence[int], mu: float) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "custom_params": {"mu": mu}}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}


def _status(port: int, body: object, path: str = "/generate") -> tuple[int, Any]:
    """Status and JSON (or text); 0 where nothing answers."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {engines.KEY}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raw, status = response.read(), response.status
    except urllib.error.HTTPError as error:
        raw, status = error.read(), error.code
    except OSError as error:
        return 0, str(error)
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode("utf-8", "replace")


def _statuses(router: engines.Engine) -> str:
    found: Counter[int] = Counter()
    for seed in range(_AFTER_DEATH):
        found[_status(router.port, _body(parity.prompt_of(5, seed), 0.0))[0]] += 1
        time.sleep(0.5)
    return ", ".join(f"{count} with status {status}" for status, count in sorted(found.items()))


def _leader(port: int) -> int:
    """The process group of the engine that listens on `port`."""
    import psutil

    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    [pid] = {each.pid for each in listening if each.laddr and each.laddr.port == port}
    assert pid is not None
    return os.getpgid(pid)


def _print_table(direct: dict[str, str], routed: dict[str, str]) -> None:
    print("| | an engine | through the router |\n| --- | --- | --- |")
    for name, answer in direct.items():
        print(f"| {name} | {answer} | {routed[name]} |")


if __name__ == "__main__":
    sys.exit(main())
