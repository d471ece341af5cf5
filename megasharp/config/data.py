"""Training data: problems, batch sizes and length limits, and the judge of responses."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from megasharp.common.control import LengthStage
from megasharp.common.section import LEFT_OPEN, DerivedInt, Section

SandboxKind = Literal["bubblewrap", "none"]


class LengthStageConfig(LengthStage):
    """One of `data.stages`: a limit on responses until the first of its ends."""

    @model_validator(mode="after")
    def _has_an_end(self) -> LengthStageConfig:
        if self.until is None and self.above is None and self.stagnation is None:
            raise ValueError("say when this stage ends: until, above or stagnation")
        return self


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
        own = [key for key in _OF_OWN_ROWS if getattr(self, key) is not None]
        if self.set is not None and (self.task is not None or own):
            raise ValueError(f"{own[0] if own else 'task'} is for rows of your own or a task's file, not for set")
        if self.set is None and self.task is None and self.path is None:
            raise ValueError("give path, with rows of your own or with the problems of a task, or give set")
        if self.prompt is not None and (self.system is not None or self.template is not None):
            raise ValueError("prompt names a whole template; leave system and template out, or prompt")
        return self

    @property
    def is_own(self) -> bool:
        """Whether path holds rows of the user's own, which need no schema of a task's."""
        return self.set is None and (self.task is None or any(getattr(self, key) is not None for key in _OF_OWN_ROWS))

    @property
    def label(self) -> str:
        """Name of the set, the task or the rows, for messages."""
        return self.set or (self.path if self.is_own else self.task) or ""


class DataConfig(DataSource):
    """Source of the prompts, number of prompts and responses per step, and length limits in tokens.

    `stages` come before `max_response_tokens`, which holds for the rest of the run.
    """

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
        "raise it for rarely solved problems.",
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
        description="Limits on the response length before max_response_tokens, in order, as in ProRL's 8k then 16k. "
        "Empty: one limit for the whole run.",
    )

    @property
    def largest_response(self) -> int:
        """Largest response limit of all stages: memory is planned for it, and token_sum_over_constant divides by it."""
        return max(self.max_response_tokens or 1, *(stage.max_response_tokens for stage in self.stages), 1)


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
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Name in the metric reward/function/NAME. null: the function's own name.",
    )


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
    concurrency: int = Field(
        default=64,
        ge=1,
        description="Number of calls of an async function that are under way at once, shared out among the workers; "
        "each has at least one.",
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
        names = [each.name or each.function.rpartition(":")[2] for each in self.functions]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"functions: two are named {min(twice)}; give one of them a name")
        return self
