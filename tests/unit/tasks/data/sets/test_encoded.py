"""LiveCodeBench's encoded tests: read without unpickling, whatever they hold."""

from __future__ import annotations

import base64
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.sets.livecodebench import decoded


def encoded(value: object, protocol: int = pickle.HIGHEST_PROTOCOL) -> str:
    """As LiveCodeBench's authors write it."""
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (self.path, os.O_CREAT)


@each_case("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@each_case("text", ["", "[]", '[{"input": "é\\n\U0001f600", "output": "x"}]', "a" * 70_000])
def test_every_protocol_gives_the_text_that_unpickling_gives(text: str, protocol: int) -> None:
    again = encoded(text, protocol)
    assert decoded(again, "here") == pickle.loads(zlib.decompress(base64.b64decode(again))) == text


def test_a_pickle_that_runs_something_is_refused_and_does_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    with pytest.raises(UserError, match=r"here: a pickle that does more than hold a text"):
        decoded(encoded(Bomb(witness)), "here")
    assert not witness.exists()
    pickle.loads(pickle.dumps(Bomb(witness)))
    assert witness.exists(), "the bomb is one"


@each_case(
    ("text", "message"),
    [
        ("not base64!", "neither JSON nor base64 of zlib"),
        (base64.b64encode(b"not zlib").decode(), "neither JSON nor base64 of zlib"),
        (base64.b64encode(zlib.compress(b"not a pickle")).decode(), "pickle"),
        (base64.b64encode(zlib.compress(pickle.dumps("x"))[:-5]).decode(), "more than 1000 bytes, or cut off"),
        (encoded("x" * 2000), "more than 1000 bytes"),
        (encoded(["x"]), "does more than hold a text"),
        (encoded(b"x"), "does more than hold a text"),
        (encoded(5), "does more than hold a text"),
    ],
)
def test_what_holds_no_text_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        decoded(text, "here", limit=1000)
    assert "\n" not in str(caught.value)
