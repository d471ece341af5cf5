"""Gymnasium's environments, played in words.

    use: gymnasium
    options:
      id: FrozenLake-v1
      make: {render_mode: ansi, is_slippery: false}
      actions: [left, down, right, up]
    count: 500

What the policy reads is the environment's picture, where `make` has `render_mode: ansi`; else the observation: a text
as it is, numbers with spaces between, a dictionary as lines `name: value`. What a picture has in colours stands in
brackets, as in `[S]FFF`.

Actions are `Discrete` or `Text`. A discrete one is its number, or its name in `actions`, which lists them from the
first on; it is read from the last answer tags, where a turn has some, else the whole turn is it. An action that cannot
be read is answered by the list of actions; the environment does not step. A row's `seed` and `options` are those of
`Env.reset`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megasharp.common.errors import UserError, one_line
from megasharp.tasks.environment import Observation, Row
from megasharp.tasks.environments.text_play import TextPlay
from megasharp.tasks.extraction import last_tag

_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0?m", re.DOTALL)


class GymnasiumText(TextPlay):
    """An environment of Gymnasium's by its `id`; `make` are further arguments of `gymnasium.make`."""

    def __init__(
        self, id: str, make: Mapping[str, Any] | None = None, actions: Sequence[str] = (), **texts: Any
    ) -> None:
        super().__init__(**texts)
        library = _library()
        self._env = library.make(id, **(make or {}))
        space = self._env.action_space
        self._numbers: Mapping[str, int] | None = None
        self._names: Mapping[int | str, str] = {}
        if isinstance(space, library.spaces.Discrete):
            self._numbers = _numbers(int(space.start), int(space.n), actions)
            self._names = {self._numbers[name.lower()]: name for name in actions}
        elif not isinstance(space, library.spaces.Text):
            raise UserError(f"actions of {id} are {space}, which have no words; wrap it in an ActionWrapper")
        choices = [*actions] or [*(self._numbers or ())]
        self._choices = f"one of: {', '.join(choices)}" if choices else f"a text that is in {space}"

    def reset(self, row: Row) -> Observation:
        """Begin with the row's seed."""
        seed, options = row.get("seed"), row.get("options")
        state, _ = self._env.reset(seed=seed, options=options)
        return self._first(self._words(state))

    def step(self, action: str) -> Observation:
        """Take the action, where it is one."""
        given = action.strip() if (tagged := last_tag(action)) is None else tagged
        taken = given if self._numbers is None else self._numbers.get(given.lower())
        if taken is None or not self._env.action_space.contains(taken):
            return self._next(f"No such action. Write {self._choices}.", None)
        state, reward, terminated, truncated, _ = self._env.step(taken)
        name = self._names.get(taken, str(taken))
        return self._next(self._words(state), name, float(reward), bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _words(self, state: object) -> str:
        if self._env.render_mode == "ansi":
            return _COLOURED.sub(r"[\1]", str(self._env.render())).strip()
        return in_words(state)


def in_words(state: Any) -> str:
    """Write an observation as text. Example: `in_words((16, 10, False))` is `16 10 0`."""
    if hasattr(state, "tolist"):
        state = state.tolist()
    if isinstance(state, Mapping):
        return "\n".join(f"{name}: {in_words(value)}" for name, value in state.items())
    if isinstance(state, (list, tuple)):
        between = "\n" if state and isinstance(state[0], (list, tuple)) else " "
        return between.join(map(in_words, state))
    if isinstance(state, bool):
        return str(int(state))
    return f"{state:g}" if isinstance(state, float) else str(state)


def _numbers(start: int, count: int, names: Sequence[str]) -> dict[str, int]:
    if names and len(names) != count:
        raise UserError(f"actions: {len(names)} names for {count} actions")
    numbers = {str(start + place): start + place for place in range(count)}
    return numbers | {name.lower(): start + place for place, name in enumerate(names)}


def _library() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise UserError(
            f"environments of Gymnasium need that library ({one_line(error)}); pip install 'megasharp[environments]'"
        ) from error
    return gymnasium
