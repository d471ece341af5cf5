"""The page of some runs: read from their histories, written as one HTML file, and served on the loopback address.

The file contains its styles and scripts and loads nothing from a network. Text of models and users is in it as JSON
only, with `<`, `>` and `&` escaped, so that no text can end the script element that contains it; the scripts make text
nodes of it. The page's own policy (CSP) allows only its one script, by hash, and no loading; a served page may ask its
own server.

The server builds the page again when the runs' files have changed. It listens on 127.0.0.1 only, which every user of
the machine reaches, so each request must hold the token of the printed URL. Requests must also name this address or
localhost: otherwise a page of another site could read this one by giving its own name this address.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socket import socket
from urllib.parse import parse_qs, urlsplit

from megasharp.algos import METHODS
from megasharp.common.errors import UserError, one_line
from megasharp.evals.result import EvalResult
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import RunHistory, by_label, goodput, read_run
from megasharp.reporting.number_text import duration
from megasharp.reporting.page.evaluations import (
    choose_models,
    pass_at_k_figures,
    probed_steps,
    probes,
    read_results,
    success_figures,
)
from megasharp.reporting.page.metrics import figures, marks, stages, words
from megasharp.reporting.page.records import Difference, Page, Run
from megasharp.reporting.page.responses import read_rollouts
from megasharp.reporting.page.stored import read_stored
from megasharp.reporting.show import collapse, differences, peak_of, restarts, warnings

_TELEMETRY = "gpu/utilisation"


def read_page(folders: Sequence[Path], *, live: bool, evals: Sequence[Path] = ()) -> Page:
    """Return the page of the runs in `folders`, and of the JSON files `evals` that `megasharp eval` wrote.

    Raises UserError for damaged files, and for a run that is named twice.
    """
    beside = {path: load_result(path) for path in evals}
    return collect(by_label([read_run(folder) for folder in folders], "report"), live=live, beside=beside)


def collect(histories: Mapping[str, RunHistory], *, live: bool, beside: Mapping[Path, EvalResult]) -> Page:
    """Collect the page of runs, by their names on it, and of evaluations besides, by their JSON files.

    Raises UserError where a file of a run is damaged.
    """
    names, runs = list(histories), list(histories.values())
    results, unread = read_results(runs)
    evaluated = [{step for number, step, _ in results if number == place} for place in range(len(runs))]
    steps = [at | {*probed_steps(run.folder)} for at, run in zip(evaluated, runs, strict=True)]
    models = choose_models(runs, names, steps, [*beside.values()])
    stored, unread_samples = read_stored(runs, names, beside)
    responses = read_rollouts(runs)
    success = success_figures(results, models)
    differ = differences(runs) if len(runs) > 1 else {}
    timed = [stages(number, run) for number, run in enumerate(runs)]
    unmetered = [name for name, run in histories.items() if not run.series(_TELEMETRY)]
    telemetry = (
        f"No NVML telemetry was recorded by {', '.join(unmetered)}: it needs an NVIDIA GPU on the driver's node."
        if unmetered
        else ""
    )
    return Page(
        title=", ".join(names or dict.fromkeys(result.label for result in beside.values())),
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        live=live,
        last_step=max((step for run in runs for step in (run.last_step, *run.evaluations)), default=0),
        words=words(runs, names, results),
        unread=[*unread, *unread_samples],
        runs=[_run(name, run, _what(run, place, differ)) for place, (name, run) in enumerate(histories.items())],
        models=models.all,
        differences=[Difference(key, values) for key, values in differ.items()],
        figures=figures(runs, results),
        pass_at_k=pass_at_k_figures(results, models),
        success=[*success, *([responses.success] if responses.success else [])],
        probes=probes(runs, models),
        stored=stored,
        rollouts=responses.shown,
        code_errors=responses.code_errors,
        stages=[one for one in timed if one is not None],
        telemetry=telemetry,
    )


def _run(name: str, run: RunHistory, what: str) -> Run:
    of = f" of {run.steps}" if run.steps else ""
    spent = goodput(run)
    facts = [f"{run.state}, step {run.last_step}{of}", restarts(run), f"{run.tokens:,} response tokens"]
    if (peak := peak_of(run)) is not None:
        facts.append(peak.line)
    if spent.share is not None:
        facts.append(f"wall time {duration(spent.wall)}, goodput {spent.share:.0%}")
    # The page's first sentences report collapse, with intervals.
    beside = [line for line in warnings(run) if line not in [*collapse(run)]]
    facts.append(f"seed {run.config.get('seed', 'unknown')}")
    return Run(name, str(run.folder), what, facts, marks(run), beside)


# Keys on a run's card; the table of settings has all of them.
_MOST_KEYS = 4
# Said elsewhere on the card.
_ON_CARD = ("seed", "recipe.methods")


def _what(run: RunHistory, place: int, differ: Mapping[str, Sequence[str]]) -> str:
    """Name the methods of run number `place`, each with the options that are not its defaults, and keys that differ."""
    recipe = run.config.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    methods = recipe.get("methods")
    parts = [_with_options(name, recipe.get(name)) for name in methods] if isinstance(methods, list) else []
    named = tuple(f"recipe.{name}." for name in METHODS)
    keys = [key for key in differ if key not in _ON_CARD and not key.startswith(named)]
    shown = [f"{key} {differ[key][place]}" for key in keys[:_MOST_KEYS]]
    more = [f"{len(keys) - _MOST_KEYS} more"] if len(keys) > _MOST_KEYS else []
    return "; ".join(line for line in (", ".join(parts), ", ".join([*shown, *more])) if line)


def _with_options(name: str, options: object) -> str:
    usual = METHODS[name].Params().model_dump(mode="json") if name in METHODS else {}
    given = options.items() if isinstance(options, dict) else ()
    own = ", ".join(f"{key} {value}" for key, value in given if usual.get(key) != value)
    return f"{name} ({own})" if own else name


_LIBRARY = "vendor/uPlot"
_SCRIPTS = (
    *("dom.js", "series.js", "plot.js", "charts.js", "bars.js", "matrix.js", "turns.js", "browser.js"),
    *("stored.js", "chosen.js", "curves.js", "page.js", "live.js"),
)
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_json(page: Page) -> str:
    """Return the page's JSON, safe inside of a script element. Halves of surrogate pairs become U+FFFD."""
    text = json.dumps(asdict(page), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    readable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], readable)


def as_html(page: Page) -> str:
    """Return the whole HTML file."""
    # One strict script: `"use strict"` has an effect only at its beginning. The licence travels with the library.
    library = f"/*\n{_static(f'{_LIBRARY}.LICENSE')}\n*/\n{_static(f'{_LIBRARY}.iife.min.js')}"
    own = (_static(name).replace('"use strict";\n', "", 1) for name in _SCRIPTS)
    script = "\n".join(('"use strict";', library, *own))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "HASH": f"sha256-{digest}",
        "CONNECT": "'self'" if page.live else "'none'",
        "TITLE": html.escape(page.title.encode("utf-8", "replace").decode()),
        "STYLE": "\n".join((_static(f"{_LIBRARY}.min.css"), _static("page.css"))),
        "DATA": as_json(page),
        "SCRIPT": script,
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _static("page.html"))


def _static(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


HOST = "127.0.0.1"
# A token of the user's, for a URL that stays the same; on the command line other users could read it.
TOKEN_VARIABLE = "MEGASHARP_REPORT_TOKEN"
_TOKEN = re.compile("[A-Za-z0-9_-]{16,}")
_TOKEN_BYTES = 16
_SILENT_S = 30
_WATCHED = ("metrics.jsonl", "config.yaml", "evals", "rollouts", "probe", "checkpoints", "logs")
# Judgements of an evaluation's samples, in the folder of its results.
_JUDGEMENTS = "rejudged*"


class LivePage:
    """The newest page of some run folders and evaluations' `files`, which `collect` reads.

    Where they cannot be read, requests are answered with the error.
    """

    def __init__(self, folders: Sequence[Path], collect: Callable[[], Page], files: Sequence[Path] = ()) -> None:
        self._watched = [folder / name for folder in folders for name in _WATCHED] + list(files)
        self._results = [(folder / "evals", f"*/{_JUDGEMENTS}") for folder in folders]
        self._results += [(file.parent, _JUDGEMENTS) for file in files]
        self._collect = collect
        self._lock = threading.Lock()
        self._state = ""
        self._page: Page | None = None

    def newest(self) -> tuple[str, Page]:
        """Return a tag that changes with the runs' files, and the page. Raises UserError for a damaged run."""
        with self._lock:
            judgements = (path for at, pattern in self._results for path in sorted(at.glob(pattern)))
            state = fingerprint([*self._watched, *judgements])
            if self._page is None or state != self._state:
                self._page, self._state = self._collect(), state
            return self._state, self._page


def fingerprint(watched: Sequence[Path]) -> str:
    """Return a hash that changes when one of these files, or a file in one of these folders, was written."""
    seen = []
    for path in (each for one in watched for each in (one, *sorted(one.glob("*")))):
        try:
            stat = path.stat()
        except OSError:
            continue
        seen.append((str(path), stat.st_mtime_ns, stat.st_size))
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:32]


def token_of_server() -> str:
    """Return the token that requests must hold: the user's, or 128 random bits. Raises UserError for a weak one."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(_TOKEN_BYTES)
    if _TOKEN.fullmatch(given) is None:
        raise UserError(f"{TOKEN_VARIABLE}: give 16 letters, digits, - or _ at least, or unset it for a random token")
    return given


def open_server(page: LivePage, port: int, token: str) -> ThreadingHTTPServer:
    """Open a server, not serving yet; port 0 is any free one. Raises UserError where the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        # Whoever connects and asks nothing is hung up on.
        timeout = _SILENT_S

        def do_GET(self) -> None:
            _answer(self, page, token)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: nobody reads a line for each request."""

    try:
        server = _Server((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port}: cannot listen on {HOST}:{port} ({one_line(error)}); choose another") from error
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Report an error, unless the page was closed while it was answered."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _answer(request: BaseHTTPRequestHandler, page: LivePage, token: str) -> None:
    asked = urlsplit(request.path)
    name, _, port = request.headers.get("Host", "").partition(":")
    if name not in (HOST, "localhost") or not (port.isdecimal() or not port):
        return _send(request, 403, "text/plain", "this server answers for 127.0.0.1 only", "")
    given = parse_qs(asked.query).get("token", [""])[0]
    if not secrets.compare_digest(given.encode(), token.encode()):
        return _send(
            request, 403, "text/plain", "open the URL that `megasharp report --serve` printed, token and all", ""
        )
    if asked.path not in ("/", "/data.json"):
        return _send(request, 404, "text/plain", "there is / and /data.json", "")
    try:
        tag, newest = page.newest()
    except UserError as error:
        return _send(request, 503, "text/plain", str(error), "")
    if asked.path == "/":
        return _send(request, 200, "text/html", as_html(newest), "")
    if request.headers.get("If-None-Match") == tag:
        return _send(request, 304, "application/json", "", tag)
    return _send(request, 200, "application/json", as_json(newest), tag)


def _send(request: BaseHTTPRequestHandler, status: int, kind: str, text: str, tag: str) -> None:
    body = text.encode("utf-8")
    request.send_response(status)
    request.send_header("Content-Type", f"{kind}; charset=utf-8")
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Cache-Control", "no-store")
    request.send_header("X-Content-Type-Options", "nosniff")
    # The URL holds the token. The page's own policy is in the page; a frame would lend its clicks to another's.
    request.send_header("Referrer-Policy", "no-referrer")
    request.send_header("Content-Security-Policy", "frame-ancestors 'none'")
    request.send_header("Cross-Origin-Resource-Policy", "same-origin")
    if tag:
        request.send_header("ETag", tag)
    request.end_headers()
    request.wfile.write(body)
