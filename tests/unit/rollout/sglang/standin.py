"""A STAND-IN for an SGLang server: the same paths and answers, no model. Run as `python standin.py CONFIG.json`.

Its tokens are a function of prompt and seed, and its log-probs name the engine that sampled them. How it misbehaves is
said by the config's `sglang` table, or later by POST /standin, as {"<path>": "<deed>"}: `die` ends the process, `hang`
never answers, `fail` answers 500, `refuse` answers 400 with success=false, `lie` answers 200 with success=false;
{"delay": seconds} slows sampling (until it is told otherwise), {"version": "7"} is what /model_info then claims,
{"corrupt": {"<tensor>": "<checksum>"}} what /weights_checker does. {"running": n} is how many responses it samples at
once, {"max_total_tokens": n} the size of its cache; others queue, and time limits are kept.
{"barren": n} ends the first n responses without a token. GET /standin says what it holds.
Of the standard library (and NumPy once it has weights), so that it starts at once; it reads bucket files by their
description, not by our code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VOCABULARY = 50


class State:
    def __init__(self, config: dict) -> None:
        self.config = config
        self.behaviour = dict(config["sglang"])
        self.version = "default"
        self.session = self.paused = False
        self.loaded: dict[str, str] = {}
        self.announced: dict = {}
        self.stamps: list[list] = []
        self.groups: dict[str, list] = {}
        self.generated: list[int] = []
        self.names: list[str] = []
        self.barren = 0
        self.aborts = 0
        self.aborted: set[str] = set()
        self.asleep: set[str] = set()
        self.flushes = self.most_at_once = self.at_once = self.most_held = self.held = 0
        self.lock = threading.Lock()
        self.places = threading.BoundedSemaphore(self.behaviour.get("running", 64))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    state: State

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: dict | None) -> None:
        state, path = self.state, self.path.partition("?")[0]
        if not path.startswith("/health") and self.headers["Authorization"] != f"Bearer {state.config['api_key']}":
            return self.send(401, {"error": "no key"})
        if path == "/standin":
            if body is not None:
                state.behaviour = body
            return self.send(200, self.described())
        deed = state.behaviour.get(path)
        if deed == "die":
            print("the stand-in dies as told", flush=True)
            os._exit(3)
        if deed == "hang":
            time.sleep(3600)
        if deed in ("fail", "refuse", "lie"):
            status = {"fail": 500, "refuse": 400, "lie": 200}[deed]
            return self.send(status, {"success": False, "message": f"told to {deed}"})
        return self.send(*getattr(self, path.strip("/"))(body))

    def send(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def described(self) -> dict:
        state = self.state
        names = ("version", "loaded", "stamps", "groups", "generated", "flushes", "session", "paused")
        names += ("at_once", "most_at_once", "held", "most_held", "aborts")
        return {
            "pid": os.getpid(),
            "aborted": sorted(state.aborted),
            "asleep": sorted(state.asleep),
            **{name: getattr(state, name) for name in names},
        }

    def health(self, _: object) -> tuple[int, object]:
        return 200, {}

    def model_info(self, _: object) -> tuple[int, object]:
        return 200, {"weight_version": self.label()}

    def label(self) -> str:
        return self.state.behaviour.get("version", self.state.version)

    def server_info(self, _: object) -> tuple[int, object]:
        behaviour = self.state.behaviour
        said = {"megasharp": json.loads(behaviour.get("identity", "null"))}
        said["effective_max_running_requests_per_dp"] = behaviour.get("running", 64)
        tokens = behaviour.get("max_total_tokens", 777)
        return 200, {"max_req_input_len": 100, "max_total_num_tokens": tokens, "internal_states": [said]}

    def release_memory_occupation(self, body: dict) -> tuple[int, object]:
        self.state.asleep |= set(body["tags"])
        return 200, {}

    def resume_memory_occupation(self, body: dict) -> tuple[int, object]:
        self.state.asleep -= set(body["tags"])
        return 200, {}

    def generate(self, body: dict) -> tuple[int, object]:
        state = self.state
        if state.behaviour.get("die_on_token") in body["input_ids"][0]:
            os._exit(4)
        if max(map(max, body["input_ids"])) >= VOCABULARY:
            return 400, {"error": {"message": "token ids outside the vocabulary"}}
        [name], [tokens], [sampling] = body["rid"], body["input_ids"], body["sampling_params"]
        limits, came = sampling.get("custom_params", {}), time.monotonic()
        with state.lock:
            state.generated.append(tokens[0])
            state.names.append(name)
            state.held += 1
            state.most_held = max(state.most_held, state.held)
        began = self.began(name, came + limits.get("first_token_s", 1e9))
        ended = False
        if began:
            ended = self.sampled_for(name, time.monotonic() + limits.get("response_s", 1e9))
            state.places.release()
        with state.lock:
            state.held -= 1
        return 200, [self.sample(name, tokens, sampling, ended or not began, began)]

    def began(self, name: str, limit: float) -> bool:
        """Wait for a place; False where the time or the request ended first."""
        state = self.state
        while not state.places.acquire(timeout=0.01):
            if time.monotonic() > limit or name in state.aborted:
                return False
        with state.lock:
            state.barren += 1
            if state.barren <= state.behaviour.get("barren", 0):
                state.places.release()
                return False
        return True

    def sampled_for(self, name: str, limit: float) -> bool:
        """Take the time that sampling takes; True where it was cut short."""
        state, began = self.state, time.monotonic()
        with state.lock:
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
        while (cut := time.monotonic() < began + state.behaviour.get("delay", 0.0)) and name not in state.aborted:
            if time.monotonic() > limit:
                break
            time.sleep(0.01)
        with state.lock:
            state.at_once -= 1
        return cut

    def sample(self, name: str, tokens: list[int], sampling: dict, aborted: bool, began: bool) -> dict:
        count = int(began) if aborted else sampling["max_new_tokens"]
        drawn = sampled(tokens, sampling["sampling_seed"], count)
        mark = -1.0 - int(self.state.config["sglang"]["index"])
        meta = {
            "finish_reason": {"type": "abort" if aborted else "length"},
            "output_token_logprobs": [[mark, token, None] for token in drawn],
            "weight_versions": [{"version": self.label(), "start": 0, "end": count}],
        }
        if "mu" in sampling.get("custom_params", {}):
            mu = sampling["custom_params"]["mu"]
            meta |= {"sampler_logprob": [-mu] * count, "policy_logprob": [mark] * count}
            meta["memory_logprob"] = [None if self.state.behaviour.get("nan") else -9.0] * count
            meta["argmax_moved"], meta["calibration_kl"] = [1.0] * count, [0.25] * count
        return {"output_ids": drawn, "meta_info": meta}

    def abort_request(self, body: dict) -> tuple[int, object]:
        self.state.aborts += 1
        self.state.aborted |= set(self.state.names) if body.get("abort_all") else {body["rid"]}
        return 200, {}

    def pause_generation(self, _: dict) -> tuple[int, object]:
        self.state.paused = True
        return 200, {"status": "ok"}

    def continue_generation(self, _: dict) -> tuple[int, object]:
        self.state.paused = False
        return 200, {"status": "ok"}

    def flush_cache(self, _: dict) -> tuple[int, object]:
        self.state.flushes += 1
        return 200, {}

    def begin_weight_update(self, _: dict) -> tuple[int, object]:
        if self.state.session:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.state.session = True
        return 200, {"success": True, "message": "Success"}

    def end_weight_update(self, _: dict) -> tuple[int, object]:
        self.state.session = False
        return 200, {"success": True, "message": "Success"}

    def update_weights_from_tensor(self, body: dict) -> tuple[int, object]:
        if not self.state.session:
            return 400, {"success": False, "message": "must run between begin and end"}
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == self.state.config["tp"]
        kind, text = text_in(payloads[0])
        if kind == "file":
            self.state.loaded |= read(Path(text))
        else:
            assert kind == "announced"
            self.state.announced = json.loads(text)
            self.state.stamps.append(
                [self.state.announced["version"], self.state.announced["memory_version"], "weight_version" in body]
            )
        self.state.version = body.get("weight_version", self.state.version)
        return 200, {"success": True, "message": "Success"}

    def init_weights_update_group(self, body: dict) -> tuple[int, object]:
        self.state.groups[body["group_name"]] = [body["rank_offset"], body["world_size"], body["backend"]]
        return 200, {"success": True, "message": "Success"}

    def destroy_weights_update_group(self, body: dict) -> tuple[int, object]:
        known = self.state.groups.pop(body["group_name"], None) is not None
        return 200 if known else 400, {"success": known, "message": "The group to be destroyed does not exist."}

    def update_weights_from_distributed(self, body: dict) -> tuple[int, object]:
        assert self.state.session and body["group_name"] in self.state.groups
        assert body["names"] == [each["name"] for each in self.state.announced["tensors"]]
        self.state.loaded |= dict.fromkeys(body["names"], body["group_name"].split("-")[1])
        return 200, {"success": True, "message": "Success"}

    def weights_checker(self, _: dict) -> tuple[int, object]:
        found = {**self.state.loaded, **self.state.behaviour.get("corrupt", {})}
        return 200, {"success": True, "ranks": [{"checksums": found}] * self.state.config["tp"]}

    def update_weights_from_disk(self, body: dict) -> tuple[int, object]:
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            raw = file.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            for name, entry in json.loads(raw[8 : 8 + length]).items():
                if name != "__metadata__":
                    start, end = (8 + length + offset for offset in entry["data_offsets"])
                    self.state.loaded[name] = checksum(raw[start:end])
        self.state.version = body["weight_version"]
        return 200, {"success": True, "message": "Success"}


def sampled(tokens: list[int], seed: int, count: int) -> list[int]:
    digest = hashlib.sha256(repr((tokens, seed)).encode()).digest()
    return [byte % VOCABULARY for byte in digest[:count]]


def text_in(payload: str) -> tuple[str, str]:
    """What a pickle of [(kind, torch.ByteTensor(bytes))] says, read without torch."""
    sys.modules.setdefault("torch", types.SimpleNamespace(ByteTensor=bytes))  # type: ignore[arg-type]
    [(kind, raw)] = pickle.loads(base64.b64decode(payload))
    return kind, bytes(list(raw)).decode()


def checksum(raw: bytes) -> str:
    """As `megasharp.rollout.sglang.bucket` describes it."""
    import numpy as np

    x = np.frombuffer(raw + bytes(-len(raw) % 8), dtype="<u8").copy()
    x += np.arange(1, len(x) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(bits))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return f"{(len(raw) + int(x.sum(dtype=np.uint64))) % 2**64:016x}"


def read(path: Path) -> dict[str, str]:
    """The checksum of every tensor's bytes in a bucket file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    start = -(-(8 + length) // 64) * 64
    entries = json.loads(raw[8 : 8 + length])["tensors"]
    found = {}
    for entry in entries:
        begin = start + entry["offset"]
        found[entry["name"]] = checksum(raw[begin : begin + entry["nbytes"]])
        assert entry.get("checksum", found[entry["name"]]) == found[entry["name"]]
    return found


def main(path: str) -> None:
    config = json.loads(Path(path).read_text())
    start = config["sglang"].get("start")
    config["sglang"]["index"] = Path(path).stem.removeprefix("engine_")
    if start == "exit" and config["sglang"]["index"] == "1":
        print("Traceback ...\nOSError: [Errno 98] Address already in use", flush=True)
        sys.exit(1)
    if start == "portless":
        print(
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use", flush=True
        )
        time.sleep(3600)
    if start == "silent":
        print("loading forever", flush=True)
        time.sleep(3600)
    if start == "children":
        os.system("sleep 4321 &")
    Handler.state = State(config)
    Server((config["host"], config["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
