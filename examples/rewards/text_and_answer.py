"""A reward of a response's text and the answer that its row has."""

import re


def correct(text: str, answer: str) -> float:
    """1 where the last number of the response is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(numbers[-1:] == [str(answer)])
