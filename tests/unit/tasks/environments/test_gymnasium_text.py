"""Environments of Gymnasium's in words: what is read, what is told, and that both are the same each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from megasharp.common.errors import UserError
from megasharp.tasks.environment import Observation
from megasharp.tasks.environments.gymnasium_text import GymnasiumText, in_words

LAKE = {"id": "FrozenLake-v1", "make": {"render_mode": "ansi", "is_slippery": False}}
DIRECTIONS = ["left", "down", "right", "up"]


def played(turns: Sequence[str], row: dict[str, Any], **options: Any) -> list[Observation]:
    environment = GymnasiumText(**options)
    found = [environment.reset(row)]
    found += [environment.step(action) for action in turns]
    environment.close()
    return found


def test_the_same_seed_and_actions_give_the_same_cards_and_other_seeds_others() -> None:
    games = [played(("hit", "0"), {"seed": seed}, id="Blackjack-v1", actions=["stick", "hit"]) for seed in (1, 1, 2, 3)]
    assert games[0] == games[1]
    assert len({tuple(one.text for one in game) for game in games}) > 1


def test_a_coloured_picture_is_text_with_brackets_and_its_ways_are_told_apart() -> None:
    start, right, *_, end = played(
        ["right", "2", *("Down " * 3).split(), "right"], {"seed": 1}, **LAKE, actions=DIRECTIONS
    )
    assert (start.text, right.text) == ("[S]FFF\nFHFH\nFFFH\nHFFG", "(Right)\nS[F]FF\nFHFH\nFFFH\nHFFG")
    assert (end.done, end.reward) == (True, 1.0)
    assert end.info == {"correct": True, "answer": "right right down down down right"}


def test_an_action_stands_alone_or_in_tags_and_what_is_none_moves_nothing() -> None:
    said = ["I go right", "4", "", "so <answer> right </answer>"]
    _, *unread, moved = played(said, {"seed": 1}, **LAKE, actions=DIRECTIONS, answer="{}\n> ")
    assert {one.text for one in unread} == {"No such action. Write one of: left, down, right, up.\n> "}
    assert moved.text.startswith("(Right)\nS[F]FF") and moved.info["answer"] == "right"


class Parrot(gymnasium.Env[dict[str, Any], Any]):
    """Says what it was told; `numbers` has actions that are no words."""

    observation_space = gymnasium.spaces.Dict({"said": gymnasium.spaces.Text(9), "at": gymnasium.spaces.Discrete(9)})

    def __init__(self, numbers: bool = False) -> None:
        self.action_space = gymnasium.spaces.Box(0, 1) if numbers else gymnasium.spaces.Text(5, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return {"said": options["word"], "at": 0}, {}

    def step(self, action: Any) -> Any:
        return {"said": action, "at": 1}, 0.25, False, action == "cab", {}


@pytest.fixture
def parrot() -> Iterator[str]:
    gymnasium.register("Parrot-v0", Parrot, disable_env_checker=True)
    yield "Parrot-v0"
    del gymnasium.registry["Parrot-v0"]


def test_texts_are_taken_as_they_are_and_dictionaries_told_by_lines(parrot: str) -> None:
    row = {"options": {"word": "hello"}}
    start, told, unread, end = played(("ab", "xyz", "cab"), row, id=parrot, chat=True, correct_above=1.0)
    assert start.messages == (("user", "said: hello\nat: 0"),) and told.messages == (("user", "said: ab\nat: 1"),)
    assert "a text that is in Text" in unread.messages[0][1] and not unread.reward
    assert end.done and end.info == {"correct": False, "answer": "ab cab"}


def test_actions_that_are_no_words_and_names_that_are_too_few_are_refused(parrot: str) -> None:
    with pytest.raises(UserError, match="which have no words"):
        GymnasiumText(parrot, {"numbers": True})
    with pytest.raises(UserError, match="2 names for 4 actions"):
        GymnasiumText(**LAKE, actions=["left", "right"])


def test_observations_of_numbers_are_written_with_spaces_and_lines() -> None:
    assert in_words((16, np.int64(10), False)) == "16 10 0"
    assert in_words(np.array([[0.5, 1.0], [2.0, 3.25]])) == "0.5 1\n2 3.25"
