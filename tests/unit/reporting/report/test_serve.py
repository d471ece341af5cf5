"""The served page: news when files change, nothing for other hosts' names, words for what is damaged."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from waiting import HANG_S

sys.path.insert(0, str(Path(__file__).parent))

from page_runs import make_run, numbers, result

from megasharp.common.errors import UserError
from megasharp.evals.result_files import save
from megasharp.reporting.page.serve import TOKEN_VARIABLE, LivePage, open_server, read_page, token_of_server

TOKEN = "a-token-of-16-characters"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "a")


@pytest.fixture
def port(root: Path) -> Iterator[int]:
    with open_server(LivePage([root], lambda: read_page([root], live=True)), 0, TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str, query: str = f"?token={TOKEN}", **headers: str) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    connection.request("GET", path + query, headers=headers)
    answer = connection.getresponse()
    answer.body = answer.read()
    connection.close()
    return answer


def test_news_come_when_the_run_has_written(port: int, root: Path) -> None:
    first = ask(port, "/data.json")
    assert first.status == 200 and json.loads(first.body)["live"] is True
    tag = first.headers["ETag"]
    assert ask(port, "/data.json", **{"If-None-Match": tag}).status == 304
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "time": 1.0, "time/step": 2.0, "reward/mean": 0.7}\n')
    later = ask(port, "/data.json", **{"If-None-Match": tag})
    assert later.status == 200 and later.headers["ETag"] != tag
    rewards = next(one for one in json.loads(later.body)["figures"] if one["name"] == "reward/mean")
    assert numbers(rewards["series"][0]["x"])[-1] == 7.0
    assert numbers(rewards["series"][0]["y"])[-1] == pytest.approx(0.7)


def test_an_evaluation_from_elsewhere_that_is_written_anew_is_news(root: Path, tmp_path: Path) -> None:
    path = save(result([1, 1, 1, 1], 8, 9), tmp_path / "x")
    page = LivePage([root], lambda: read_page([root], live=True, evals=[path]), [path])
    before, _ = page.newest()
    assert page.newest()[0] == before
    save(result([1, 1, 1, 5], 8, 10), tmp_path / "x")
    after, newest = page.newest()
    assert after != before and newest.models[-1].step == 10


def test_the_page_may_ask_its_own_server_only(port: int) -> None:
    answer = ask(port, "/")
    assert answer.status == 200 and "connect-src 'self'" in answer.body.decode()
    assert ask(port, "/config.yaml").status == ask(port, "/../config.yaml").status == 404


@pytest.mark.parametrize(
    "query", ["", "?token=", "?token=wrong", f"?token={TOKEN}x", "?token=%C3%A9", f"?other={TOKEN}"]
)
@pytest.mark.parametrize("path", ["/", "/data.json", "/../config.yaml", "/nowhere"])
def test_without_the_token_there_is_no_data(port: int, path: str, query: str) -> None:
    answer = ask(port, path, query, Cookie=f"token={TOKEN}")
    assert answer.status == 403 and b"reward" not in answer.body and TOKEN.encode() not in answer.body


def test_the_token_stays_with_the_page(port: int) -> None:
    """No link sends its address on, no other page frames it, and it is in no cookie, which other ports would get."""
    answer = ask(port, "/")
    assert answer.headers["Referrer-Policy"] == "no-referrer" and "Set-Cookie" not in answer.headers
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert TOKEN not in answer.body.decode()


def test_a_token_is_random_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    first, second = token_of_server(), token_of_server()
    assert first != second and len(first) >= 128 / 6
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert token_of_server() == TOKEN
    for weak in ("", "short", "sixteen letters and a &"):
        monkeypatch.setenv(TOKEN_VARIABLE, weak)
        with pytest.raises(UserError, match=f"{TOKEN_VARIABLE}: give 16"):
            token_of_server()


def test_another_name_for_this_address_is_refused(port: int) -> None:
    assert ask(port, "/data.json", Host="evil.example").status == 403
    assert ask(port, "/data.json", Host=f"localhost:{port}").status == 200


def test_a_damaged_run_is_told_and_served_again_when_mended(port: int, root: Path) -> None:
    path = root / "metrics.jsonl"
    whole = path.read_text()
    path.write_text("no line of ours\n" + whole)
    answer = ask(port, "/data.json")
    assert answer.status == 503 and "not a JSON object" in answer.body.decode()
    path.write_text(whole)
    assert ask(port, "/data.json").status == 200


def test_a_taken_port_is_one_line(port: int, root: Path) -> None:
    with pytest.raises(UserError, match=f"--port {port}: cannot listen"):
        open_server(LivePage([root], lambda: read_page([root], live=True)), port, TOKEN)
