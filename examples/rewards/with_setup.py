"""A reward that loads something once in each worker."""


class Judge:
    """Made in each worker; `setup` comes before its first response, `close` after its last."""

    def setup(self) -> None:
        """Load what every call needs: a model, a client, a table."""
        self.polite = {"please", "thanks"}

    def reward(self, text: str, answer: str) -> float:
        """The share of words that are polite. `__call__` would do too, and the parameters of TRL or verl."""
        words = text.lower().split()
        return sum(word in self.polite for word in words) / max(1, len(words))

    def close(self) -> None:
        """Give it back."""
        self.polite.clear()
