"""Training data: problems or a mixture of them, batch sizes and length limits, and the judge of responses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from megasharp.common.control import LengthStage
from megasharp.common.section import LEFT_OPEN, DerivedInt, Section
from megasharp.config.reward_levels import RewardLevels

SandboxKind = Literal["bubblewrap", "none"]
Truncated = Literal["by_answer", "wrong", "as_whole"]
# In the place of a mark: `</think>`, where thinking was opened.
AUTO = "auto"


class LengthStageConfig(LengthStage):
    """One of `data.stages`: a limit on responses until the first of its ends."""

    @model_validator(mode="after")
    def _has_an_end(self) -> LengthStageConfig:
        if self.until is None and self.above is None and self.stagnation is None:
            raise ValueError("say when this stage ends: until, above or stagnation")
        if self.weights is not None and not any(self.weights.values()):
            raise ValueError("weights: all are 0; give one source more")
        return self


# A name that is part of metrics' names.
_NAME = r"^[A-Za-z0-9_.-]+$"
# Keys that make the rows of `path` a user's own.
_OF_OWN_ROWS = ("prompt_key", "answer_key", "system", "template", "split", "name", "revision")


class DataSource(Section):
    """A source of problems: those of a `task` in the file `path`, of a data `set`, or of a user's own rows.

    Own rows are at `path` too, on disk or on the hub: a row's prompt is its column `prompt_key`, its answer the column
    `answer_key`. With a `task` its verifier judges the responses, without one `reward.function`.
    """

    task: str | None = Field(
        default=None,
        description="Kind of problems in path, such as countdown or math; it sets the verifier, and, where no "
        "prompt_key is given, the fields that path must have. null with path: rows of your own, which reward.function "
        "judges.",
    )
    set: str | None = Field(
        default=None,
        description="Name of a known data set, such as gsm8k; megasharp data list prints all. Its rows come from "
        "path, or from the Hugging Face hub where path is null.",
    )
    path: str | None = Field(
        default=None,
        description="File with the problems of task, rows of your own (JSONL, JSON, parquet, CSV, a folder of them, a "
        "folder that datasets has saved, or a data set's id on the Hugging Face hub), or a file or folder with the "
        "rows of set in the set's own schema. null with set: the hub, or its cache in HF_HOME.",
    )
    name: str | None = Field(
        default=None,
        description="Configuration of the data set that path names on the hub. null: the only one, else default or "
        "main.",
    )
    split: str | None = Field(
        default=None,
        description="Split of your own rows in path. null: train, where path has splits.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of the data set that path names on the hub. null: its main branch.",
    )
    prompt_key: str | None = Field(
        default=None,
        description="Column of your own rows that holds the prompt, a text or a list of messages with role and "
        "content; a.b is column a's entry b. null: prompt, messages, question, problem or another usual name.",
    )
    answer_key: str | None = Field(
        default=None,
        description="Column of your own rows that holds the answer, of any type. null: answer, ground_truth, "
        "reward_model.ground_truth or another usual name, if there is one.",
    )
    system: str | None = Field(
        default=None,
        description="System message put before the prompts of your own rows that have none of their own.",
    )
    template: str | None = Field(
        default=None,
        description="Text of the user's message around the prompts of your own rows, with {question} in the place of "
        "the prompt and {COLUMN} in that of another column. null: the prompt alone.",
    )
    prompt: str | None = Field(
        default=None,
        description="Name of a prompt template; megasharp data list prints all. null: that of set or task as messages, "
        "which the model's own chat template writes; a model without one gets their text.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.is_mixture:
            return self
        own = [key for key in _OF_OWN_ROWS if getattr(self, key) is not None]
        if self.set is not None and (self.task is not None or own):
            raise ValueError(f"{own[0] if own else 'task'} is for rows of your own or a task's file, not for set")
        if self.set is None and self.task is None and self.path is None:
            raise ValueError("give path, with rows of your own or with the problems of a task, or give set")
        if self.prompt is not None and (self.system is not None or self.template is not None):
            raise ValueError("prompt names a whole template; leave system and template out, or prompt")
        return self

    @property
    def is_mixture(self) -> bool:
        """Return whether the problems are those of several other sources."""
        return False

    @property
    def is_own(self) -> bool:
        """Return whether path holds rows of the user's own, which need no schema of a task's."""
        return self.set is None and (self.task is None or any(getattr(self, key) is not None for key in _OF_OWN_ROWS))

    @property
    def label(self) -> str:
        """Name of the set, the task or the rows, for messages."""
        return self.set or (self.path if self.is_own else self.task) or ""


class RewardFunction(Section):
    """One of several functions whose values are added up."""

    function: str = Field(
        description="Function or class, written package.module:function or folder/file.py:function, as reward.function."
    )
    weight: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Factor of its value in the sum. 0 only logs it.",
    )
    name: str | None = Field(
        default=None,
        pattern=_NAME,
        description="Name in the metric reward/function/NAME. null: the function's own name.",
    )


class MixedSource(DataSource):
    """One source of a mixture: its problems, its share of the prompts, who judges its responses, and its own limits.

    Its prompts are a `weight` of all, or, where no source has one, as many as its rows are of all sources' rows.
    """

    source: str | None = Field(
        default=None,
        pattern=_NAME,
        description="Name of the source in metrics, in data.stages and in the names of its problems. null: that of "
        "its set, its file or its task.",
    )
    weight: float | None = Field(
        default=None,
        ge=0.0,
        description="Its share of a step's prompts, relative to the other sources' weights. null, for all sources: its "
        "share is that of its rows.",
    )
    size: int | None = Field(
        default=None,
        ge=1,
        description="Number of rows to take, drawn by the run's seed; a larger number keeps those of a smaller one. "
        "null: all rows.",
    )
    reward: str | list[RewardFunction] | None = Field(
        default=None,
        description="Function that judges the responses to this source, as reward.function, or several with weights, "
        "as reward.functions. null: reward.function, where that is set, else the task's verifier.",
    )
    max_response_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest response to this source in tokens, where that is less than the limit of the run or of the "
        "stage. null: that limit.",
    )
    responses_per_prompt: int | None = Field(
        default=None,
        ge=1,
        description="Number of responses to each prompt of this source, in every stage. null: as all prompts have.",
    )

    @property
    def own_name(self) -> str:
        """The name of the source, unique in a mixture."""
        if self.source is not None:
            return self.source
        label = Path(self.label).stem if self.set is None else self.label
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", label)


class DataConfig(DataSource):
    """Source of the prompts, number of prompts and responses per step, and length limits in tokens.

    `stages` come before `max_response_tokens`, which holds for the rest of the run. A `mix` has the keys of a source in
    each of its entries, and none stands beside it.
    """

    mix: list[MixedSource] = Field(
        default=[],
        description="Sources of a mixture, each a table with the keys that say what a source is, and its share, reward "
        "and limits. Empty: one source, which the keys of data itself name.",
    )
    bos: bool | None = Field(
        default=None,
        description="Begins prompts that no chat template writes with the tokenizer's begin-of-text token; chat "
        "templates write their own. null: where the tokenizer itself adds one to a text, as Llama's does.",
    )
    prompts_per_step: int = Field(
        default=48,
        ge=1,
        description="Number of prompts (groups) that a step trains on. Groups dropped by a method are replaced where "
        "the method allows it.",
    )
    responses_per_prompt: int = Field(
        default=8,
        ge=1,
        description="Number of responses sampled for each prompt (the group size G). Group baselines need at least 2; "
        "raise it for rarely solved problems. With stages it is the number after the last stage.",
    )
    max_prompt_tokens: DerivedInt = Field(
        default=LEFT_OPEN,
        ge=1,
        description="Longest prompt in tokens. Longer prompts are left out, and their number is reported at the start. "
        "null: as long as 99.9 % of the prompts are, at most half of the model's positions.",
    )
    max_response_tokens: DerivedInt = Field(
        default=LEFT_OPEN,
        ge=1,
        description="Longest response in tokens, the end token included; longer ones are cut off. With stages it is "
        "the limit after the last stage. null: as the task needs (2048 for rows of your own), at most what the model's "
        "positions leave beside the prompt.",
    )
    stages: list[LengthStageConfig] = Field(
        default=[],
        description="Limits on the response length before max_response_tokens, in order, as in ProRL's 8k then 16k; "
        "weights and responses_per_prompt may differ from stage to stage too. Empty: one limit for the whole run.",
    )

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        names = [each.own_name for each in self.mix]
        for stage in self.stages:
            if unknown := [name for name in stage.weights or () if name not in names]:
                known = ", ".join(names) or "none, for there is no mix"
                raise ValueError(f"stages: weights: no source {unknown[0]!r}; sources: {known}")
        if not self.mix:
            return self
        if beside := [key for key in DataSource.model_fields if getattr(self, key) is not None]:
            raise ValueError(f"{beside[0]} is beside mix, whose entries say what is read; leave one of the two out")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"mix: two sources are named {twice[0]}; give one of them another name by source=")
        if empty := [each.own_name for each in self.mix if each.reward == []]:
            raise ValueError(f"mix: the reward of {empty[0]} names no function; name one, or leave it out")
        if "function" in names:
            raise ValueError("mix: no source may be named function, which metrics of rewards have; name it by source=")
        weighed = [each.weight for each in self.mix if each.weight is not None]
        if 0 < len(weighed) < len(self.mix):
            without = next(each.own_name for each in self.mix if each.weight is None)
            raise ValueError(f"mix: {without} has no weight, and others have; give all sources one, or none")
        if weighed and not any(weighed):
            raise ValueError("mix: all weights are 0; give one source more")
        return self

    @property
    def is_mixture(self) -> bool:
        """Return whether the problems are those of the sources in `mix`."""
        return bool(self.mix)

    @property
    def sources(self) -> Sequence[DataSource]:
        """The sources of the problems: those of `mix`, or this one."""
        return self.mix or [self]

    @property
    def label(self) -> str:
        """Name of the data, for messages."""
        return "a mixture" if self.mix else super().label

    @property
    def weights(self) -> dict[str, float] | None:
        """The weights of the mixture's sources; None where their rows are."""
        found = {each.own_name: each.weight for each in self.mix if each.weight is not None}
        return found or None

    @property
    def group_sizes(self) -> frozenset[int]:
        """Numbers of responses that a prompt may have, in all stages and sources."""
        of_stages = (stage.responses_per_prompt for stage in self.stages)
        own = (each.responses_per_prompt for each in self.mix)
        return frozenset({self.responses_per_prompt, *filter(None, of_stages), *filter(None, own)})

    @property
    def largest_group(self) -> int:
        """Largest number of responses to a prompt: plans and engines are sized for it."""
        return max(self.group_sizes)

    @property
    def largest_response(self) -> int:
        """Largest response limit of all stages: memory is planned for it, and token_sum_over_constant divides by it."""
        return max(self.max_response_tokens or 1, *(stage.max_response_tokens for stage in self.stages), 1)


class RewardConfig(Section):
    """Verification of responses: in the driver with 0 workers, which suits verifiers that only compute.

    Without the key it is 0, but 1 to 4 for a `function` and for tasks such as `math` whose verifier can hang. A worker
    process is killed and replaced when a response takes longer than `timeout_s`. `function`, or the weighted sum of
    `functions`, judges training responses instead of the task's verifier; evaluations of a task keep its verifier.
    Programs that the model writes run in bubblewrap; with `sandbox: none` they have this user's rights.
    """

    workers: int | None = Field(
        default=None,
        ge=0,
        description="Number of processes that judge responses. 0: the trainer judges in its own process, which suits "
        "verifiers that only compute. null: 0, or half of the cores (1 to 4) for a function of your own and for tasks "
        "such as math whose verifier may hang.",
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        description="Seconds that a worker may spend on one response; then the worker is replaced and the response "
        "gets reward 0. A call with several responses has as many times that. A program of task code has 90 % of it "
        "for all its tests. With 0 workers only those programs are limited.",
    )
    function: str | None = Field(
        default=None,
        description="Python function or class, written package.module:function or folder/file.py:function, that judges "
        "training responses instead of the task's verifier. It takes (text, answer), or the parameters of TRL or verl; "
        "it may be async. It is found beside the run file and in the working directory. null: the task's verifier.",
    )
    functions: list[RewardFunction] = Field(
        default=[],
        description="Several functions instead of one: the reward is the sum of their values times their weights, and "
        "each is logged by itself. The first one decides what is correct.",
    )
    levels: RewardLevels | None = Field(
        default=None,
        description="Rewards that a task's verifier gives, instead of the task's own, which are 1 for a right answer "
        "and 0 for all else (0.1 for answer tags in countdown_3 and countdown_3to4). null: the task's own.",
    )
    concurrency: int = Field(
        default=64,
        ge=1,
        description="Number of calls of an async function that are under way at once, shared out among the workers; "
        "each has at least one.",
    )
    answer_after: str = Field(
        default=AUTO,
        description="Text behind which a task's verifier looks for the answer, the last one where there are several; a "
        "response without it is wrong. auto: </think>, which must be there only where thinking was opened, by the "
        "end of the prompt or by the response. Empty: the whole response is read. Your own functions get all of it.",
    )
    truncated: Truncated = Field(
        default="by_answer",
        description="Verdict of a task's verifier on responses that met the limit of tokens. by_answer: they count "
        "where the answer stands complete, in a closed box or tags or with words after it; wrong: they never do; "
        "as_whole: they are read as if they had ended there.",
    )
    sandbox: SandboxKind = Field(
        default="bubblewrap",
        description="Isolation of programs that the model writes (task code). bubblewrap runs them without network "
        "and outside your files; none runs them with your own rights.",
    )

    @model_validator(mode="after")
    def _check_functions(self) -> RewardConfig:
        if self.function is not None and self.functions:
            raise ValueError("function and functions are both set; give one of the two")
        if self.levels is not None and (self.function or self.functions):
            raise ValueError("levels are of a task's verifier, and functions give their own; set levels to null")
        names = [each.name or each.function.rpartition(":")[2] for each in self.functions]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"functions: two are named {min(twice)}; give one of them a name")
        return self
