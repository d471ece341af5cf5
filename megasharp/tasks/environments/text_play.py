"""Parts that other packages' environments share here: texts around observations, and what an episode adds up to."""

from __future__ import annotations

from collections.abc import Mapping

from megasharp.tasks.environment import Environment, Observation


class TextPlay(Environment):
    """An environment that speaks in texts. `prompt` is put around its first one and `answer` around those that follow,
    with `{}` where the text goes; with `chat` each is a message of the user's.

    An episode is correct where its rewards add up to more than `correct_above`; its canonical answer is its actions.
    """

    def __init__(self, prompt: str = "{}", answer: str = "{}", chat: bool = False, correct_above: float = 0.0) -> None:
        self._prompt, self._answer, self._chat = prompt, answer, chat
        self._correct_above = correct_above
        self._begin()

    def _begin(self) -> None:
        self._actions: list[str] = []
        self._rewards = 0.0

    def _first(self, text: str) -> Observation:
        self._begin()
        return self._said(self._prompt.replace("{}", text))

    def _next(self, text: str, action: str | None, reward: float = 0.0, done: bool = False) -> Observation:
        """Answer an action; None stands for one that could not be read, and was not taken."""
        if action is not None:
            self._actions.append(action)
        self._rewards += reward
        info = {"correct": self._rewards > self._correct_above, "answer": " ".join(self._actions)}
        return self._said(self._answer.replace("{}", text), reward=reward, done=done, info=info)

    def _said(
        self, text: str, *, reward: float = 0.0, done: bool = False, info: Mapping[str, object] | None = None
    ) -> Observation:
        messages = (("user", text),) if self._chat else ()
        return Observation("" if self._chat else text, messages, reward, done, info or {})
