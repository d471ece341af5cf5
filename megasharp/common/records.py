"""Records that packages hand to each other: every arrow of a step carries one of these.

Shape suffixes; `learner/block_plan.py` and `learner/output_head.py` add their own:
`_B` prompts, `_G` responses of a group, `_S` sequences (responses of a batch), `_T` tokens, `_P` tokens of a packed
micro-batch (prompts included), `_N` top-N candidates, `_V` vocabulary, `_Vp` one rank's shard of it, `_H` hidden,
`_LK` layers and experts of a token.

A response keeps BOTH log-probs of each sampled token: the sampler's (after temperature, truncation and DLC) and the
policy's own (at the same temperature, before truncation). They are never silently exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

# Processes of verifiers and commands that only print read this module too: importing torch takes them a second.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A weight sync carries the memory network's weights under this prefix, the policy's under their plain names.
MEMORY_PREFIX = "memory."


class Outcome(StrEnum):
    """Result of a verification. The non-correct outcomes are separate metrics; `INFRA` is masked, never scored."""

    CORRECT = "correct"
    WRONG = "wrong"
    FORMAT = "format"
    ERROR = "error"
    TIMEOUT = "timeout"
    INFRA = "infra"


class FinishReason(StrEnum):
    """Reason why an engine stopped: end token, length limit, or an abort from outside."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """The part of a problem that a verifier needs to judge a response; each task derives its own."""

    def on_a_line(self, wanted: bool) -> TaskAnswer:
        """Return it for a prompt that asks for a last line `Answer: ...`, or not, where its verifier reads such."""
        return self

    @property
    def given(self) -> object:
        """The answer as a user's own reward is given it."""
        return self


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, as the data stream hands it out.

    `text` is the prompt as the model reads it. For a user's own reward there are `row`, all columns of the problem's
    row, and its prompt there: messages (role, text) in `turns`, or the text `question`, empty where it has none apart.

    Example: `Prompt("countdown-4-000017", "countdown", "3 5 7 8=24:", (6, 20, ...), CountdownAnswer((3, 5, 7, 8), 24),
    "train.jsonl", epoch=0, position=17)`.
    """

    id: str
    task: str
    text: str
    tokens: tuple[int, ...]
    answer: TaskAnswer
    source: str
    epoch: int
    position: int
    turns: tuple[tuple[str, str], ...] = ()
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    question: str = field(default="", compare=False, repr=False)


# The detail of a verdict on a response of which nothing stands after thinking.
THINKING_OPEN = "thinking was never closed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement of one response.

    Example: `Verdict(Outcome.CORRECT, 1.0, "(3+5)*(7-4)", "")`; a wrong one keeps its canonical answer too, so that
    distinct answers can be counted. `failure` is empty unless the verifier itself failed, which says nothing about the
    response: its first line is the kind of failure, a traceback may follow. `parts` are the values that it was made of,
    by name, where several functions judge.
    """

    outcome: Outcome
    reward: float
    canonical_answer: str | None = None
    detail: str = ""
    failure: str = field(default="", compare=False, repr=False)
    parts: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled by policy version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: response tokens `[start, end)` are the policy's, `[end, until)` the environment's answer.

    `reward` is what the environment gave for it.
    """

    start: int
    end: int
    until: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Episode:
    """The turns of a response that an environment has answered, and its verdict.

    That is None while it goes on, and where the problem's task is to judge the last turn.

    Places count from the response's first token, whichever part of the response holds the record. What follows the last
    turn is the policy's. `cut`: it ended because it had as many turns as it may have. `failure` says what failed of its
    environment, where that ended it.
    """

    turns: tuple[Turn, ...]
    verdict: Verdict | None = None
    cut: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TurnText:
    """One turn of the policy in a response and its text, where an environment answers.

    Of the tokens `[start, end)` are the policy's and `[end, until)` the environment's, of the text's characters
    `[text_start, text_end)` and `[text_end, text_until)`. `reward` is None for a last turn that has no answer.
    """

    start: int
    end: int
    until: int
    text_start: int
    text_end: int
    text_until: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Plausible:
    """The tokens that sampling with a memory network may draw, by what the policy alone thinks of them.

    Exactly one is given. `min_p`, in (0, 1]: those with at least that share of the likeliest token's probability at the
    sampling temperature. `top_k`, at least 1: the policy's so many likeliest, and what ties with the last of them.
    """

    min_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings by which tokens are drawn; the defaults of `top_p`, `top_k` and `min_p` cut nothing.

    A temperature of 0 is greedy: no truncation counts then.

    Of the tokens' probabilities at the temperature, `top_k` keeps the largest, `top_p` of those the likeliest that make
    up this share, and `min_p` those with this share of the likeliest one's: in this order, as SGLang and transformers
    do it. A response ends with the token by which its text holds one of the `stop` strings; that token is the last of
    its tokens, and `text` cuts the string.

    `memory_mu` is the balance factor mu of DLC (2601.15609 section 4.2): tokens come from the softmax of
    (policy logits - mu * memory logits) / temperature. A number needs an engine that holds a memory network, and 0.0
    samples the policy; None leaves the memory network out, so that it costs nothing and records nothing. `plausible`
    bars all tokens but those that the policy itself finds plausible, before the subtraction; it is read only with a
    `memory_mu`, and it is ours: the paper has no such guard.

    With `record_top`, at least 1, engines record at each token the exact entropy and the log-probs of so many of the
    likeliest tokens; SGLang's at most 8.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    memory_mu: float | None = None
    plausible: Plausible | None = None
    record_top: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Return whether tokens are drawn from a part of the vocabulary only."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    def text(self, decoded: str) -> str:
        """Return a decoded response up to its first stop string."""
        ends = [place for string in self.stop if (place := decoded.find(string)) >= 0]
        return decoded[: min(ends)] if ends else decoded


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Sample `len(seeds)` completions of one prompt; each seed fixes its completion whatever else is in the batch.

    `begun` continues responses: for each seed the response tokens that were sampled earlier, which count towards
    `SamplingParams.max_tokens`. The completions hold the new tokens only. Empty starts every response. `max_tokens` is
    a limit of this request's own, which holds where it is below that of the parameters. `turns` are the prompt as
    messages (role, text), for engines that write it themselves. `episode` is the environment that answers the
    responses; `begun_turns` are then, for each seed, the turns among the tokens begun.
    """

    tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    begun: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    turns: tuple[tuple[str, str], ...] = ()
    episode: TaskAnswer | None = None
    begun_turns: tuple[tuple[Turn, ...], ...] = ()

    def under(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters by which this request is sampled."""
        if self.max_tokens is None or self.max_tokens >= sampling.max_tokens:
            return sampling
        return replace(sampling, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Routing:
    """The sizes of what says where a mixture of experts sent tokens: `per_token` of `experts`, in each of the layers.

    Such a tensor is [tokens, layers, per_token], of this `dtype`.
    """

    layers: int
    per_token: int
    experts: int

    @property
    def dtype_name(self) -> str:
        """The name of the smallest dtype that numbers the experts: uint8, or int16 above 256 of them."""
        return "uint8" if self.experts <= 256 else "int16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of that name."""
        import torch

        return getattr(torch, self.dtype_name)  # type: ignore[no-any-return]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's experts."""
        return self.layers * self.per_token * (1 if self.dtype_name == "uint8" else 2)

    def anywhere(self, tokens: int) -> Tensor:
        """Return the experts of tokens that may go anywhere: the first ones, of which a token has each once."""
        import torch

        return torch.arange(self.per_token, dtype=self.dtype).expand(tokens, self.layers, self.per_token)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """An engine's result for one sample; tensors are 1-D over its tokens, end token included, unless said otherwise.

    `sampler_logp` is what the token was drawn with (after the memory's subtraction and truncation); `policy_logp` and,
    where the engine holds a memory network, `memory_logp` are each network's own over the whole vocabulary. All three
    are at the sampling temperature. `argmax_moved` (bool) and `calibration_kl` (nats) say what the memory did to the
    distribution that each token came from, before truncation: whether its likeliest token is another one than the
    policy's, and KL(calibrated || policy). None where nothing was subtracted. `entropy` (nats) and `top_logp` [T, N],
    the likeliest first, are of the policy's own distribution before each token; None where nobody asked. `cause` says
    in words why an aborted one has no end of its own; it is empty where that is not known. An engine without tokens
    gives their `text` and their number, `counted`; its log-probs may be missing. With an `episode` some of the tokens
    are its environment's, at which all that belongs to tokens is zero.

    `experts`, where an engine records them (`policy.experts.replay`), are those to which it sent every token that it
    read: uint8, or int16 above 256 experts, [prompt + response - 1, layers, experts per token], because nothing reads
    the last token. That is layers x experts per token bytes a token, twice as many in int16. Of a response that was
    continued they begin with the prompt too; an environment's tokens have theirs once the policy goes on behind them.

    Example: `tokens=tensor([4, 13, 6, 1])`, `sampler_logp=policy_logp=tensor([-0.7, -0.1, -1.2, -0.02])` (float32),
    `memory_logp=None`, `version_spans=(VersionSpan(12, 0, 4),)`, `finish_reason=FinishReason.STOP`, `seed=991`.
    """

    tokens: Tensor
    sampler_logp: Tensor
    policy_logp: Tensor
    memory_logp: Tensor | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    seed: int
    argmax_moved: Tensor | None = None
    calibration_kl: Tensor | None = None
    entropy: Tensor | None = None
    top_logp: Tensor | None = None
    cause: str = ""
    text: str | None = None
    counted: int | None = None
    episode: Episode | None = None
    experts: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens, the end token included."""
        return int(self.tokens.numel()) if self.counted is None else self.counted

    @property
    def policy_tokens(self) -> int:
        """Number of the policy's own tokens, the end token included: all but those of an environment."""
        turns = () if self.episode is None else self.episode.turns
        return self.length - sum(turn.until - turn.end for turn in turns)

    @property
    def truncated(self) -> bool:
        """True where a limit of tokens ended it, and not one of turns."""
        return self.finish_reason is FinishReason.LENGTH and not (self.episode is not None and self.episode.cut)

    @property
    def sampled_T(self) -> Tensor | None:
        """True at the policy's tokens, bool [T]; None where all are."""
        if self.episode is None:
            return None
        import torch

        sampled_T = torch.ones(self.tokens.numel(), dtype=torch.bool)
        for turn in self.episode.turns:
            sampled_T[turn.end : turn.until] = False
        return sampled_T

    @property
    def policy_turns(self) -> tuple[tuple[int, int], ...]:
        """Places `[start, end)` of the policy's turns, the one that no environment has answered among them."""
        answered = () if self.episode is None else self.episode.turns
        begun = answered[-1].until if answered else 0
        open_turn = ((begun, self.length),) if begun < self.length or not answered else ()
        return (*((turn.start, turn.end) for turn in answered), *open_turn)

    def of_policy(self, values_T: Tensor) -> Tensor:
        """Return those of values [T, ...] that stand at the policy's tokens."""
        sampled_T = self.sampled_T
        return values_T if sampled_T is None else values_T[sampled_T]

    @classmethod
    def unsampled(cls, seed: int, sampling: SamplingParams, cause: str = "") -> Completion:
        """Return the completion of a request that could not be served: no tokens, and FinishReason.ABORT."""
        import torch

        tokens, empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
        if sampling.memory_mu is None:
            return cls(tokens, empty, empty, None, (), FinishReason.ABORT, seed, cause=cause)
        moved = torch.empty(0, dtype=torch.bool)
        return cls(tokens, empty, empty, empty, (), FinishReason.ABORT, seed, moved, empty, cause=cause)


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A completion with its decoded text and its verdict, and its turns where an environment answers them."""

    completion: Completion
    text: str
    verdict: Verdict
    turns: tuple[TurnText, ...] = ()

    @property
    def length(self) -> int:
        """Number of response tokens, the end token and those of an environment included."""
        return self.completion.length

    @property
    def policy_tokens(self) -> int:
        """Number of the policy's own tokens, the end token included."""
        return self.completion.policy_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All responses to one prompt. `dropped_reason` is set when selection refused the group.

    `begun_limit` is the limit of response tokens under which the prompt was begun, where a later one applied at its
    end; else None.

    Example: `Group("step7-3", prompt, (r0, ..., r7), policy_version=7)`.
    """

    id: str
    prompt: Prompt
    responses: tuple[Response, ...]
    policy_version: int
    dropped_reason: str | None = None
    begun_limit: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A group's tokens alone, int32 [T] each: what the memory network of DLC learns from, and learns again.

    `observed` are, for each response, the places `[start, end)` of tokens that an environment has said, which are not
    learned; empty where no response has any.

    Example: `Sampled("step7-3", tensor([5, 9]), (tensor([4, 13, 6, 1]), tensor([4, 1])))`.
    """

    group_id: str
    prompt: Tensor
    responses: tuple[Tensor, ...]
    observed: tuple[tuple[tuple[int, int], ...], ...] = ()

    @classmethod
    def of(cls, group: Group) -> Sampled:
        """Of all responses: right, wrong, aborted, and of groups that selection dropped."""
        import torch

        responses = tuple(response.completion.tokens.int() for response in group.responses)
        episodes = [response.completion.episode for response in group.responses]
        observed: tuple[tuple[tuple[int, int], ...], ...] = ()
        if any(episodes):
            observed = tuple(
                () if each is None else tuple((turn.end, turn.until) for turn in each.turns if turn.end < turn.until)
                for each in episodes
            )
        return cls(group.id, torch.tensor(group.prompt.tokens, dtype=torch.int32), responses, observed)

    @property
    def tokens(self) -> int:
        """Number of response tokens, those of environments left out."""
        observed = sum(end - start for places in self.observed for start, end in places)
        return sum(response.numel() for response in self.responses) - observed


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One response prepared for training. `*_T` fields are over its response tokens.

    Example with a 5-token prompt and a 3-token response: `tokens.shape == (8,)`, `prompt_length == 5`,
    `advantage_T == tensor([0.94, 0.94, 0.94])`, `mask_T == tensor([1., 1., 1.])`.
    `mask_T` is 0 where a token must not train (an infra failure masks the whole response). `advantage_T` is float64.
    `group_size`, `group_correct` count the scored and the correct responses of its group; `seed` is the completion's.
    `experts` [tokens read, layers, experts per token], uint8 or int16, are the completion's; None where none were
    recorded.
    """

    group_id: str
    index: int
    group_size: int
    group_correct: int
    seed: int
    tokens: Tensor
    prompt_length: int
    reward: float
    correct: bool
    advantage_T: Tensor
    mask_T: Tensor
    sampler_logp_T: Tensor
    policy_logp_T: Tensor
    experts: Tensor | None = None

    @property
    def response_length(self) -> int:
        """Number of response tokens."""
        return int(self.tokens.numel()) - self.prompt_length


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The split of packed tokens into runs that attend causally; one run may continue another.

    A run `i` covers packed rows `[start[i], start[i] + length[i])` and sees, besides itself, all rows of run
    `prefix[i]` (-1 for none): that is how the responses of a group share one copy of their prompt.
    All int64, shape [runs]. A prefix run has no prefix of its own.

    Example, one prompt of 5 tokens with two responses of 3 and 2: `start=[0, 5, 8]`, `length=[5, 3, 2]`,
    `prefix=[-1, 0, 0]`; the rows' positions are `0..4, 5 6 7, 5 6`.
    """

    start: Tensor
    length: Tensor
    prefix: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """The tensors that methods see, flat over the response tokens of a micro-batch. Never logits.

    What rollouts recorded (`sampler_logp_T`, `policy_logp_T`) and, inside the loss, `logp_T` and `entropy_T` are always
    there; any other field that may be None is present exactly when some method's `needs` asks for it. Only `logp_T`,
    `topn_logp_TN` and, where asked for, `entropy_T` carry a gradient.
    `seq_T` (int64) numbers the micro-batch's sequences from 0 to `num_sequences - 1`, `group_T` the step's groups.
    `correct_T` and `mask_T` are float 0/1. `group_size_T` and `group_correct_T` count the scored and the correct
    responses of the token's group, empty responses included. `logp_T` is at the rollout temperature, over the whole
    vocabulary; `policy_logp_T` is the engine's record of the same at sampling time. `topn_logp_TN` may have more
    columns than a method asked for. `draw_T` is a uniform number in [0, 1), float64, fixed by the response's seed and
    the token's position.
    """

    mask_T: Tensor
    seq_T: Tensor
    group_T: Tensor
    reward_T: Tensor
    correct_T: Tensor
    group_size_T: Tensor
    group_correct_T: Tensor
    num_sequences: int
    logp_T: Tensor | None = None
    old_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    sampler_logp_T: Tensor | None = None
    policy_logp_T: Tensor | None = None
    draw_T: Tensor | None = None
    entropy_T: Tensor | None = None
    old_entropy_T: Tensor | None = None
    topn_logp_TN: Tensor | None = None
    is_top1_T: Tensor | None = None

    @property
    def before_T(self) -> Tensor:
        """Log-probs of the policy before the update, without gradient.

        Where nothing asked for them they equal the present ones: the first optimizer step after a rollout.
        """
        if self.old_logp_T is not None:
            return self.old_logp_T
        assert self.logp_T is not None
        return self.logp_T.detach()


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over one WHOLE optimizer step (all micro-batches, all data-parallel ranks), fixed before packing.

    `tokens` is the sum of the mask, `sequences` the number of sequences with at least one unmasked token, and
    `constant` the fixed horizon of `token_sum_over_constant`, in tokens.
    """

    tokens: float
    sequences: float
    constant: float


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences packed into one row, without padding between them.

    `tokens_P`, `positions_P`: int64 [P] packed token ids and their positions. `segments`: who attends to whom.
    `rows_T`: for each response token the packed row whose logits predict it; `targets_T`: the token itself.
    `length_S`: float64 [S] unmasked response tokens per sequence, for per-sequence means.
    `advantage_T`: float64. `inputs`: the per-token tensors methods see (its `logp_T`, `entropy_T`, top-N are filled
    in by the learner). `sequence_ids`: each sequence's index in the step's flat order, to write results back.
    `padding`: how many of the rows, the last ones, are there to make the length divide, and predict nothing.
    `experts_PLK`: uint8 or int16 [P, layers, experts per token], where the engine sent each row's token; None without
    routing replay.
    """

    tokens_P: Tensor
    positions_P: Tensor
    segments: Segments
    rows_T: Tensor
    targets_T: Tensor
    length_S: Tensor
    advantage_T: Tensor
    inputs: TokenInputs
    sequence_ids: tuple[int, ...]
    padding: int = 0
    experts_PLK: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of packed rows, padding included."""
        return int(self.tokens_P.numel())

    @property
    def response_tokens(self) -> int:
        """Number of response tokens."""
        return int(self.targets_T.numel())

    def with_advantages(self, adv_T: Tensor) -> MicroBatch:
        """Return the micro-batch with other advantages, [T]."""
        return replace(self, advantage_T=adv_T)


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """One optimizer step: micro-batches per data-parallel rank (equal counts), and the global denominators.

    `statistics` holds what each method of the recipe computed over the whole optimizer step, in the methods' order.
    """

    per_rank: tuple[tuple[MicroBatch, ...], ...]
    denominators: Denominators
    statistics: tuple[Mapping[str, Tensor], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Everything one training step updates on: one mini-batch, or several in order.

    `group_ids[g]` names the group that `group_T == g` refers to.
    """

    mini_batches: tuple[MiniBatch, ...]
    group_ids: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that averages: `total / weight`. Two of the same name add field by field."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """The average; 0.0 when nothing was counted."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Maximum:
    """A metric that takes the largest value. Two of the same name keep the larger."""

    value: float

    def __add__(self, other: Maximum) -> Maximum:
        return Maximum(max(self.value, other.value))


Metric = Mean | Maximum
Metrics = Mapping[str, Metric]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Metrics of one training step.

    `skipped` counts optimizer steps left out for a non-finite loss or gradient, or as one of `spikes`: their gradient
    norm was above the limit that was given. `norms` are the norms of all of them, `grad_norm` is their mean.
    `seconds` are those of the update's parts: forward, backward, gradient_sync, optimizer.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: int
    metrics: Metrics = field(default_factory=dict)
    norms: tuple[float, ...] = ()
    spikes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)


def as_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name: float32, bfloat16, float16 or float64."""
    import torch

    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in a config, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
