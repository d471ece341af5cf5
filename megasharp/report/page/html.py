"""A page's records as one HTML file: its own styles and scripts inside, nothing from a network.

Text of models and users goes into the page as JSON only, in which `<`, `>` and `&` are written as escapes: so no text
can end the script element that holds it. The scripts make text nodes of it. Besides, the page's own policy (CSP) lets
only its one script run, by hash, and load nothing; a served page may ask its own server.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import asdict
from importlib.resources import files

from megasharp.report.page.records import Page

_SCRIPTS = ("dom.js", "chart.js", "bars.js", "matrix.js", "browser.js", "page.js", "live.js")
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_json(page: Page) -> str:
    """The page's JSON, safe inside of a script element. Halves of surrogate pairs become U+FFFD."""
    text = json.dumps(asdict(page), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    readable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], readable)


def as_html(page: Page) -> str:
    """The whole file."""
    # One strict script; a `"use strict"` in its middle would be a mere string.
    script = '"use strict";\n' + "\n".join(_static(name).replace('"use strict";\n', "", 1) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "HASH": f"sha256-{digest}",
        "CONNECT": "'self'" if page.live else "'none'",
        "TITLE": html.escape(page.title.encode("utf-8", "replace").decode()),
        "STYLE": _static("page.css"),
        "DATA": as_json(page),
        "SCRIPT": script,
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _static("page.html"))


def _static(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")
