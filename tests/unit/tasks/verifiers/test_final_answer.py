r"""The part of a response that is judged: after thinking, complete; for training and evaluations alike.

Nothing else tests what thinking and the limit of tokens do to verdicts; verifiers' own tests give them final texts.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from cases import each_case

from megasharp.common.records import (
    THINKING_OPEN,
    Completion,
    FinishReason,
    Outcome,
    Prompt,
    SamplingParams,
    TaskAnswer,
)
from megasharp.evals.evaluate import evaluate
from megasharp.evals.result import EvalSetting
from megasharp.evals.suites import Suite
from megasharp.rollout.step_request import GroupMaker
from megasharp.tasks.choice import ChoiceAnswer
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.countdown_tags import TaggedCountdownAnswer
from megasharp.tasks.final_answer import CUT_OFF, WHOLE, AnswerRule, FinalJudge, final_text, opens_thinking
from megasharp.tasks.form import FormAnswer
from megasharp.tasks.instructions import Instruction, InstructionsAnswer
from megasharp.tasks.judge import DirectJudge, Item, TaskItem
from megasharp.tasks.knights_short import KnightsShortAnswer
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.short_answer import ShortAnswer
from megasharp.tasks.table import TASKS, make_verifiers
from tests.unit.evals.rule_engine import CharacterTokenizer

MATH, TAGGED, SHORT = MathAnswer("5"), TaggedCountdownAnswer((2, 3), 5), ShortAnswer("valid")
CHOICE, COUNTDOWN, FORM = ChoiceAnswer("B", ("A", "B", "C")), CountdownAnswer((2, 3), 5), FormAnswer("tags")
NO_COMMA = InstructionsAnswer((Instruction("punctuation:no_comma", ()),))


def outcome_of(item: Item, rule: AnswerRule | None = None) -> tuple[Outcome, str]:
    verifiers = {**make_verifiers(), "instructions": TASKS["instructions"].verify}
    (verdict,) = FinalJudge(DirectJudge(verifiers), rule or AnswerRule()).verdicts([item])
    return verdict.outcome, verdict.detail


@each_case(
    ("task", "text", "answer", "in_thinking", "outcome"),
    [
        ("math", r"so \boxed{5}", MATH, True, Outcome.FORMAT),
        ("math", r"so \boxed{4}</think> It is \boxed{5}.", MATH, True, Outcome.CORRECT),
        ("math", r"so \boxed{5}</think> It is clear.", MATH, True, Outcome.FORMAT),
        ("math", r"<think>so \boxed{5}", MATH, False, Outcome.FORMAT),
        ("math", r"<think></think>\boxed{5}", MATH, False, Outcome.CORRECT),
        ("math", r"a</think>\boxed{4} no</think>\boxed{5}", MATH, True, Outcome.CORRECT),
        ("math", r"a</think>Now: <think>\boxed{5}", MATH, True, Outcome.FORMAT),
        ("math", r"\boxed{5} <think>or is it \boxed{4}?", MATH, False, Outcome.CORRECT),
        ("math", r"\boxed{5}", MATH, False, Outcome.CORRECT),
        ("countdown_3", "<answer>2+3</answer>", TAGGED, True, Outcome.FORMAT),
        ("countdown_3", "</think><answer>2+3</answer>", TAGGED, True, Outcome.CORRECT),
        ("countdown", "2+3", COUNTDOWN, False, Outcome.CORRECT),
        ("form", "a</think><answer>5</answer>", FORM, True, Outcome.CORRECT),
        ("form", "<think>a</think>b", FORM, False, Outcome.FORMAT),
        ("instructions", "well, well</think>Good.", NO_COMMA, True, Outcome.CORRECT),
        ("instructions", "Good.", NO_COMMA, True, Outcome.FORMAT),
    ],
)
def test_what_stands_after_thinking_counts(
    task: str, text: str, answer: TaskAnswer, in_thinking: bool, outcome: Outcome
) -> None:
    item = Item(task, text, answer, in_thinking=in_thinking)
    assert outcome_of(item)[0] is outcome
    # Where the limit of tokens ends thinking, the prompt's kind does not matter.
    if outcome_of(item)[1] == THINKING_OPEN:
        assert outcome_of(replace(item, truncated=True)) == (Outcome.FORMAT, THINKING_OPEN)


@each_case(
    ("task", "text", "answer", "outcome"),
    [
        ("math", r"\boxed{5}", MATH, Outcome.CORRECT),
        ("math", r"\boxed{5} as 2 + 3 is", MATH, Outcome.CORRECT),
        ("math", r"\boxed{5", MATH, Outcome.FORMAT),
        ("math", r"the first is \boxed{5}, the sum \boxed{1", MATH, Outcome.FORMAT),
        ("math", r"\boxed{5}. \boxed{5}. \boxed{", MATH, Outcome.CORRECT),
        ("math", "The answer is 5", MATH, Outcome.FORMAT),
        ("math", "The answer is 5.", MATH, Outcome.FORMAT),
        ("math", "The answer is 5 mil", MATH, Outcome.FORMAT),
        ("math", "The answer is 5. To see", MATH, Outcome.CORRECT),
        ("math", "The answer is 5 because the", MATH, Outcome.CORRECT),
        ("math", "#### 5", MATH, Outcome.FORMAT),
        ("math", "#### 5\n", MATH, Outcome.CORRECT),
        ("math", "Answer: 5", MATH.on_a_line(True), Outcome.FORMAT),
        ("math", "Answer: 5\nIn", MATH.on_a_line(True), Outcome.CORRECT),
        ("choice", "The answer is B", CHOICE, Outcome.FORMAT),
        ("choice", "The answer is (B", CHOICE, Outcome.FORMAT),
        ("choice", "The answer is (B).", CHOICE, Outcome.CORRECT),
        ("choice", "The answer is B. The", CHOICE, Outcome.CORRECT),
        ("short_answer", "So the answer is valid", SHORT, Outcome.WRONG),
        ("short_answer", r"So the answer is \boxed{valid}, sin", SHORT, Outcome.CORRECT),
        ("countdown", "2+3", COUNTDOWN, Outcome.FORMAT),
        ("countdown_3", "<answer>2+3</answer> and", TAGGED, Outcome.CORRECT),
        ("countdown_3", "<answer>2+3", TAGGED, Outcome.FORMAT),
        ("countdown_3", "<answer>2+3</answer>, or <answer>3*", TAGGED, Outcome.FORMAT),
        ("knights_short", "10", KnightsShortAnswer((True, False)), Outcome.FORMAT),
        ("form", "<think>a</think><answer>5</answer>", FORM, Outcome.CORRECT),
        ("instructions", "Good.", NO_COMMA, Outcome.FORMAT),
    ],
)
def test_what_was_cut_off_counts_where_its_answer_is_complete(
    task: str, text: str, answer: TaskAnswer, outcome: Outcome
) -> None:
    item = Item(task, text, answer, truncated=True)
    assert outcome_of(item)[0] is outcome
    assert outcome_of(item, AnswerRule(truncated="wrong")) == (Outcome.FORMAT, CUT_OFF)
    assert outcome_of(item, WHOLE) == outcome_of(replace(item, truncated=False), WHOLE)


@each_case(
    ("text", "answered"),
    [
        (r"\boxed{5}. Wait, that", False),
        ("\\boxed{5}\n\nWait, maybe\n", False),
        (r"$\boxed{5}$ but", False),
        (r"\boxed{5}. Or rather, no", True),
        (r"\boxed{5}. Wait: yes. It", True),
        (r"\boxed{5}. But" + " so" * 1_000, True),
    ],
)
def test_a_doubt_that_was_cut_off(text: str, answered: bool) -> None:
    assert (final_text(text, truncated=True).text is not None) is answered


@each_case(
    "sign",
    [
        *("\n", " ", ".", "$", "$ ", "\\ ", "1", "a ", "**", "{", "}\n", "x. ", "$ wait ", ", ", "or \\b", "答案是5个"),
        *("\\boxed{", "\\boxed{}", "\\boxed(", "\\boxed ", "\\boxed{5} or ", "<think>", "<answer>", "\n.$ 1a"),
    ],
)
def test_the_time_grows_with_the_length(sign: str) -> None:
    """It is spent before the workers, where no limit of time ends it. With eight times the length, 64 were too much."""
    times = [min(_seconds(sign * (size // len(sign))) for _ in range(3)) for size in (10_000, 20_000, 40_000, 80_000)]
    assert times[-1] / max(times[0], 0.001) < 24, times


def _seconds(text: str) -> float:
    started = time.process_time()
    final_text(f"\\boxed{{5}}\n{text}", truncated=True)
    return time.process_time() - started


def test_a_mark_that_is_asked_for_must_be_there() -> None:
    texts = ("<think>5 </think>5", "5", "a [/THINK] 5 [THINK] b")
    assert [final_text(text, AnswerRule("[/THINK]")).text for text in texts] == [None, None, " 5 "]
    assert [final_text(text, AnswerRule("")).text for text in texts] == [*texts]


def test_a_users_function_is_given_all_of_it() -> None:
    item = Item("own/chat", "<think>", MATH, in_thinking=True, truncated=True)
    given: list[str] = []
    judge = FinalJudge(DirectJudge({"own/chat": lambda text, _: given.append(text)}), AnswerRule())  # type: ignore[dict-item, func-returns-value]
    judge.verdicts([item])
    assert given == ["<think>"]


THINKS = "1+1? <think>\n"


class Speaker:
    """An engine that says one text, up to the limit."""

    version = 0

    def generate(self, requests, sampling):
        return [[completion("2"), completion("</think> \\boxed{2}")] for _ in requests]


def completion(text: str) -> Completion:
    logp = torch.zeros(len(text))
    return Completion(torch.tensor([*map(ord, text)]), logp, logp, None, (), FinishReason.LENGTH, 0)


@pytest.mark.parametrize("prompt", [THINKS, "1+1?"])
def test_training_and_evaluation_know_how_a_prompt_ends_and_a_response(prompt: str) -> None:
    tokenizer, judge, seen = CharacterTokenizer(), DirectJudge(make_verifiers()), list[Item]()

    class Noting:
        tasks = judge.tasks

        def verdicts(self, items):
            seen.extend(items)
            return judge.verdicts(items)

    maker = GroupMaker(Noting(), lambda rows: [*map(tokenizer.decode, rows)], SamplingParams(9), 2, 0)
    asked = Prompt("a", "math", prompt, tokenizer.encode(prompt), MathAnswer("2"), "test", 0, 0)
    maker.groups(["g"], [asked], Speaker().generate([None], None), 0)
    suite = Suite("tiny", "math", (TaskItem("a", "math", prompt, MathAnswer("2"), "test"),))
    setting = EvalSetting("tiny", "", None, n=2, ks=(1,), temperature=1.0, seed=1, max_tokens=20)
    evaluate(Speaker(), suite, tokenizer, setting, judge=Noting(), greedy=False)
    assert [(item.truncated, item.in_thinking) for item in seen] == [(True, prompt == THINKS)] * 4


def test_prompts_that_open_thinking() -> None:
    """By our templates: TinyZero's two. A question that speaks of tags opens none."""
    found = {name for name, template in TEMPLATES.items() if opens_thinking(template.text_of("Use <think> tags"))}
    assert found == {"countdown_qwen", "countdown_base"}
    assert opens_thinking("<|im_start|>assistant\n<think>\n") and not opens_thinking("<think>\n\n</think>\n\n")
