"""Conversations with tools, by tokens: what stands between turns, and a scripted policy that counts with Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import each_case
from chat_models import TOOL_TEMPLATES, write_tokenizer

from megasharp.common.errors import UserError
from megasharp.common.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Outcome,
    Prompt,
    SamplingParams,
    VersionSpan,
)
from megasharp.config.rollout import EpisodesConfig
from megasharp.rollout.episodes.episode_engine import RoundEpisodes
from megasharp.rollout.episodes.observation_tokens import ObservationTokens
from megasharp.rollout.episodes.trial import try_turn
from megasharp.rollout.step_request import GroupMaker
from megasharp.tasks.environment import Observation
from megasharp.tasks.final_answer import AnswerRule, FinalJudge
from megasharp.tasks.judge import DirectJudge
from megasharp.tasks.stream import read_prompt
from megasharp.tasks.table import load_items, make_verifiers
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer
from megasharp.tasks.tools.calculator import Calculator

SCHEMAS = '[{"type": "function", "function": {"name": "calculator"}}]'
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "%s"}}\n</tool_call>'


@pytest.fixture
def tokenizer_of(tmp_path: Path) -> Callable[[str], TextTokenizer]:
    def load(family: str) -> TextTokenizer:
        found = load_tokenizer(write_tokenizer(tmp_path, family[:4] if family[0] == "q" else "llama"))
        found.backend.add_special_tokens(
            {"additional_special_tokens": ["<|eom_id|>"]}, replace_extra_special_tokens=False
        )
        found.backend.chat_template = TOOL_TEMPLATES[family]
        return found

    return load


@each_case(
    ("family", "said", "end"),
    [
        ("qwen2.5", '<tool_call>\n{"name": "calculator"}\n</tool_call>', "<|im_end|>"),
        ("qwen3", "<think>\nhow?\n</think>\n\n7", "<|im_end|>"),
        ("llama3.1", '{"name": "calculator", "parameters": {}}', "<|eot_id|>"),
        ("llama3.1", '{"name": "calculator", "parameters": {}}', "<|eom_id|>"),
    ],
)
def test_what_stands_between_turns_is_what_the_template_writes(
    tokenizer_of: Callable[[str], TextTokenizer], family: str, said: str, end: str
) -> None:
    tokenizer = tokenizer_of(family)
    asked = (("system", "Be brief."), ("user", "What is 3*8?"))
    prompt = tokenizer.chat(asked, SCHEMAS)
    (last,) = tokenizer.encode(end)
    stops = [token for name in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>") for token in tokenizer.encode(name)[:1]]
    for answers in ((("tool", "24"),), (("tool", "24"), ("tool", "error: no"))):
        following = ObservationTokens(tokenizer).following(Observation(messages=answers), last, stops, SCHEMAS)
        text = f"{prompt}{said}{end}{tokenizer.written_out(following)}"
        whole = tokenizer.chat((*asked, ("assistant", said), *answers), SCHEMAS)
        assert prompt and whole and "calculator" in prompt
        # Its template has no other end than that one.
        assert text.replace("<|eom_id|>", "<|eot_id|>") == whole
        assert (*tokenizer.encode(prompt), *tokenizer.encode(said), last, *following) == tokenizer.encode(text)


def test_a_template_that_forgets_thinking_may_answer_by_tools_alone(
    tokenizer_of: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = tokenizer_of("qwen3")
    encoder, (last,) = ObservationTokens(tokenizer), tokenizer.encode("<|im_end|>")
    assert encoder.following(Observation(messages=(("tool", "24"),)), last, (), SCHEMAS)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        encoder.following(Observation(messages=(("user", "Go on."),)), last, (), SCHEMAS)


@each_case(
    "template",
    [
        # Numbers its turns; leaves thinking in the last answer alone.
        "{% for m in messages %}[{{ loop.index }}]{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{% set late = loop.index0 >= messages | length - 2 %}"
        "{{ m.content if late else m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_that_changes_later_is_refused_too(
    tokenizer_of: Callable[[str], TextTokenizer], template: str
) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.backend.chat_template = template
    with pytest.raises(UserError, match="rewrites earlier turns"):
        ObservationTokens(tokenizer).following(Observation(messages=(("user", "Go on."),)), -1)


class Scripted:
    """A STAND-IN for a policy and its engine: it says the turns of a script, whatever it reads."""

    version, capacity = 0, 8

    def __init__(self, tokenizer: TextTokenizer, turns: Sequence[str]) -> None:
        self.read: list[str] = []
        self._tokenizer, self._turns = tokenizer, iter(turns)
        (self._end,) = tokenizer.encode("<|im_end|>")

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        found = []
        for request in requests:
            self.read.append(self._tokenizer.written_out((*request.tokens, *(request.begun or [()])[0])))
            said = (*self._tokenizer.encode(next(self._turns)), self._end)
            logp = torch.full((len(said),), -0.5)
            spans, seed = (VersionSpan(0, 0, len(said)),), request.seeds[0]
            found.append([Completion(torch.tensor(said), logp, logp, None, spans, FinishReason.STOP, seed)])
        return found


def test_python_keeps_its_names_over_a_conversation_that_ends_in_a_right_answer(
    tokenizer_of: Callable[[str], TextTokenizer], tmp_path: Path
) -> None:
    (tmp_path / "sums.jsonl").write_text('{"id": "s", "problem": "Sum of primes below 30?", "answer": "129"}\n')
    (tmp_path / "tools.yaml").write_text("task: math\npath: sums.jsonl\ntools: [python]\n")
    tokenizer = tokenizer_of("qwen2.5")
    (item,) = load_items("tools", tmp_path / "tools.yaml")
    primes = "p = [n for n in range(2, 30) if all(n % k for k in range(2, n))]"
    policy = Scripted(tokenizer, [f"I list them.\n{CALL % primes}", CALL % "sum(p)", r"It is \boxed{129}."])
    sampling = SamplingParams(max_tokens=2000, stop_token_ids=tokenizer.encode("<|im_end|>"))
    engine = RoundEpisodes(policy, tokenizer, EpisodesConfig())
    maker = GroupMaker(
        FinalJudge(DirectJudge(make_verifiers()), AnswerRule()), tokenizer.decode_batch, sampling, 1, seed=1
    )
    prompt = Prompt("s", "tools", item.text, read_prompt(item, tokenizer).tokens, item.answer, "tools.yaml", 0, 0)
    try:
        sampled = engine.generate([maker.request(prompt)], sampling)
    finally:
        engine.close()
    (group,) = maker.groups(["g"], [prompt], sampled, 0)
    (response,) = group.responses
    assert (response.verdict.outcome, response.verdict.canonical_answer) == (Outcome.CORRECT, "129")
    assert policy.read[1].endswith(
        "<|im_start|>user\n<tool_response>\n(the code printed nothing)\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert policy.read[2].count("<tool_response>\n129\n</tool_response>") == 1
    assert policy.read[2].startswith(policy.read[1]) and policy.read[1].startswith(policy.read[0])
    episode, sampled_T = response.completion.episode, response.completion.sampled_T
    assert episode is not None and len(episode.turns) == 3 and episode.verdict is None and sampled_T is not None
    said = [tokenizer.decode(response.completion.tokens[turn.start : turn.end].tolist()) for turn in episode.turns]
    assert said[1] == CALL % "sum(p)" and int((~sampled_T).sum()) > 0


def test_an_answer_that_differs_is_kept_where_a_tool_does_not_repeat_itself(
    tokenizer_of: Callable[[str], TextTokenizer], tmp_path: Path
) -> None:
    """Going on with a response after its second turn, of which a clock was asked, and one that had another answer."""
    (tmp_path / "sums.jsonl").write_text('{"id": "s", "problem": "1+1?", "answer": "2"}\n')
    tokenizer = tokenizer_of("qwen2.5")
    code = "import time\\ntime.perf_counter_ns()"
    sampling = SamplingParams(max_tokens=2000, stop_token_ids=tokenizer.encode("<|im_end|>"))

    def played(tool: str, begun: Completion | None, turns: Sequence[str]) -> Completion:
        (tmp_path / "tools.yaml").write_text(f"task: math\npath: sums.jsonl\ntools: [{tool}]\n")
        (item,) = load_items("tools", tmp_path / "tools.yaml")
        request = GenerateRequest(read_prompt(item, tokenizer).tokens, (1,), episode=item.answer)
        if begun is not None and begun.episode is not None:
            over = begun.episode.turns[:-1]
            request = replace(request, begun=(tuple(begun.tokens[: over[-1].until].tolist()),), begun_turns=(over,))
        engine = RoundEpisodes(Scripted(tokenizer, turns), tokenizer, EpisodesConfig())
        try:
            ((found,),) = engine.generate([request], sampling)
        finally:
            engine.close()
        return found

    whole = played("python", None, [CALL % code, r"\boxed{2}"])
    rest = played("python", whole, [r"\boxed{2}"])
    assert rest.finish_reason is FinishReason.STOP and rest.episode == whole.episode
    # The calculator's answers are the same each time.
    assert Calculator.repeats
    with pytest.raises(UserError, match="ToolEnvironment answers otherwise than before"):
        played("calculator", whole, [r"\boxed{2}"])


GUESS = """
from random import random

from megasharp.tasks.environment import Environment, Observation


class Guess(Environment):
    async def reset(self, row):
        return Observation(messages=(("user", "Guess."),))

    async def step(self, action):
        return Observation(messages=(("user", "No."),))


class Dice(Guess):
    async def reset(self, row):
        return Observation(str(random()))


class Faults(Guess):
    async def step(self, action):
        raise ValueError("no number")
"""


@each_case(
    ("task", "problems", "family", "refused"),
    [
        ("environment", "use: guess.py:Guess\ncount: 2", "qwen2.5", ""),
        ("environment", "use: guess.py:Guess\ncount: 2", "qwen3", "problems.yaml: the model's chat template rewrites"),
        ("environment", "use: guess.py:Faults\ncount: 2", "qwen3", ""),
        ("environment", "use: guess.py:Dice\ncount: 2", "qwen2.5", "begins otherwise than when its problems were read"),
        ("tools", "task: math\npath: math.jsonl\ntools: [calculator]", "qwen3", ""),
        ("tools", "task: math\npath: math.jsonl\ntools: [calculator]", "no tools", "cannot write messages of .*tool"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused_before_the_run(
    task: str,
    problems: str,
    family: str,
    refused: str,
    tmp_path: Path,
    tokenizer_of: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = tokenizer_of("qwen2.5" if family == "no tools" else family)
    if family == "no tools":
        known = "{% if m.role == 'tool' %}{{ raise_exception('no role tool') }}{% endif %}"
        tokenizer.backend.chat_template = (
            f"{{% for m in messages %}}{known}{{{{ m.content }}}}{{% endfor %}}{{{{ tools }}}}"
        )
    (tmp_path / "math.jsonl").write_text('{"problem": "1+1", "answer": "2", "unique_id": "a"}\n')
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "problems.yaml").write_text(problems)
    items = load_items(task, tmp_path / "problems.yaml")
    with pytest.raises(UserError, match=f"^run.yaml: .*{refused}") if refused else nullcontext():
        try_turn(items, tokenizer, EpisodesConfig(), "run.yaml")
