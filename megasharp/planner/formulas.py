"""Every formula of the planner: plain numbers in and out, each with its source.

Sizes are bytes (1 GB = 10^9), times seconds. `width` is the bytes of a weight: 2 in bfloat16, 4 in float32. "Measured"
means checked by a test against the code itself on a CPU; nothing here was measured on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from megasharp.batching.planning import Flops
from megasharp.config.policy import LoraConfig, Recompute
from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import input_size, rows_of
from megasharp.ops.chunked_head import CHUNK_TOKENS
from megasharp.planner.mixtures import expert_flops_per_token, kept_bytes_per_token, weights_read

_FP32 = 4
# Runs of one block have lengths within a factor of two and are padded to the longest: evenly spread, by 4/3.
PADDED_RUNS = 4 / 3
# SGLang keeps these positions of its context: a prompt with its response so far must be shorter by more than that.
ENGINE_KEEPS = 6


# ---- what a rank holds all the time -------------------------------------------------------------------------------


def gradient_bytes(parameters: int) -> int:
    """One float32 number a parameter, whatever the weights are (`grad_reduce_in_fp32`)."""
    return _FP32 * parameters


def optimizer_bytes(parameters: int, width: int, shards: int) -> float:
    """Adam's two moments, and below float32 the float32 copy of the weights, cut over `shards` = dp * cp ranks.

    Megatron-core's distributed optimizer (its user guide, "dist_optimizer"): with bfloat16 weights 12 / d bytes a
    parameter. With weights and gradients 18 bytes at d = 1, and 6 + 12 / d in general.
    """
    return (2 * _FP32 + (_FP32 if width < _FP32 else 0)) * parameters / shards


def staging_bytes(parameters: int) -> int:
    """GPU bytes that a step takes of an optimizer whose state is on the host, for `parameters` of a rank's shard.

    Three pieces of 8 Mi numbers at most, each with main weights and two moments in float32
    (`learner/optimizer_offload.py`).
    """
    return 3 * _FP32 * 3 * min(8 * 2**20, parameters)


def adapter_parameters(arch: Architecture, lora: LoraConfig, tp: int) -> int:
    """Parameters of one layer's adapters on one of `tp` ranks: r (inputs + outputs) a map (LoRA, 2106.09685, 4.1).

    Of qkv and fc1 a rank holds the whole A and its rows of B, of proj and fc2 its columns of A and the whole B.
    """
    count = 0
    for target in lora.targets:
        rows, inputs = rows_of(target, arch, tp), input_size(target, arch)
        columns = inputs if target in ("qkv", "fc1") else inputs // tp
        count += lora.rank * (len(rows.sizes) * columns + rows.total)
    return count


# ---- what a micro-batch leaves for its backward pass --------------------------------------------------------------


def layer_bytes_per_token(
    arch: Architecture,
    tp: int,
    width: int,
    recompute: Recompute,
    modules: Sequence[str] = (),
    *,
    on_gpu: bool,
    padded: float = PADDED_RUNS,
    etp: int = 1,
) -> float:
    """Bytes that autograd keeps of one token in one layer, on one of `tp` ranks with sequence parallelism.

    Korthikanti et al. (2205.05198) count GPT's layer, sections 4.1 and 4.2; this is the same count for the layer that
    `learner` builds, whole, to be divided by `tp`. With h hidden, q = heads * head_dim, k = kv_heads * head_dim,
    f = ffn, each in `width` bytes:

        norms                 their inputs and their outputs (the linear maps' inputs): 4 h
        MLP                   gate and up in one tensor, and the product that the last map multiplies: 3 f; with experts
                              in its place what `mixtures.kept_bytes_per_token` counts
        attention's output    q
        attention, none       rotated queries and keys, values: q + 2 k; logsumexp: 4 bytes a head
          in blocks           gathered queries, keys and values, and the output: 2 q + 2 k, on a GPU with all heads
                              each, 4 q; logsumexp; all padded
        core_attn             inputs of the recomputed part: q, and the joined projection (q + 2 k), no less than above
        mlp                   nothing of the MLP's own, or of router and experts; the norm's output is counted
        query and key norms   their inputs: the queries' copy q, and the joined projection (q + 2 k) for the keys, which
                              holds the values
        norms over all heads  their inputs: copies of queries and keys, q + k; the joined projection if none are made
        full                  the layer's input: h

    Norms behind attention and MLP keep as much: their inputs in place of the linear maps', which are the layer's.

    Blocks are those of CPUs and of float32. Queries are copied out of the joined projection where a rank has more than
    one query group. The low-rank values of adapters are not counted. There is no s^2 term: no attention matrix is kept.
    On a CPU torch builds the norms of smaller operations, which keep float32 copies; in float32 the learner's own
    keeps its input alone.

    Counted on a CPU with stand-ins for the GPU's operators, and with those of the CPU (`padded` 1, one run): equal to
    the byte. Transformer Engine's layers keep the same in bfloat16: its `LayerNormLinear` saves its input, the norm's
    output and the deviations, its `Linear` its input (read in its source, commit d0067d0, of August 2026). Its
    attention (`policy.attention: te`) keeps keys and values as they are gathered, a prompt's once a response: that is
    not counted.
    """
    q, k, h, f = arch.query_size, arch.kv_size, arch.hidden, arch.ffn
    if recompute == "full":
        return width * h / tp
    joined, copied = q + 2 * k, q if arch.kv_heads > tp else 0
    again = modules if recompute == "selective" else ()
    # Of a norm: its input, and where torch differentiates it the reciprocal deviation of each token.
    own_norm = not on_gpu and width == _FP32
    norm = width * h if own_norm else (width * h if on_gpu else 2 * _FP32 * h) + _FP32
    mlp = width * 3 * f
    if arch.experts is not None:
        mlp = kept_bytes_per_token(arch.experts, h, width, etp=etp, on_gpu=on_gpu)
    total: float = 2 * (norm + width * h) + (0 if "mlp" in again else mlp) + width * q
    normed, copies = arch.qk_norm or arch.qk_norm_whole, q + k if copied else 0
    inputs = (copies or joined) if arch.qk_norm_whole else joined + copied
    if "core_attn" in again:
        total += width * (joined + (q + k if normed else copied))
        inputs = copies if arch.qk_norm_whole else copied
    elif on_gpu and width < _FP32:
        total += width * (q + (k if arch.qk_norm else 2 * k)) + _FP32 * arch.heads
    else:
        total += (2 * width * (q + (q if on_gpu else k)) + _FP32 * arch.heads) * padded
    return (total + (_head_norms(arch, tp, inputs, width, on_gpu) if normed else 0)) / tp


def _head_norms(arch: Architecture, tp: int, inputs: int, width: int, fused: bool) -> int:
    """Bytes that the norms of queries and keys keep, of all ranks; `inputs`: numbers that are kept as they came."""
    deviations = _FP32 * (2 * tp if arch.qk_norm_whole else arch.heads + arch.kv_heads)
    if arch.qk_norm_whole and tp > 1:
        # The learner's own norm of heads that ranks have parts of, on any device.
        return width * inputs + deviations
    if not fused and width < _FP32:
        # Norms built of smaller operations keep a float32 copy of their input, so the input itself is not kept.
        return 2 * _FP32 * (arch.query_size + arch.kv_size) + deviations
    return width * inputs + (deviations if fused else 0)


def in_flight(stage: int, pp: int, vpp: int, micro_batches: int) -> float:
    """Most micro-batches that a stage holds activations of, counted in whole stages.

    1F1B: pp - stage (Narayanan et al., 2104.04473, section 2.2.1). Interleaved: the warm-up of Megatron's schedule,
    2 (pp - stage - 1) + (vpp - 1) pp chunks and the one at work, each a vpp-th of the stage.
    """
    if pp == 1:
        return 1.0
    if vpp == 1:
        return float(min(pp - stage, micro_batches))
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, vpp * micro_batches) / vpp


def logits_bytes(tokens: float, columns: int, width: int, entropy: bool, kernels: bool) -> float:
    """Most bytes that the head holds at once: `tokens` rows of `columns` = vocab / tp logits.

    The logits and their rows of responses, `width` each, which is all with `kernels` (Triton's): backward writes over
    the rows and spreads them out again. In torch (`ops/head/reference.py`) also the shifted float32 copy, and with the
    entropy its exponential; backward needs no more: the rows, a float32 gradient (with the gradient of the entropy one
    more), its copy in `width`. Counted as if every row predicted. Measured in torch: 1 % more.
    """
    return tokens * columns * (2 * width + (0 if kernels else _FP32 * (2 if entropy else 1)))


def chunked_logits_bytes(tokens: float, columns: int, hidden: int, width: int, entropy: bool, kernels: bool) -> float:
    """Most bytes of a head that computes logits `CHUNK_TOKENS` tokens at a time (`ops/chunked_head.py`).

    Hidden states of the rows that predict and their gradient, a chunk's logits, and, once they are gone, what autograd
    is given as the weight's gradient, which is in Megatron's buffer by then.
    """
    chunk = min(tokens, CHUNK_TOKENS)
    logits = logits_bytes(chunk, columns, width, entropy, kernels) - chunk * columns * width
    return 2 * tokens * hidden * width + max(logits, columns * hidden * width)


# ---- engines ------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(arch: Architecture, tp: int, width: int) -> int:
    """Bytes of one token's keys and values on one of `tp` ranks; a rank holds at least one head."""
    return 2 * arch.num_layers * max(1, arch.kv_heads // tp) * arch.head_dim * width


def engine_graph_bytes(batch: int) -> int:
    """CUDA graphs of decoding up to `batch` requests: SGLang 0.5.21's own estimate, 2 MiB for each."""
    return 2 * batch * 2**20


def engine_workspace_bytes(chunk: int, tp: int) -> float:
    """Activations of a prefill chunk and what is constant: SGLang 0.5.21's estimate, 512 + 1.5 chunk + 128 tp MiB.

    A chunk counts as 2,048 tokens at least.
    """
    return (512 + 1.5 * max(chunk, 2048) + 128 * tp) * 2**20


def engine_default_fraction(reserved: float, memory: float) -> float:
    """SGLang 0.5.21's `mem_fraction_static` where none is set: all but graphs and workspace, `reserved` bytes.

    Above 60 GiB of memory it reserves 10 GiB at least. Its 8 MiB for each size of a prefill graph are left out.
    """
    floor = 10 * 2**30 if memory > 60 * 2**30 else 0
    return round(1 - max(reserved, floor) / memory, 3)


# ---- lengths ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and responses in tokens; a share 1 - (n / longest)^(1 / k) of responses exceeds n tokens.

    k = longest / mean - 1 makes the mean right: evenly spread for a mean of half the longest, a thin tail for less.
    An assumption: real lengths depend on model and task, and on nothing so much as on truncation.
    """

    prompt: float
    prompt_longest: int
    response: float
    response_longest: int

    @property
    def k(self) -> float:
        """The spread of responses: 1 for evenly spread ones, more for a thin tail, 0 where all are the longest."""
        return self.response_longest / self.response - 1.0

    def longer_than(self, tokens: float) -> float:
        """Share of responses with more than `tokens` tokens."""
        if tokens >= self.response_longest:
            return 0.0
        return 1.0 if self.k == 0.0 else 1.0 - (tokens / self.response_longest) ** (1.0 / self.k)

    @property
    def context(self) -> float:
        """Mean number of positions that a response's token attends to, weighted by tokens: E[r (p + r / 2)] / E[r].

        At some moment of decoding it is the mean size of a response in progress, its prompt included.
        """
        mean_square = self.response_longest**2 / (2.0 * self.k + 1.0)
        return self.prompt + mean_square / (2.0 * self.response)

    def context_within(self, window: int | None) -> float:
        """`context` where a token sees `window` positions at most: E[integral of min(p + t, w) over t < r] / E[r]."""
        if window is None:
            return self.context
        seen = min(max(0.0, window - self.prompt), float(self.response_longest))
        # The integrals to `seen` of 1 - (t / L)^(1 / k), alone and times t.
        late = 0.0 if self.k == 0.0 else (seen / self.response_longest) ** (1.0 / self.k)
        tokens = seen - seen * late * self.k / (1.0 + self.k)
        positions = seen**2 / 2.0 - seen**2 * late * self.k / (1.0 + 2.0 * self.k)
        return (positions + self.prompt * tokens + window * (self.response - tokens)) / self.response

    @property
    def longest(self) -> int:
        """The longest prompt with the longest response."""
        return self.prompt_longest + self.response_longest


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of one network on one rank of an engine.

    Of a response the last `window` tokens are kept beside its prompt; None: all of them.
    """

    bytes_per_token: int
    window: int | None = None

    def mean_bytes(self, lengths: Lengths) -> float:
        """Bytes of a response in progress, its prompt included: the mean over all moments of decoding."""
        within = None if self.window is None else math.ceil(lengths.prompt) + self.window
        return self.bytes_per_token * lengths.context_within(within)

    def bytes_at(self, prompt: float, position: float) -> float:
        """Bytes of a response at a position, its prompt included."""
        kept = position if self.window is None else min(position, self.window)
        return self.bytes_per_token * (prompt + kept)


# ---- time ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def mean_context(arch: Architecture, lengths: Lengths) -> float:
    """Mean number of positions that a response's token attends to, over all layers: within a layer's window if any.

    `learner/block_plan.py` computes no more than that, up to its padding.
    """
    return sum(lengths.context_within(arch.window(layer)) for layer in range(arch.num_layers)) / arch.num_layers


def forward_flops_per_token(arch: Architecture, context: float, grouped: float = 1.0) -> float:
    """FLOPs of one token: 2 N + 4 L q s; N weights are multiplied (the embedding is looked up), s positions seen.

    PaLM (2204.02311), appendix B: forward and backward 6 N + 12 L H Q T; forward is a third. T is the mean context, so
    that the causal half is counted. A backward pass costs twice the forward one. Of experts N has those that a token
    goes to; with `grouped` below 1 theirs count 1 / `grouped` times, for the time that they take.
    """
    lookup = 0 if arch.tied else arch.vocab * arch.hidden
    attention = arch.num_layers * _attention_flops(arch) * context
    slower = expert_flops_per_token(arch) * (1.0 / grouped - 1.0)
    return 2.0 * (arch.active_parameter_count() - lookup) + attention + slower


def _attention_flops(arch: Architecture) -> float:
    """FLOPs of one layer for each token and position that it attends to: a score and a weighted value, 2 q each."""
    return 4.0 * arch.query_size


def context_bytes_per_row(arch: Architecture, tp: int, cp: int, width: int) -> float:
    """Bytes a rank receives for each packed token of its micro-batches in one gather of all layers' keys and values.

    Of 2 kv_size / tp numbers a layer those of the cp - 1 other ranks' tokens, (cp - 1) / cp of all
    (`learner/context_parallel.py`). Summing their gradients in backward sends as much.
    """
    return (cp - 1) / cp * arch.num_layers * 2 * arch.kv_size / tp * width


def tensor_bytes_per_row(arch: Architecture, tp: int, width: int) -> float:
    """Bytes a rank receives for each packed token in one pass through all layers, between tensor-parallel ranks.

    With sequence parallelism a layer gathers its input twice and scatters its output twice, (tp - 1) / tp of `hidden`
    numbers each (2205.05198, section 4.2.2). Backward moves as much. Experts take a rank's own rows: attention alone
    gathers and scatters.
    """
    times = 2 if arch.experts else 4
    return (tp - 1) / tp * arch.num_layers * times * arch.hidden * width


def packing_flops(arch: Architecture, chunked_head: bool, response_window: int | None = None) -> Flops:
    """`forward_flops_per_token` for packed tokens whose contexts are known: batching balances ranks by it.

    `policy.head: chunked` computes logits of response tokens only, and once more in backward: with the two products of
    backward that is 4 / 3 of what a forward pass and the 2 of its backward pass are.
    """
    layers = Counter(arch.window(layer) for layer in range(arch.num_layers))
    attention = tuple((window, count * _attention_flops(arch)) for window, count in layers.items())
    rows = forward_flops_per_token(arch, 0.0)
    if not chunked_head:
        return Flops(rows, attention, response_window=response_window)
    logits = 2.0 * arch.vocab * arch.hidden
    return Flops(rows - logits, attention, per_token=4.0 / 3.0 * logits, response_window=response_window)


def recompute_share(
    arch: Architecture, context: float, recompute: Recompute, modules: Sequence[str] = (), grouped: float = 1.0
) -> float:
    """Forward work done a second time, as a share of one forward pass; `grouped` as in `forward_flops_per_token`."""
    if recompute == "none":
        return 0.0
    if recompute == "full":
        return 1.0
    work, experts = _attention_flops(arch) * context if "core_attn" in modules else 0.0, arch.experts
    if "mlp" in modules and experts is None:
        work += 6.0 * arch.hidden * arch.ffn
    elif "mlp" in modules and experts is not None:
        work += 2.0 * arch.hidden * experts.count + expert_flops_per_token(arch) / arch.num_layers / grouped
    return arch.num_layers * work / forward_flops_per_token(arch, context, grouped)


# Kernels that a layer launches in a forward pass (tools/count_launches.py); backward launches 45, which is less for its
# twofold work. Seconds for one, Python's, autograd's and Megatron's share included: assumed, not measured.
_LAUNCHES, _LAUNCH_S = 25, 10e-6


def rows_that_hide_launches(arch: Architecture, context: float, ranks: int, flops: float) -> int:
    """Packed tokens of a micro-batch from which a layer's forward pass takes longer than the launches of its kernels.

    Fewer leave the GPU idle. A layer is cut over `ranks` = tp * cp, each of which computes `flops` a second. Of a
    mixture of experts the launches of router and dispatcher are not counted.
    """
    logits = 2.0 * arch.vocab * arch.hidden
    layer = (forward_flops_per_token(arch, context) - logits) / arch.num_layers
    return math.ceil(_LAUNCHES * _LAUNCH_S * flops * ranks / layer)


def bubble_share(pp: int, vpp: int, micro_batches: int) -> float:
    """Share of a pass in which a pipeline rank stands idle: (pp - 1) / (vpp m + pp - 1) (2104.04473, section 2.2)."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)


@dataclass(frozen=True, slots=True)
class Decoding:
    """One rank of an engine as it decodes: `weights` and the caches' bytes are read in each step at `bandwidth`.

    `token`: seconds that a rank computes for one token. `step`: seconds of a step whatever its batch. `experts` of the
    weights are read as far as a token goes there, each to a `share` of them.
    """

    weights: float
    caches: tuple[KvCache, ...]
    bandwidth: float
    token: float
    step: float
    experts: float = 0.0
    share: float = 1.0

    def step_seconds(self, live: float, cache_bytes: float) -> float:
        """Seconds of a step of `live` requests that have `cache_bytes` each.

        Reading and computing are added, as if they never overlapped: kernels of large batches are bound by neither
        alone.
        """
        weights = weights_read(self.weights, self.experts, self.share, live)
        return (weights + live * cache_bytes) / self.bandwidth + live * self.token + self.step


def decode_seconds(requests: float, at_once: float, lengths: Lengths, engine: Decoding) -> float:
    """Seconds an engine decodes `requests` responses, at most `at_once` together.

    While more wait, the batch is full, with requests at every age (`KvCache.mean_bytes` is then a live request's size);
    the last `at_once` start together and end one after the other, the longest last.
    """
    return _decode_times(requests, at_once, lengths, engine)[-1][1]


# Thousands of layouts that are compared have a handful of engines.
@lru_cache(maxsize=64)
def _decode_times(
    requests: float, at_once: float, lengths: Lengths, engine: Decoding
) -> tuple[tuple[float, float], ...]:
    """Pairs (decode steps so far, seconds so far), from the end of the full batch to that of the last response."""
    last = min(requests, at_once)
    full_step = engine.step_seconds(at_once, sum(cache.mean_bytes(lengths) for cache in engine.caches))
    full_steps = max(0.0, requests - at_once) * lengths.response / at_once
    # The integral over the last batch's positions, by the midpoint rule.
    steps = 256
    size = lengths.response_longest / steps
    drain, times = 0.0, [(full_steps, full_steps * full_step)]
    for i in range(steps):
        position = (i + 0.5) * size
        cache_bytes = sum(cache.bytes_at(lengths.prompt, position) for cache in engine.caches)
        drain += size * engine.step_seconds(last * lengths.longer_than(position), cache_bytes)
        times.append((full_steps + (i + 1) * size, full_steps * full_step + drain))
    return tuple(times)


def decode_course(
    requests: float, at_once: float, lengths: Lengths, engine: Decoding, group: int
) -> list[tuple[float, float]]:
    """Pairs (seconds, share of groups that are finished), ascending from (0, 0) to (`decode_seconds`, 1).

    A group's `group` responses begin together, and it ends with its longest. The first `at_once` responses begin at
    once, the others evenly until none waits.
    """
    times = _decode_times(requests, at_once, lengths, engine)
    full_steps, full = times[0]
    parts = 16
    begins = [full_steps * (i + 0.5) / parts for i in range(parts)] if full_steps else [0.0]
    first = min(requests, at_once) / requests

    def ended(steps: float) -> float:
        return (1.0 - lengths.longer_than(steps)) ** group if steps > 0.0 else 0.0

    def share(steps: float) -> float:
        return first * ended(steps) + (1.0 - first) * sum(ended(steps - begin) for begin in begins) / len(begins)

    filling = [(full_steps * i / parts, full * i / parts) for i in range(parts)] if full_steps else []
    return [(0.0, 0.0), *((seconds, share(steps)) for steps, seconds in (*filling[1:], *times))]


def left_over(course: Sequence[tuple[float, float]], work: float, parts: int) -> float:
    """Seconds of `work` that are left when a course ends; it is in `parts`, each done once so many groups are finished.

    Ranks that do nothing else do it in the order in which groups end. A queue holds at its end the most that arrived in
    some last stretch less what was served in it (Reich, Ann. Math. Stat. 29, 1958). On simulated fleets
    (`tools/simulate_rollouts.py --annotate`) 0.6 to 1.0 of what is not left by this was done in time.
    """
    end = course[-1][0]
    # A part of which a group is missing has not arrived.
    there = [(seconds, math.floor(share * parts + 1e-9) / parts) for seconds, share in course]
    return max(0.0, *(work * (1.0 - share) - (end - seconds) for (_, share), (seconds, _) in pairwise(there)))


def micro_batches(rows: float, responses: float, budget: int, ranks: int, multiple: int) -> int:
    """Number of a rank's micro-batches: `rows` packed tokens over `ranks` data-parallel ranks, at most `budget` in one.

    A response is not cut, so there are no more than `responses` over the ranks. An interleaved pipeline asks for a
    `multiple` of its stages.
    """
    count = min(rows / budget, responses)
    return max(1, math.ceil(count / (ranks * multiple))) * multiple


# ---- disk ---------------------------------------------------------------------------------------------------------


def checkpoint_bytes(parameters: int, trained: int, width: int) -> int:
    """Bytes of weights and optimizer state, each once whatever the layout: 14 a trained parameter in bfloat16.

    The distributed optimizer writes its float32 weights beside Adam's moments even where the model's are float32 too,
    which makes 16. Measured: the quickstart's is 9.98 MB, of which 9.55 are counted; the rest are 1.5 KB an array, and
    files of the run's state.
    """
    return width * parameters + 3 * _FP32 * trained


def response_table_bytes(responses: int, tokens: float) -> int:
    """Bytes of a step's table of responses of `tokens` in all.

    Measured: 8 KB a file, 100 bytes a row, and of English and code 1.2 bytes a token (responses of 8,192 tokens) to 1.9
    (of 256), compressed; 2 are assumed.
    """
    return int(8_000 + 100 * responses + 2 * tokens)


def token_table_bytes(tokens: float) -> int:
    """Bytes of a step's tokens with texts and log-probs.

    Measured: 2 KB a file, and 4.0 bytes a token (responses of 8,192 tokens) to 5.6 (of 256).
    """
    return int(2_000 + 5 * tokens) if tokens else 0


def metrics_bytes(steps: int) -> int:
    """Bytes of metrics.jsonl; measured 3.1 KB for a step of 80 metrics, and evaluations and GPUs have theirs."""
    return 4_000 * steps


def tensorboard_bytes(steps: int) -> int:
    """Bytes of TensorBoard's files; measured 2.1 KB for a step of 80 metrics."""
    return 3_000 * steps
