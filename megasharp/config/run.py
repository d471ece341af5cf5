"""The whole schema of one run.yaml: every key that may appear, with the vetted setting as its default.

The tables of `recipe` come from the table of methods, so a new method brings its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer, model_validator

from megasharp.algos import METHODS
from megasharp.algos.base import MethodParams, Reduction
from megasharp.common.section import Section
from megasharp.common.watchdog import STAGE_TIMEOUT_S
from megasharp.config.core import Tree, apply_overrides, included, read_tree, validate

DtypeName = Literal["float32", "bfloat16"]
# What a flag of SGLang can be in YAML; the installed SGLang judges names, types and choices.
EngineFlag = int | float | bool | str | list[int | float | bool | str] | None
LoraTarget = Literal["qkv", "proj", "fc1", "fc2"]
ReductionName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_over_constant"]


class ModelConfig(Section):
    """The folder that training starts from, of Hugging Face or Megatron, and the dtype of its weights in training."""

    path: str
    dtype: DtypeName = "float32"


class OptimizerConfig(Section):
    """Adam with decoupled weight decay; learning rate in absolute units, warm-up in optimizer steps."""

    lr: float = Field(default=1.0e-6, gt=0.0)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(default=1.0e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    clip_grad: float = Field(default=1.0, ge=0.0)
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"


class LoraConfig(Section):
    """Adapters of rank `rank` on the named linear maps, scaled by alpha / rank; all other weights stay as they are.

    There is no dropout: it would make old and new log-probs differ where the weights do not.
    """

    rank: int = Field(ge=1)
    alpha: float = Field(default=16.0, gt=0.0)
    targets: list[LoraTarget] = Field(default=["qkv", "proj", "fc1", "fc2"], min_length=1)

    @model_validator(mode="after")
    def _each_once(self) -> LoraConfig:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets: {', '.join(self.targets)} names one twice")
        return self


class PolicyConfig(Section):
    """The policy under training and how it is split over ranks; dp follows from the world size.

    `device: auto` is a GPU where the file asks for some (`cluster.gpus_per_node`) or a run without Ray finds one.

    `head: chunked` computes logits a thousand tokens at a time and once more in backward, instead of holding those of a
    whole micro-batch: less memory for one matrix product of the output layer more.
    `transformer_engine`: layers of NVIDIA's modules; auto takes them on GPUs where they are installed. `fp8`: they
    multiply in 8 bits, with scales as `fp8_recipe` says. `overlap`: data-parallel ranks exchange gradients and weights
    while they compute; auto on GPUs with more than one of them.
    `recompute_modules`: what `recompute: selective` computes twice, by Megatron's names; its other ones are of other
    models, but for `layernorm`, which asks for Transformer Engine, whose layers have no norms of their own to save.
    `optimizer_offload`: main weights and moments (12 bytes a parameter) lie in page-locked host memory and pass through
    the GPU in each step; `offload` only frees the GPU while engines sample.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    dp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    vpp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[Literal["core_attn", "mlp"]] = ["core_attn"]
    head: Literal["logits", "chunked"] = "logits"
    transformer_engine: Literal["auto"] | bool = "auto"
    fp8: Literal["hybrid", "e4m3"] | None = None
    fp8_recipe: Literal["tensorwise", "blockwise"] = "blockwise"
    overlap: Literal["auto"] | bool = "auto"
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizer_offload: bool = False
    lora: LoraConfig | None = None
    offload: list[Literal["weights", "gradients", "optimizer"]] = []
    megatron: dict[str, int | float | bool | str | None] = {}


class StagnationConfig(Section):
    """True when a figure of the evaluations, such as `eval/<suite>/pass@1`, has stopped growing.

    That is: `patience` scheduled evaluations in a row are not above the best by more than `min_improvement`.
    """

    metric: str
    patience: int = Field(default=4, ge=1)
    min_improvement: float = Field(default=0.0, ge=0.0)


class ThresholdConfig(Section):
    """True when the mean of a figure of the training steps over the last `steps` of them is above `value`."""

    metric: Literal["rollout/truncated", "rollout/length_mean"]
    value: float = Field(ge=0.0)
    steps: int = Field(default=10, ge=1)


class LengthStageConfig(Section):
    """Responses have this limit until the first of its ends: a step, a threshold, an evaluation that stagnates."""

    until: int | None = Field(default=None, ge=1)
    above: ThresholdConfig | None = None
    stagnation: StagnationConfig | None = None
    max_response_tokens: int = Field(ge=1)

    @model_validator(mode="after")
    def _has_an_end(self) -> LengthStageConfig:
        if self.until is None and self.above is None and self.stagnation is None:
            raise ValueError("say when this stage ends: until, above or stagnation")
        return self


class DataConfig(Section):
    """Where prompts come from and how much is asked of them, lengths in tokens.

    Problems are those of a `task` in the file `path`, or of a data `set`, from the hub, or from `path` where files of
    the set's own schema lie. `prompt` is another template than the set's. `stages` come before `max_response_tokens`,
    which holds for the rest of the run.
    """

    task: str | None = None
    set: str | None = None
    path: str | None = None
    prompt: str | None = None
    prompts_per_step: int = Field(default=48, ge=1)
    responses_per_prompt: int = Field(default=8, ge=1)
    max_prompt_tokens: int = Field(default=64, ge=1)
    max_response_tokens: int = Field(default=32, ge=1)
    stages: list[LengthStageConfig] = []

    @model_validator(mode="after")
    def _one_kind(self) -> DataConfig:
        if (self.task is None) == (self.set is None):
            raise ValueError("give either task and path, or set")
        if self.set is None and self.prompt is not None:
            raise ValueError("prompt: a template is for data.set; a task has its own prompt")
        return self

    @property
    def name(self) -> str:
        """The task or the set, as messages call it."""
        return self.set or self.task or ""

    @property
    def largest_response(self) -> int:
        """The largest limit of all stages: what room is planned for, and what a token's constant share is of."""
        return max(self.max_response_tokens, *(stage.max_response_tokens for stage in self.stages), 1)


class RewardConfig(Section):
    """Where verification runs: 0 workers is in the driver, right for verifiers that only compute.

    Without the key it is 0, but 1 to 4 for a `function` and for tasks whose verifier may take for ever, `math` among
    them. Worker processes are killed and replaced when a response takes them longer than `timeout_s`. `function`,
    written `package.module:function`, judges training's responses in place of the task's verifier; evaluations keep
    theirs.
    Programs that the model writes run in a sandbox of bubblewrap's; with none they have this user's rights.
    """

    workers: int | None = Field(default=None, ge=0)
    timeout_s: float = Field(default=10.0, gt=0.0)
    function: str | None = None
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"


class RolloutConfig(Section):
    """How responses are sampled and by what.

    `oversample` is the share of prompts sampled beyond those wanted. Stragglers, unfinished when enough groups are
    there, are aborted between steps or kept in flight. A prompt's responses have `request_limit_s` seconds. An engine
    that is lost begins anew up to `restarts` times within an hour, while another is left.
    """

    engine: Literal["inprocess", "sglang"] = "inprocess"
    python: str | None = None
    temperature: float = Field(default=1.0, gt=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    max_staleness: int = Field(default=0, ge=0)
    oversample: float = Field(default=0.0, ge=0.0, le=4.0)
    stragglers: Literal["abort", "keep"] = "abort"
    request_limit_s: float = Field(default=1800.0, gt=0.0)
    engines: int = Field(default=1, ge=1)
    restarts: int = Field(default=3, ge=0)
    tp: int = Field(default=1, ge=1)
    sglang: dict[str, EngineFlag] = {}


class ScheduleStage(Section):
    """Until this step the run uses these methods instead of `recipe.methods`."""

    until: int = Field(ge=1)
    methods: list[str]


class ResetConfig(Section):
    """Resets of reference and optimizer during prolonged training: every so many steps, or on stagnation, or both."""

    every: int | None = Field(default=None, ge=1)
    stagnation: StagnationConfig | None = None
    optimizer: Literal["reinit", "keep"] = "reinit"


class RecipeBase(Section):
    """Which methods train; each method's parameters stand in a table of its name."""

    methods: list[str] = ["grpo"]
    mini_batches: int = Field(default=1, ge=1)
    reduction: ReductionName | None = None
    schedule: list[ScheduleStage] = []
    reset: ResetConfig = ResetConfig()

    def params(self) -> Mapping[str, MethodParams]:
        """Every built method's parameter table, by name."""
        return {name: getattr(self, name) for name in METHODS}

    @model_serializer(mode="wrap")
    def _tables_as_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A method's table holds only what was set in it: a default written out would override a bundle's value."""
        tree: dict[str, Any] = handler(self)
        for name, params in self.params().items():
            written = params.model_dump(mode="json", exclude_unset=True)
            tree.pop(name, None)
            if written:
                tree[name] = written
        return tree

    def chosen_reduction(self) -> Reduction | None:
        """The reduction set by hand, or None to let the methods prescribe it."""
        return Reduction(self.reduction) if self.reduction else None


def _recipe_schema() -> type[RecipeBase]:
    named: dict[str, Any] = {name: (method.Params, method.Params()) for name, method in METHODS.items()}
    return create_model("RecipeConfig", __base__=RecipeBase, **named)


if TYPE_CHECKING:
    RecipeConfig = RecipeBase
else:
    RecipeConfig = _recipe_schema()


class SyncConfig(Section):
    """How weights travel from the learner to the engines.

    An engine that does not answer one call of a push (a bucket; from disk or to verify, all weights) within `limit_s`
    seconds is given up, and the push goes on with the others. The default lets 64 GB come at 110 MB/s.
    """

    transport: Literal["auto", "inprocess", "shared_memory", "ipc", "nccl", "gloo", "disk"] = "auto"
    verify: bool = False
    in_flight: Literal["retract", "in_place"] = "retract"
    bucket_mb: int = Field(default=512, ge=1)
    limit_s: float = Field(default=600.0, gt=0.0)


class ClusterConfig(Section):
    """Where processes are placed: a slot for each rank of policy and engines, a GPU and `cpus_per_slot` CPUs.

    Co-located engines share the policy's slots. With `gpus_per_node` 0 a slot is CPUs only.
    """

    backend: Literal["local", "ray"] = "local"
    placement: Literal["colocated", "disaggregated"] = "colocated"
    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=0, ge=0)
    cpus_per_slot: float = Field(default=1.0, gt=0.0)


class CheckpointConfig(Section):
    """When a checkpoint is written and which ones stay; the last step always writes one.

    `keep_best` names a figure of the evaluations: the step of the best one gets a checkpoint that stays.
    """

    every: int = Field(default=50, ge=1)
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: str | None = None
    asynchronous: bool = True
    export_hf: bool = False


class EvalConfig(Section):
    """Periodic evaluation: `n` samples per problem, unbiased pass@k for every k in `k` (all k <= n).

    The policy alone is sampled; `with_memory` evaluates each suite a second time with DLC's subtraction.
    `probe` responses, sampled at the first evaluation, are read again at every one: how likely each of their tokens,
    and what else, has become (0: none; only the in-process engine can).
    `max_response_tokens` holds for the whole run, so that figures compare; null is the largest limit of training.
    """

    every: int = Field(default=25, ge=0)
    at_start: bool = True
    suites: list[str] = []
    n: int = Field(default=64, ge=1)
    k: list[int] = [1, 4, 16, 64]
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_response_tokens: int | None = Field(default=None, ge=1)
    with_memory: bool = False
    probe: int = Field(default=32, ge=0)

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        if not self.k or min(self.k) < 1:
            raise ValueError("k: give at least one value, all >= 1")
        if max(self.k) > self.n:
            raise ValueError(f"n={self.n} samples cannot give pass@{max(self.k)}; raise eval.n or lower eval.k")
        return self


class LogConfig(Section):
    """Where figures go besides metrics.jsonl, and of how many of the most probable tokens they tell.

    `rollout_tokens` bounds the response tokens of a step whose texts and log-probs are in the table of its responses.

    `wandb` is a project (or entity/project), `mlflow` an experiment; keys and servers are those libraries' own matter.
    """

    tensorboard: bool = True
    candidates: int = Field(default=3, ge=1, le=8)
    wandb: str | None = None
    mlflow: str | None = None
    rollouts: bool = True
    rollout_tokens: int = Field(default=65536, ge=0)

    @property
    def trackers(self) -> dict[str, str]:
        """What each tracker, by its library's name, is to put the run under."""
        asked = {"wandb": self.wandb, "mlflow": self.mlflow}
        return {name: project for name, project in asked.items() if project is not None}


class LongStagesConfig(Section):
    """Seconds for stages that may rightly take long: a start, a step's responses, one suite's samples, a save."""

    start: float | None = Field(default=7200.0, gt=0.0)
    rollout: float | None = Field(default=43200.0, gt=0.0)
    eval: float | None = Field(default=43200.0, gt=0.0)
    checkpoint: float | None = Field(default=7200.0, gt=0.0)


class GuardConfig(Section):
    """When the run protects itself: steps in a row that were not applied, gradient spikes, a stage's time in seconds.

    A stage that takes longer than `stage_timeout_s`, or than its own of `long_stages`, ends the run, with the stacks of
    all processes in the attempt's logs. Null: no limit.
    A spike is a gradient norm `spike_sigma` standard deviations above the mean of the last `spike_window` updates.
    Above `engine_gap`, a step's mean distance in nats of the learner's log-probs from the engine's, the run says so.
    """

    nan_limit: int = Field(default=5, ge=1)
    engine_gap: float | None = Field(default=0.1, gt=0.0)
    spike_sigma: float | None = Field(default=6.0, gt=0.0)
    spike_window: int = Field(default=128, ge=20)
    stage_timeout_s: float | None = Field(default=STAGE_TIMEOUT_S, gt=0.0)
    long_stages: LongStagesConfig = LongStagesConfig()


class RunConfig(Section):
    """One run of `steps` steps, or fewer: it ends after the step by which `token_budget` response tokens were sampled.

    Responses of dropped groups count, so methods that sample more for a step are compared at equal cost.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    seed: int = Field(default=1, ge=0)
    steps: int = Field(ge=1)
    token_budget: int | None = Field(default=None, ge=1)
    deterministic: bool = False
    model: ModelConfig
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    recipe: RecipeConfig = RecipeConfig()
    sync: SyncConfig = SyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    guard: GuardConfig = GuardConfig()


def run_of(tree: Tree, path: Path) -> RunConfig:
    """The run that a file at `path` with this content stands for. Raises UserError in one line."""
    return validate(RunConfig, included(tree, path), str(path))


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge, override and validate a run file. Raises UserError in one line."""
    return validate(RunConfig, apply_overrides(read_tree(path), overrides), str(path))
