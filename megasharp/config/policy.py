"""The policy under training: its weights, how it is split over ranks, its precision, optimizer and adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megasharp.common.layout import ParallelLayout
from megasharp.common.section import LEFT_OPEN, DerivedInt, Section

DtypeName = Literal["auto", "float32", "bfloat16"]
LoraTarget = Literal["qkv", "proj", "fc1", "fc2"]
HeadForm = Literal["logits", "chunked"]
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp"]
Fp8Format = Literal["hybrid", "e4m3"]
Fp8Recipe = Literal["tensorwise", "blockwise"]
OffloadedPart = Literal["weights", "gradients", "optimizer"]
Wanted = Literal["auto"] | bool
AttentionName = Literal["auto", "fa2", "fa3", "fa4", "te"]
Dispatcher = Literal["alltoall", "allgather", "deepep"]


class ModelConfig(Section):
    """The model that training starts from, a folder or one of the Hugging Face hub, and its dtype in training."""

    path: str = Field(
        description="Model that training starts from: a Hugging Face folder, a Megatron folder made by megasharp "
        "convert, a checkpoint of a run, or, where there is no such folder, a model's id on the Hugging Face hub, such "
        "as Qwen/Qwen2.5-0.5B. It also supplies the tokenizer and the first reference policy.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of the model that path names on the hub. A resumed run stays at the commit "
        "that it began with. null: its main branch.",
    )
    dtype: DtypeName = Field(
        default="auto",
        description="Dtype of the weights in training and in SGLang engines. auto: bfloat16 on GPUs, float32 on the "
        "CPU. bfloat16 halves their memory, while gradients are summed and the optimizer keeps its main weights in "
        "float32. The in-process engine always samples in float32.",
    )


class OptimizerConfig(Section):
    """Adam with decoupled weight decay; learning rate in absolute units, warm-up in optimizer steps."""

    lr: float = Field(
        default=1.0e-6,
        gt=0.0,
        description="Peak learning rate of Adam. Lower it when policy/grad_norm or policy/spikes grow; LoRA usually "
        "takes about ten times the value of full training.",
    )
    betas: list[float] = Field(
        default=[0.9, 0.95],
        min_length=2,
        max_length=2,
        description="Decay rates of Adam's first and second moment, two numbers below 1. Rarely changed.",
    )
    eps: float = Field(
        default=1.0e-8,
        gt=0.0,
        description="Number added to the divisor in Adam's update. Raise it when updates of tiny gradients are "
        "unstable.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        description="Decoupled weight decay as in AdamW, applied at the current learning rate. 0: none, which is "
        "usual in RLVR.",
    )
    clip_grad: float = Field(
        default=1.0,
        ge=0.0,
        description="Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Number of optimizer steps over which the learning rate rises linearly from 0 to lr. A training "
        "step has recipe.mini_batches of them. 0: no warm-up.",
    )
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Schedule of the learning rate after the warm-up. constant keeps lr; linear and cosine take it to "
        "0 at the last optimizer step of the run, so a later change of steps changes the schedule.",
    )


class LoraConfig(Section):
    """Adapters of rank `rank` on the named linear maps, scaled by alpha / rank; all other weights stay as they are.

    There is no dropout: it would make old and new log-probs differ where the weights do not.
    """

    rank: int = Field(ge=1, description="Rank of each adapter. A higher rank can learn more and costs more memory.")
    alpha: float = Field(
        default=16.0,
        gt=0.0,
        description="Scale of the adapters: their output is multiplied by alpha / rank. Change it together with rank "
        "to keep the scale.",
    )
    targets: list[LoraTarget] = Field(
        default=["qkv", "proj", "fc1", "fc2"],
        min_length=1,
        description="Linear maps that get adapters: qkv (query, key and value), proj (attention output), fc1 (gate "
        "and up) and fc2 (down). Each query, key, value, gate and up projection has its own adapter, as in PEFT.",
    )

    @model_validator(mode="after")
    def _each_once(self) -> LoraConfig:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets: {', '.join(self.targets)} names one twice")
        return self

    def __hash__(self) -> int:
        # The planner caches by adapters, and pydantic's own hash fails for a list.
        return hash((self.rank, self.alpha, *self.targets))

    @property
    def scale(self) -> float:
        """Factor of the product B A x (arXiv 2106.09685, section 4.1)."""
        return self.alpha / self.rank


class ExpertsConfig(Section):
    """Training of a mixture of experts; dense models read nothing of it."""

    dispatcher: Dispatcher = Field(
        default="alltoall",
        description="Way of tokens to the ranks of their experts. alltoall sends each token to the ranks that need it; "
        "allgather sends all tokens to all ranks, which can pay where a token has nearly as many experts as there are "
        "ranks; deepep is the DeepEP package's exchange, for GPUs where it is installed.",
    )
    balance_loss: Annotated[float, Field(ge=0.0)] | Literal["model"] = Field(
        default=0.0,
        description="Coefficient of the load-balancing loss, which rewards routers that use all experts alike. 0: "
        "none. It is off in RL, because its gradient follows the counts of tokens and not the reward, moves the "
        "routers even where all advantages are zero, and so widens the gap to the engines. model: as config.json's "
        "router_aux_loss_coef. Raise it when experts/load_max shows a few experts with most of the tokens.",
    )
    replay: bool = Field(
        default=False,
        description="Routing replay (R3, arXiv 2510.11370): each token goes to the experts that it went to while the "
        "engine sampled it, in the passes before the update and in the update. The routers' weights of these experts "
        "are the policy's own and get gradients. Turn it on when policy/engine_gap is larger than a dense model's, or "
        "runs collapse. An engine's answer is longer by one number for each layer, expert and token.",
    )


class PolicyConfig(Section):
    """The policy under training and how it is split over ranks; dp follows from the world size.

    `optimizer_offload` and `offload` differ: the first keeps main weights and moments in host memory and streams them
    through the GPU in each step, the second only frees the GPU while engines sample. Of Megatron's names for
    `recompute_modules` two are offered: the others belong to other models, and `layernorm` needs Transformer Engine,
    whose layers have no norms of their own to save.
    """

    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto",
        description="Device of the policy and of the engines. auto takes GPUs where cluster.gpus_per_node is above 0, "
        "or where a run without Ray finds one; else the CPU.",
    )
    dp: DerivedInt = Field(
        default=LEFT_OPEN,
        ge=1,
        description="Number of data-parallel replicas of the policy. Raise it to train on more GPUs; dp x tp x pp x "
        "cp is the number of ranks. null: 1 on GPUs, with Ray, and in a deterministic run. On the CPU with the "
        "in-process engine one for each core (OMP_NUM_THREADS, where set, says how many; else a Slurm job has the CPUs "
        "that it asked for), at most 4, as long as each has 8 prompts of a step, and all of them, at 24 bytes a "
        "parameter and 1 GiB each, fit into half of the memory; they sample too, each its share.",
    )
    tp: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that share each layer (tensor parallelism, with sequence parallelism). It must "
        "divide the heads, the key-value heads and the feed-forward size, and stay within a node. Raise it when a "
        "layer does not fit on one GPU.",
    )
    pp: int = Field(
        default=1,
        ge=1,
        description="Number of pipeline stages, each with an equal share of the layers. It must divide the number of "
        "layers. Raise it when the model does not fit with tp alone.",
    )
    vpp: int = Field(
        default=1,
        ge=1,
        description="Number of layer chunks per pipeline stage (interleaved schedule), which shortens idle time "
        "between stages. Above 1 it needs pp of at least 3. 1: not interleaved.",
    )
    cp: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that share each sequence (context parallelism). Raise it for long responses "
        "whose activations do not fit on one GPU.",
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that share each layer's experts, whole experts each (expert parallelism). It must "
        "divide the number of experts, and ep x etp must divide dp x tp x cp: the experts are spread over ranks that "
        "otherwise hold the same or share a layer. Raise it when the experts do not fit on one GPU, within a node "
        "first. 1 for a dense model.",
    )
    etp: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that share each expert (expert tensor parallelism). It must divide the experts' "
        "width. Raise it only where ep alone is not enough: small experts compute slowly in parts. 1 for a dense "
        "model.",
    )
    micro_batch_tokens: DerivedInt = Field(
        default=LEFT_OPEN,
        ge=1,
        description="Token budget of one micro-batch of one data-parallel replica, prompts included; a prompt shared "
        "by several responses counts once. A longer response gets a micro-batch of its own. Lower it when activations "
        "do not fit in memory, raise it for speed. null: 4, 2 or 1 times the longest sequence, as the plan fits it "
        "into a GPU; on the CPU 8192.",
    )
    recompute: Recompute = Field(
        default="none",
        description="Activations computed again in the backward pass to save memory. none keeps all; selective "
        "recomputes recompute_modules; full recomputes every layer, which costs about a third more compute.",
    )
    recompute_modules: list[RecomputeModule] = Field(
        default=["mlp"],
        description="Modules that recompute: selective computes again: mlp (the feed-forward block) or core_attn "
        "(attention scores, which saves nothing on a GPU in bfloat16). Used with selective only.",
    )
    head: HeadForm = Field(
        default="logits",
        description="Computation of the output layer. logits holds the logits of a whole micro-batch; chunked "
        "computes about a thousand tokens at a time and again in backward, which saves memory for one more matrix "
        "product.",
    )
    transformer_engine: Wanted = Field(
        default="auto",
        description="Use of NVIDIA Transformer Engine layers. auto takes them on GPUs where the package is installed; "
        "true requires them; false uses Megatron's own layers. fp8 always uses them.",
    )
    attention: AttentionName = Field(
        default="auto",
        description="Kernels of attention on GPUs, in bfloat16. fa2: FlashAttention-2, torch's own. fa3: "
        "FlashAttention-3, for Hopper. fa4: FlashAttention-4, for Blackwell (and Hopper). te: Transformer Engine's. "
        "auto takes what is right for the card and installed, fa3 on Hopper and fa4 on Blackwell, and else fa2; it "
        "tries them at the start, and says what it has taken and why. Another value ends the run where it cannot be "
        "had. CPUs have attention of their own, and only auto.",
    )
    fp8: Fp8Format | None = Field(
        default=None,
        description="Format of FP8 matrix products, which need a Hopper or later GPU, Transformer Engine and bfloat16 "
        "weights. hybrid rounds gradients to e5m2 and all else to e4m3; e4m3 uses e4m3 throughout. null: no FP8.",
    )
    fp8_recipe: Fp8Recipe = Field(
        default="blockwise",
        description="Granularity of FP8 scales: blockwise has one scale per block of 128 values, tensorwise one per "
        "tensor. Used when fp8 is set.",
    )
    overlap: Wanted = Field(
        default="auto",
        description="Overlap of data-parallel communication with computation. auto turns it on for GPUs where dp x cp "
        "is above 1. Set false to rule it out when a run hangs or differs.",
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Adam and its learning rate schedule.")
    optimizer_offload: bool = Field(
        default=False,
        description="Keeps main weights and Adam's moments, 12 bytes per parameter, in page-locked host memory and "
        "streams them through the GPU in each step. Turn it on when the optimizer does not fit on the GPU; results "
        "stay the same.",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Low-rank adapters, trained while all other weights stay frozen. Checkpoints hold the adapters; "
        "the engines get merged weights. null: all weights are trained.",
    )
    experts: ExpertsConfig = Field(
        default=ExpertsConfig(), description="Routing in a mixture of experts; dense models have none."
    )
    offload: list[OffloadedPart] = Field(
        default=[],
        description="Parts of the policy that leave the GPU while co-located SGLang engines sample: weights, "
        "gradients, optimizer. Add parts when the engines lack memory; weights and optimizer are copied to host "
        "memory and back in each step.",
    )
    megatron: dict[str, int | float | bool | str | None] = Field(
        default={},
        description="Further options of the installed Megatron-core, by its own names (model, DDP and optimizer "
        "settings). Names and types are checked; options that megasharp sets itself or that would change the model "
        "are refused.",
    )

    @property
    def layout(self) -> ParallelLayout:
        """The split over ranks; a `dp` that is left open counts as 1."""
        return ParallelLayout(self.dp or 1, self.tp, self.pp, self.cp, self.vpp, self.ep, self.etp)

    @property
    def ranks(self) -> int:
        """The number of ranks; a `dp` that is left open counts as 1, which it is wherever ranks are placed."""
        return self.layout.world
