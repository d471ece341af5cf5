"""The whole schema of one run.yaml: every key that may appear, with the vetted setting as its default.

The larger tables have files of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megasharp.common.formats import Keep
from megasharp.common.section import Section
from megasharp.common.watchdog import STAGE_TIMEOUT_S
from megasharp.config.core import Tree, apply_overrides, find, included, merge, nested, read_tree, validate
from megasharp.config.data import DataConfig, RewardConfig
from megasharp.config.log import LogConfig
from megasharp.config.policy import ModelConfig, PolicyConfig
from megasharp.config.recipe_section import RecipeConfig
from megasharp.config.rollout import ClusterConfig, RolloutConfig, SyncConfig


class CheckpointConfig(Section):
    """Schedule and retention of checkpoints; the last step always writes one.

    `keep_best` names a metric of the evaluations: the step of its best value gets a checkpoint that stays.
    """

    every: int = Field(
        default=50,
        ge=1,
        description="Number of steps between checkpoints. The last step always writes one. Lower it to lose less work "
        "after a failure.",
    )
    keep_last: int = Field(default=3, ge=1, description="Number of newest checkpoints that stay on disk.")
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="Keeps every checkpoint whose step is a multiple of this number, besides the newest. It should be "
        "a multiple of every. null: only the newest and the best stay.",
    )
    keep_best: str | None = Field(
        default=None,
        description="Evaluation metric, as eval/SUITE/pass@1, whose best step gets a checkpoint that stays. null: "
        "none.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Writes checkpoints in the background while training goes on, from a copy in host memory. Set "
        "false when host memory is short.",
    )
    export_hf: bool = Field(
        default=False,
        description="Writes the policy's weights as a Hugging Face folder, hf_export, into each checkpoint. It delays "
        "each save; megasharp convert does the same afterwards.",
    )


class EvalConfig(Section):
    """Periodic evaluation: `n` samples per problem, unbiased pass@k for every k in `k` (all k <= n).

    The policy alone is sampled; `with_memory` evaluates each suite a second time with DLC's subtraction.
    `probe` responses, sampled at the first evaluation, are scored again at every one, to see how the probabilities of
    their tokens move. `max_response_tokens` is one limit for the whole run, so that evaluations compare.
    """

    every: int = Field(
        default=25,
        ge=0,
        description="Number of steps between evaluations. 0: only before the first step (at_start) and after the last.",
    )
    at_start: bool = Field(
        default=True,
        description="Evaluates the starting model before the first step. The measured change needs it.",
    )
    suites: list[str] = Field(
        default=[],
        description="Suites to evaluate, each a name from configs/task or the path of a YAML file. Names of groups, "
        "as casp_math6, are for megasharp eval. Empty: no evaluation.",
    )
    prompt: str | None = Field(
        default=None,
        description="Name of a prompt template for all suites whose answers have its form, or suite: that of each "
        "suite's set or task, as published. A suite's file that names one counts first. null: training's prompt for "
        "suites of its task.",
    )
    n: int = Field(
        default=64,
        ge=1,
        description="Number of samples per problem. Raise it for pass@k at large k or for tighter intervals; cost "
        "grows in proportion.",
    )
    k: list[int] = Field(
        default=[1, 4, 16, 64],
        description="Values of k for which pass@k is estimated without bias; none may exceed n.",
    )
    temperature: float = Field(
        default=1.0,
        ge=0.0,
        description="Sampling temperature of evaluations. 0: greedy, so all samples of a problem are equal. A greedy "
        "response per problem is sampled in any case.",
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling of evaluations. 1: off.")
    top_k: int = Field(
        default=0,
        ge=0,
        description="Number of most likely tokens that evaluations may choose from. 0: all.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Share of the most likely token's probability that a token of evaluations needs, after top_k and "
        "top_p. 0: off.",
    )
    stop: list[str] = Field(
        default=[],
        description="Strings that end a response of evaluations. Its tokens end with the one by which its text holds "
        "such a string; the text that is judged ends before it. Empty: only the model's end tokens.",
    )
    max_response_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest response in evaluations, in tokens, the same for the whole run so that evaluations "
        "compare. null: the largest limit of training.",
    )
    with_memory: bool = Field(
        default=False,
        description="Evaluates each suite a second time, sampled with dlc's memory network, under the name "
        "SUITE+memory. Needs dlc in the recipe; doubles the cost.",
    )
    keep: Keep = Field(
        default="texts",
        description="Part of each sample that stays in evals/step_N/samples: none; answers: outcome, answer and token "
        "figures; texts: the response too; tokens: its token ids too. Texts can be judged again without a model.",
    )
    keep_mb: int = Field(
        default=2048,
        ge=0,
        description="Bound in MiB on what all evaluations of the run keep together; above it answers alone are kept, "
        "and a line says so. The default holds about 1.4 billion tokens of text, in less room than the weights of a "
        "1.5B model.",
    )
    probe: int = Field(
        default=32,
        ge=0,
        description="Number of responses of the first suite that are sampled once, at the first evaluation, and read "
        "again at each one to see how token probabilities move. Capped at 512 tokens each. 0: none; only the "
        "in-process engine does it.",
    )

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        if not self.k or min(self.k) < 1:
            raise ValueError("k: give at least one value, all >= 1")
        if max(self.k) > self.n:
            raise ValueError(f"n={self.n} samples cannot give pass@{max(self.k)}; raise eval.n or lower eval.k")
        return self


class LongStagesConfig(Section):
    """Time limits in seconds of stages that may rightly take long: start, sampling, one suite's evaluation, a save."""

    start: float | None = Field(
        default=7200.0,
        gt=0.0,
        description="Seconds that the start may take: checking the newest checkpoint, starting engines, loading "
        "weights. null: no limit.",
    )
    rollout: float | None = Field(
        default=43200.0,
        gt=0.0,
        description="Seconds that sampling the responses of one step may take. null: no limit.",
    )
    eval: float | None = Field(
        default=43200.0,
        gt=0.0,
        description="Seconds that the evaluation of one suite may take. null: no limit.",
    )
    checkpoint: float | None = Field(
        default=7200.0,
        gt=0.0,
        description="Seconds that writing one checkpoint may take. null: no limit.",
    )


class GuardConfig(Section):
    """Limits at which a run protects itself: steps in a row that were not applied, gradient spikes, stages that hang.

    A stage that takes longer than `stage_timeout_s`, or than its own limit in `long_stages`, ends the run; the stacks
    of all processes are then in the attempt's logs. A spike is a gradient norm `spike_sigma` standard deviations above
    the mean of the last `spike_window` updates.
    """

    nan_limit: int = Field(
        default=5,
        ge=1,
        description="Number of steps in a row without an applied update after which the run saves a checkpoint and "
        "stops. It counts steps with a non-finite loss or gradient, gradient spikes, and steps whose groups were all "
        "dropped.",
    )
    engine_gap: float | None = Field(
        default=0.1,
        gt=0.0,
        description="Mean distance in nats between the engine's log-probs and the policy's above which the run warns "
        "that the engine samples another policy. It never stops the run. null: no warning.",
    )
    engine_gap_filter: float | None = Field(
        default=None,
        gt=0.0,
        description="The same distance, as the mean over one response's tokens, above which that response is left out "
        "of the update as if it had no verdict. Costs a forward pass where no method asks for old log-probs. null: "
        "no response is left out.",
    )
    engine_gap_stop: float | None = Field(
        default=None,
        gt=0.0,
        description="The same mean distance in nats above which one step makes the run save a checkpoint and stop. "
        "Stale responses are at a distance too, so set it well above what policy/engine_gap is in a sound run: 1 "
        "suits most. null: the run only warns.",
    )
    reward_errors: float | None = Field(
        default=0.05,
        ge=0.0,
        le=1.0,
        description="Share of a step's responses whose reward may fail: the verifier or reward.function raises or "
        "returns what is no reward, or reward.function takes too long or ends its process. A run that is above it in "
        "3 steps in a row, or in one step with all responses, saves a checkpoint and stops. null: it never stops for "
        "that, and failed responses count as reward 0.",
    )
    infra_rate: float | None = Field(
        default=0.02,
        ge=0.0,
        le=1.0,
        description="Share of a step's responses that engines may end, or not sample at all, or whose environment may "
        "fail: such a response is not trained on, and long ones are the first to go. A run saves a checkpoint and "
        "stops where 6 responses or more, and a larger share than this, are lost in one step, or in the latest steps "
        "that together have 256 responses. So one lost response never stops a small run. null: it never stops for "
        "that.",
    )
    spike_sigma: float | None = Field(
        default=6.0,
        gt=0.0,
        description="Number of standard deviations above the mean of recent gradient norms at which an update is left "
        "out as a spike. It starts to act after 20 updates. null: no update is left out.",
    )
    spike_window: int = Field(
        default=128,
        ge=20,
        description="Number of the latest optimizer steps whose gradient norms give that mean and deviation.",
    )
    replica_check_every: int = Field(
        default=100,
        ge=0,
        description="Number of steps between two in which ranks compare checksums of what they hold copies of, such "
        "as the weights of data-parallel ranks, before and after the update; before each save they do so too. A "
        "difference means that a machine's memory or link has damaged them: the run stops with exit code 1, names "
        "ranks and tensor, and saves nothing. An update gathers most weights anew, so damage between two such steps "
        "passes unseen: 1 looks in every step, and reads the weights twice. 0: never compare.",
    )
    stage_timeout_s: float | None = Field(
        default=STAGE_TIMEOUT_S,
        gt=0.0,
        description="Seconds that a stage of a step, such as update or sync, may take before the watchdog ends the "
        "run and writes the stacks of all processes. Stages named in long_stages have their own limit. null: no "
        "limit.",
    )
    long_stages: LongStagesConfig = Field(
        default=LongStagesConfig(),
        description="Time limits of stages that may rightly take long: start, rollout, eval and checkpoint.",
    )


class RunConfig(Section):
    """One run of `steps` steps, or fewer: it ends after the step by which `token_budget` response tokens were sampled.

    Responses of dropped groups count, so methods that sample more for a step are compared at equal cost.
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="Name of the run and of its folder below --runs; each run needs its own. It begins with a letter "
        "or digit, followed by letters, digits, dots, underscores, plus signs or hyphens.",
    )
    seed: int = Field(
        default=1,
        ge=0,
        description="Seed of the order of prompts, of sampling in training and evaluation, and of all other random "
        "numbers of the run. Change it to repeat a run with other randomness.",
    )
    steps: int = Field(
        ge=1,
        description="Number of training steps. Each step samples prompts_per_step groups, updates the policy and "
        "pushes the weights to the engines. It also sets the end of a linear or cosine learning rate decay.",
    )
    token_budget: int | None = Field(
        default=None,
        ge=1,
        description="Ends the run after the step by which this many response tokens have been sampled, those of "
        "dropped groups included. Set it to compare methods at equal sampling cost. null: only steps ends the run.",
    )
    deterministic: bool = Field(
        default=False,
        description="Makes the run repeatable bit for bit at the same layout, also across a stop and a resume, at a "
        "cost in speed. It uses deterministic kernels and one CPU thread per process, and needs rollout.max_staleness "
        "and rollout.oversample at 0.",
    )
    model: ModelConfig = Field(description="Starting weights and their dtype.")
    policy: PolicyConfig = Field(
        default=PolicyConfig(),
        description="Training of the policy: device, parallelism, memory, precision, optimizer and LoRA.",
    )
    data: DataConfig = Field(
        description="Training problems, the number of prompts and responses per step, and the length limits.",
    )
    reward: RewardConfig = Field(
        default=RewardConfig(),
        description="Verification of responses: worker processes, time limit, own reward function and sandbox.",
    )
    rollout: RolloutConfig = Field(
        default=RolloutConfig(),
        description="Sampling of training responses: the engine, its sampling parameters and how far it may run ahead.",
    )
    recipe: RecipeConfig = Field(
        default=RecipeConfig(),
        description="Training methods, their options, the reduction of the loss, the schedule and the resets.",
    )
    sync: SyncConfig = Field(
        default=SyncConfig(),
        description="Transfer of weights from the policy to the engines after each step.",
    )
    cluster: ClusterConfig = Field(
        default=ClusterConfig(),
        description="Placement of policy ranks and engines on nodes and GPUs.",
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(),
        description="Schedule, retention and form of checkpoints.",
    )
    eval: EvalConfig = Field(
        default=EvalConfig(),
        description="Evaluation during training: schedule, suites and sampling settings.",
    )
    log: LogConfig = Field(
        default=LogConfig(),
        description="Outputs of metrics and responses: TensorBoard, trackers and tables of responses.",
    )
    guard: GuardConfig = Field(
        default=GuardConfig(),
        description="Limits at which the run warns, leaves out an update or stops itself.",
    )


# The keys of a run that hold a path, or a list of them, or of tables with a path.
PATH_KEYS = ("model.path", "data.path", "data.mix", "recipe.dlc.memory.path", "rollout.python", "eval.suites")


def with_paths_beside(tree: Tree, file: Path) -> Tree:
    """Make the paths in the tree of a run file absolute where they exist beside that file.

    Others are looked up later, from the working directory and in what megasharp ships. What the working directory has
    at the same place keeps its words, so that a resumed run has the configuration that it was stored with.
    """
    folder = file.parent.absolute()

    def beside(item: Any) -> Any:
        if isinstance(item, dict) and "path" in item:
            return {**item, "path": beside(item["path"])}
        if not isinstance(item, str) or not item:
            return item
        near, written = folder / item, Path(item).expanduser()
        return str(near) if near.exists() and not (written.exists() and near.samefile(written)) else item

    for key in PATH_KEYS:
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        # Anything else is left to the schema, which says what is wrong with it.
        if isinstance(value, str):
            tree = merge(tree, nested(key, beside(value)))
        elif isinstance(value, list):
            tree = merge(tree, nested(key, [beside(item) for item in value]))
    return tree


def run_of(tree: Tree, path: Path) -> RunConfig:
    """Return the run that a file at `path` with this content stands for. Raises UserError in one line."""
    return validate(RunConfig, included(tree, path, with_paths_beside), str(path))


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge, override and validate a run file, or a shipped one by its name.

    Paths in it are found beside the file that has them, from the working directory, or in what megasharp ships. Raises
    UserError in one line.
    """
    return validate(RunConfig, run_tree(path, overrides), str(path), find(str(path)), overrides)


def run_tree(path: Path, overrides: Sequence[str] = ()) -> Tree:
    """Read and merge a run file, and override keys of it, without validating: the keys that the user sets.

    Raises UserError in one line.
    """
    return apply_overrides(read_tree(find(str(path)), with_paths_beside), overrides)
