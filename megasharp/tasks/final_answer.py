"""The part of a response in which its answer is looked for: what stands after thinking, and is not cut off.

Thinking is no answer. What a verifier reads stands after the last `</think>`, and before a `<think>` that opens again;
other families' marks of thinking (`THINKING`) are as good.
Where thinking was opened, by the end of the prompt or by the response itself, and never closed, there is nothing to
read. A response that met the limit of tokens counts where its answer stands complete: a closed box or closed tags, or
a statement that goes on after the answer. For that `CUT`, a sign that is part of no answer, stands for the word
or number at its end, which may be half of one.

Verifiers of training, of evaluations and of samples judged again are all given their responses by `FinalJudge`. A
user's own function gets whole responses, and may ask `final_text` itself.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from megasharp.common.records import THINKING_OPEN, Outcome, Verdict
from megasharp.config.data import AUTO, RewardConfig, Truncated
from megasharp.tasks.extraction import CUT, last_box, last_tag, open_box, open_tag, sentence_start
from megasharp.tasks.judge import Item, Judge
from megasharp.tasks.own_reward import is_own
from megasharp.tasks.table import TASKS, Reading

# What opens thinking, and what closes it: of most families (QwQ, Qwen3, DeepSeek-R1), Magistral, Kimi, Seed-OSS,
# Open-R1's and Sky-T1's data, gpt-oss (whose last channel is the answer).
THINKING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "<seed:think>": "</seed:think>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}
CUT_OFF = "cut off before its answer was complete"


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """The keys `reward.answer_after` and `reward.truncated`.

    Example: `AnswerRule("</think>")` refuses every response without that mark.
    """

    after: str = AUTO
    truncated: Truncated = "by_answer"

    @property
    def marks(self) -> Mapping[str, str]:
        """The texts behind which an answer stands, by what opens that part; empty where it may stand anywhere."""
        if self.after == AUTO:
            return THINKING
        if not self.after:
            return {}
        mark = self.after
        # The tag that it closes, `<think>` of `</think>`; the mark itself where it closes none.
        known = next((opening for opening, closing in THINKING.items() if closing == mark), None)
        return {known or (f"{mark[0]}{mark[2:]}" if mark[1:2] == "/" else mark): mark}

    @property
    def in_words(self) -> str:
        """The rule as an evaluation's identity has it."""
        return f"after {self.after!r}, truncated {self.truncated}"

    @classmethod
    def of_words(cls, words: str) -> AnswerRule:
        """Return the rule whose `in_words` these are."""
        after, _, truncated = words.removeprefix("after ").rpartition(", truncated ")
        return cls(literal_eval(after), cast(Truncated, truncated))


# Whole responses, as every verifier read them until there was a rule.
WHOLE = AnswerRule("", "as_whole")


def rule_of(reward: RewardConfig) -> AnswerRule:
    """Return the rule of a run's configuration."""
    return AnswerRule(reward.answer_after, reward.truncated)


@dataclass(frozen=True, slots=True)
class Final:
    """The part of a response that is judged; None where there is none, and `why`."""

    text: str | None
    why: str = ""


def opens_thinking(prompt: str) -> bool:
    """Return True where a prompt, as the model reads it, ends in `<think>`: its responses begin inside of thinking."""
    return prompt.rstrip().endswith(tuple(THINKING))


def final_text(
    text: str, rule: AnswerRule | None = None, *, in_thinking: bool = False, truncated: bool = False
) -> Final:
    """Return the part of a response that is judged by a rule, without one by the keys' defaults.

    `in_thinking`: the prompt has opened thinking; `truncated`: the response met the limit of tokens.

    Example: `final_text("2+2 is 5? </think> It is 4.").text` is `" It is 4."`.
    """
    rule = rule or AnswerRule()
    if truncated and rule.truncated == "wrong":
        return Final(None, CUT_OFF)
    if rule.marks:
        asked = in_thinking or rule.after != AUTO
        start = max((text.rfind(mark) + len(mark) for mark in rule.marks.values() if mark in text), default=0)
        opened = min((place for place in (text.find(mark, start) for mark in rule.marks) if place >= 0), default=None)
        final = text[start:opened]
        if not start and (asked or (opened is not None and not final.strip())):
            return Final(None, THINKING_OPEN)
        # What is cut off then is thinking.
        text, truncated = final, truncated and opened is None
    if truncated and rule.truncated == "by_answer":
        return Final(None, CUT_OFF) if _answers_again(text) else Final(_cut(text))
    return Final(text)


def _cut(text: str) -> str:
    """Return a text that was cut off with `CUT` for its last word, if it ends in one, else behind it."""
    end = len(text)
    while end and text[end - 1].isalnum():
        end -= 1
    return text[:end] + CUT


def _answers_again(text: str) -> bool:
    """Return whether another answer than the one before it may have been cut off: in a box or tag, or in a doubt."""
    if _begins_doubt(text) or _BOX_BEGUN.search(text[-_LONGEST:]):
        return True
    pairs = ((open_box(text), last_box), (open_tag(text), last_tag))
    return any(begun is not None and not (whole(text) or "").startswith(begun) for begun, whole in pairs)


def _begins_doubt(text: str) -> bool:
    """Return whether the last sentence, or what follows mathematics in it, begins with doubt: "Wait, that is"."""
    text = text[-_LONGEST:].removesuffix("\n")
    sentence = text[sentence_start(text, len(text)) :]
    before = (sentence[: doubt.start()].rstrip() for doubt in _DOUBT.finditer(sentence))
    return any(not each or each.endswith(("}", "$")) for each in before)


# Another box that is joined to the one before it.
_BOX_BEGUN = re.compile(r"(?:\bor\b|\band\b|,)[\s$]*\\(?:b(?:o(?:x(?:e(?:d(?:\{\s*)?)?)?)?)?)?$")
_DOUBT = re.compile(r"(?<!\w)(?:wait|but|however|hmm|actually|no|oh|sorry|oops)\b", re.IGNORECASE)
# So much of the end is searched for these two. It is done where a run waits for it, not in workers.
_LONGEST = 2_000


@dataclass(frozen=True, slots=True)
class FinalJudge:
    """A judge that is given whole responses, and hands on the part of each that is judged by `rule`.

    A task says by its `reading` if its verifier takes whole responses.
    """

    judge: Judge
    rule: AnswerRule

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self.judge.tasks

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """Return one for each item, in order; FORMAT where nothing of it is judged."""
        read = [self._read(item) for item in items]
        judged = iter(self.judge.verdicts([each for each in read if isinstance(each, Item)]))
        return [next(judged) if isinstance(each, Item) else each for each in read]

    def _read(self, item: Item) -> Item | Verdict:
        reading: Reading = TASKS[item.task].reading if item.task in TASKS else "final"
        if is_own(item.task) or (reading == "whole" and not (item.truncated and self.rule.truncated == "wrong")):
            return item
        final = final_text(item.text, self.rule, in_thinking=item.in_thinking, truncated=item.truncated)
        if reading == "all of it" and item.truncated and self.rule.truncated == "by_answer":
            final = Final(None, final.why or CUT_OFF)
        if final.text is None:
            return Verdict(Outcome.FORMAT, 0.0, detail=final.why)
        return item if final.text == item.text else replace(item, text=final.text)
