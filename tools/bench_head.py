"""The fused head on one GPU, beside what else computes log-probs from logits. One command:

    python tools/bench_head.py            # 8,192 tokens of 151,936 logits in bfloat16, top-3 and entropy
    python tools/bench_head.py --tune     # the kernels' tiles and warps, tried one after the other

What each row computes:

    ours                log-prob, entropy, top-3, is-top-1; gradients by log-prob, entropy and top-3, over the logits
    torch, naive        the same of a float32 log_softmax, with a buffer of its own for each step
    separate passes     cross-entropy, and entropy from a softmax of its own (as verl does it in torch); no top-3
    Liger               LigerCrossEntropyFunction: log-prob only, gradient made in forward over the logits
    Liger, selective    fused_selective_log_softmax: log-prob only, no gradient
    CCE                 linear_cross_entropy: log-prob only, from hidden states, so the output layer's product is in it
    ours, chunked       everything of `ours`, from the same hidden states; products are in it too

Bars are for an H200 (4.8 TB/s: one read of the logits takes 0.52 ms, two reads and a write 1.56 ms). A figure is the
median over repeats of the GPU's time, launches queued behind a wait as in a step whose queue is full, with logits
restored before each; errors are those of some rows against float64. Libraries that are not installed are told and
left out (pip install liger-kernel cut-cross-entropy). Without CUDA a small case of torch's arithmetic runs on the CPU,
and no bar applies.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from results import Figure, Machine, Setting, keep, machine, report, unusual
from torch import Tensor

from megasharp.ops.chunked_head import chunked_token_head
from megasharp.ops.head import HeadOutput, VocabShard, token_head

CHECKED_ROWS = 8
TEMPERATURE = 0.9
# One to two milliseconds of the GPU's clock, in which Python launches what is timed.
QUEUE_CYCLES = 3_000_000
PACKAGES = ("liger-kernel", "cut-cross-entropy")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes, and the tensors that all ways share. `incoming` are the loss's gradients by log-prob, entropy, top-N."""

    topn: int
    logits_TV: Tensor
    target_T: Tensor
    hidden_TH: Tensor
    weight_VH: Tensor
    incoming: tuple[Tensor, Tensor, Tensor]

    @property
    def whole(self) -> VocabShard:
        return VocabShard(0, self.logits_TV.shape[1], None)


@dataclass(frozen=True, slots=True)
class Way:
    """`run` gives outputs that begin with log-probs or losses, in the order of `incoming`; of logits or hidden states.

    `backward`: whether it has a gradient. `bars`: forward ms, forward and backward ms, extra memory in MB.
    """

    name: str
    run: Callable[[Problem, Tensor], Sequence[Tensor]]
    note: str = ""
    hidden: bool = False
    backward: bool = True
    bars: tuple[float | None, float | None, float | None] = (None, None, None)


def make_problem(tokens: int, vocab: int, hidden: int, topn: int, dtype: torch.dtype, device: str) -> Problem:
    """Random logits: some tokens are nearly certain of their target, most are not."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    logits_TV = normal(tokens, vocab).mul_(2)
    target_T = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    logits_TV[torch.arange(0, tokens, 4, device=device), target_T[::4]] = 20.0
    shapes = ((tokens,), (tokens,), (tokens, topn))
    incoming = tuple(torch.randn(*shape, generator=generator, device=device) for shape in shapes)
    weight_VH = normal(vocab, hidden).mul_(hidden**-0.5)
    return Problem(topn, logits_TV, target_T, normal(tokens, hidden), weight_VH, incoming)  # type: ignore[arg-type]


def _outputs(head: HeadOutput) -> list[Tensor]:
    assert head.entropy_T is not None and head.topn_logp_TN is not None
    return [head.logp_T, head.entropy_T, head.topn_logp_TN]


def ours(problem: Problem, logits_TV: Tensor) -> Sequence[Tensor]:
    """The fused head, gradient over the logits."""
    return _outputs(
        token_head(
            logits_TV, problem.target_T, problem.whole, temperature=TEMPERATURE, entropy=True, entropy_gradient=True,
            topn=problem.topn, overwrite_logits=True,
        )
    )  # fmt: skip


def ours_chunked(problem: Problem, hidden_TH: Tensor) -> Sequence[Tensor]:
    """The same from hidden states."""
    return _outputs(
        chunked_token_head(
            hidden_TH, problem.weight_VH, problem.target_T, problem.whole, temperature=TEMPERATURE, entropy=True,
            entropy_gradient=True, topn=problem.topn,
        )
    )  # fmt: skip


def naive(problem: Problem, logits_TV: Tensor) -> Sequence[Tensor]:
    """Plain torch in float32."""
    logp_TV = torch.log_softmax(logits_TV.float() / TEMPERATURE, dim=1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(1)
    return [logp_TV.gather(1, problem.target_T[:, None])[:, 0], entropy_T, logp_TV.topk(problem.topn, dim=1).values]


def separate(problem: Problem, logits_TV: Tensor) -> Sequence[Tensor]:
    """Cross-entropy, and the entropy from a softmax of its own."""
    scaled_TV = logits_TV.float() / TEMPERATURE
    p_TV = torch.softmax(scaled_TV, dim=1)
    entropy_T = torch.logsumexp(scaled_TV, dim=1) - (p_TV * scaled_TV).sum(1)
    return [-F.cross_entropy(scaled_TV, problem.target_T, reduction="none"), entropy_T]


def liger(problem: Problem, logits_TV: Tensor) -> Sequence[Tensor]:
    """Liger's cross-entropy; its temperature is 1."""
    function = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
    return [function(logits_TV, problem.target_T, reduction="none")]


def liger_selective(problem: Problem, logits_TV: Tensor) -> Sequence[Tensor]:
    """Liger's log-probs for GRPO. It leaves the last of a sequence's tokens out."""
    function = importlib.import_module("liger_kernel.ops.grpo_loss").fused_selective_log_softmax
    return [function(logits_TV.detach()[None], problem.target_T[None, :-1].contiguous(), TEMPERATURE)]


def cut_cross_entropy(problem: Problem, hidden_TH: Tensor) -> Sequence[Tensor]:
    """Apple's cut cross-entropy; its temperature is 1."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return [function(hidden_TH, problem.weight_VH, problem.target_T, reduction="none", impl="cce")]


def ways() -> list[Way]:
    """All that are compared."""
    return [
        Way("ours", ours, bars=(0.65, 2.0, 64.0)),
        Way("torch, naive", naive),
        Way("separate passes", separate, "no top-N"),
        Way("Liger", liger, "log-prob only; gradient made in forward"),
        Way("Liger, selective", liger_selective, "log-prob only, no gradient", backward=False),
        Way("CCE", cut_cross_entropy, "log-prob only, its gradient filter on, with the products", hidden=True),
        Way("ours, chunked", ours_chunked, "with the output layer's products", hidden=True),
    ]


_NEEDS: dict[Callable[[Problem, Tensor], Sequence[Tensor]], str] = {
    liger: "liger_kernel",
    liger_selective: "liger_kernel",
    cut_cross_entropy: "cut_cross_entropy",
}


def missing(way: Way) -> str:
    """Why it cannot run; empty where it can."""
    package = _NEEDS.get(way.run)
    return "" if package is None or importlib.util.find_spec(package) else "not installed"


def once(way: Way, problem: Problem, source: Tensor, mark: Callable[[], None]) -> list[Tensor]:
    """One forward and backward over a buffer whose values may go; `mark` is called before, between and after."""
    buffer = source.detach().requires_grad_()
    # A result of some operation, as a model's logits are: its gradient is captured, not accumulated.
    x = buffer.view_as(buffer)
    weight = (problem.weight_VH.requires_grad_(),) if way.hidden else ()
    mark()
    outputs = way.run(problem, x)
    mark()
    if not way.backward:
        return []
    gradients = torch.autograd.grad(outputs, (x, *weight), problem.incoming[: len(outputs)])
    mark()
    return list(gradients)


def measure(way: Way, problem: Problem, repeats: int, why_no_bars: str = "") -> list[Figure]:
    """Median milliseconds forward, and forward with backward; the most memory beyond what was there."""
    if why_no_bars and any(way.bars):
        way = replace(way, bars=(None, None, None), note=why_no_bars)
    reason = missing(way) if torch.cuda.is_available() else "needs CUDA"
    names = (f"{way.name}: forward", f"{way.name}: forward and backward", f"{way.name}: extra memory")
    units = ("ms", "ms", "MB")
    if reason:
        return [Figure(n, None, u, bar, note=reason) for n, u, bar in zip(names, units, way.bars, strict=True)]
    master = problem.hidden_TH if way.hidden else problem.logits_TV
    work = torch.empty_like(master)
    try:
        peaks, forward, total = _timed(way, problem, master, work, repeats)
    except Exception as error:
        # Another library's failure, or a compiler's, is that row's; the others are still worth their time.
        return [Figure(n, None, u, bar, note=_told(error)) for n, u, bar in zip(names, units, way.bars, strict=True)]
    values = (statistics.median(forward), statistics.median(total) if way.backward else None, max(peaks) / 1e6)
    return [
        Figure(n, v, u, bar, repeats=repeats, note=way.note)
        for n, v, u, bar in zip(names, values, units, way.bars, strict=True)
    ]


def _timed(
    way: Way, problem: Problem, master: Tensor, work: Tensor, repeats: int
) -> tuple[list[int], list[float], list[float]]:
    """Bytes, milliseconds and milliseconds of every repeat, after three that compile and warm up."""
    peaks, forward, total = [], [], []
    for repeat in range(repeats + 3):
        with torch.no_grad():
            work.copy_(master)
        torch.cuda.synchronize()
        # A step's queue is full; on an idle GPU the first launches would be timed instead.
        torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        events: list[torch.cuda.Event] = []

        def mark(events: list[torch.cuda.Event] = events) -> None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)

        kept = once(way, problem, work, mark)
        torch.cuda.synchronize()
        if repeat >= 3:
            peaks.append(torch.cuda.max_memory_allocated() - before)
            forward.append(events[0].elapsed_time(events[1]))
            total.append(events[0].elapsed_time(events[-1]))
        del kept
    return peaks, forward, total


def errors(problem: Problem, name: str) -> list[Figure]:
    """Of `ours`, called `name`, on some rows against float64: outputs in nats, the gradient by relative norm."""
    rows = torch.linspace(0, len(problem.target_T) - 1, CHECKED_ROWS).long().to(problem.target_T.device)
    work = problem.logits_TV.clone().requires_grad_()
    x = work.view_as(work)
    outputs = ours(problem, x)
    (gradient,) = torch.autograd.grad(outputs, x, problem.incoming)
    outputs = [x.detach() for x in outputs]
    exact_RV = problem.logits_TV[rows].double().requires_grad_()
    logp_RV = torch.log_softmax(exact_RV / TEMPERATURE, 1)
    entropy_R = -(logp_RV.exp() * logp_RV).sum(1)
    expected = [logp_RV.gather(1, problem.target_T[rows, None])[:, 0], entropy_R, logp_RV.topk(problem.topn, 1).values]
    (exact_gradient,) = torch.autograd.grad(expected, exact_RV, [x[rows].double() for x in problem.incoming])
    expected = [x.detach() for x in expected]
    found = [
        Figure(f"{name}: largest error, {output}", float((found_T[rows].double() - exact).abs().max()), "nats", 2e-5)
        for output, found_T, exact in zip(("log-prob", "entropy", "top-N"), outputs, expected, strict=True)
    ]
    relative = float((gradient[rows].double() - exact_gradient).norm() / exact_gradient.norm())
    bar = 1e-5 if problem.logits_TV.dtype == torch.float32 else 1e-2
    return [*found, Figure(f"{name}: relative error, gradient", relative, "", bar)]


def errors_or_why_not(problem: Problem) -> list[Figure]:
    """Of `ours` on this GPU; where it fails there, the other rows are still worth their time."""
    try:
        return errors(problem, "ours")
    except Exception as error:
        return [Figure("ours: largest error", None, "nats", 2e-5, note=_told(error))]


def _told(error: Exception) -> str:
    return f"failed: {str(error).splitlines()[0][:80] if str(error) else type(error).__name__}"


def copy_rate(problem: Problem, repeats: int) -> Figure:
    """What this device moves when it only copies: the ceiling of every row."""
    name = "device-to-device copy"
    if not torch.cuda.is_available():
        return Figure(name, None, "TB/s", better="higher", note="needs CUDA")
    copy = Way("copy", lambda _, x: [x.detach().clone()], backward=False)
    _, milliseconds, _ = _timed(copy, problem, problem.logits_TV, torch.empty_like(problem.logits_TV), repeats)
    moved = 2 * problem.logits_TV.numel() * problem.logits_TV.element_size()
    rate = moved / statistics.median(milliseconds) / 1e9
    return Figure(name, rate, "TB/s", better="higher", repeats=repeats, note="read and written bytes; the ceiling")


def tune(problem: Problem, repeats: int, kept: Callable[[Sequence[Figure]], object]) -> list[Figure]:
    """Try tiles and warps, each for forward and backward; `kept` gets the figures so far after every attempt."""
    from megasharp.ops.head.kernel_launch import TUNING

    found: list[Figure] = []
    for block, warps in itertools.product((512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)):
        # A thread should have 8 to 64 logits of a tile.
        if not 8 <= block // (32 * warps) <= 64:
            continue
        TUNING.forward_block, TUNING.forward_warps = block, warps
        TUNING.backward_block, TUNING.backward_warps = block, warps
        forward, total, _ = measure(Way("ours", ours), problem, repeats)
        backward = None if forward.value is None or total.value is None else total.value - forward.value
        name = f"tile {block}, {warps} warp(s)"
        found.append(replace(forward, name=f"{name}: forward"))
        found.append(replace(total, name=f"{name}: backward", value=backward))
        print(f"{name}: forward {forward.value} ms, backward {backward} ms {forward.note}", flush=True)
        kept(found)
    for part in ("forward", "backward"):
        measured = [each for each in found if each.name.endswith(part) and each.value is not None]
        if measured:
            print(f"fastest {part}: {min(measured, key=lambda each: each.value or 0.0).name}")
    return found


def on_cpu(arguments: argparse.Namespace) -> list[Figure]:
    """A small case of torch's arithmetic: right or not, and milliseconds that say nothing of a GPU."""
    print("no CUDA here: no figure below is for the bars; torch's arithmetic on a small case, on this CPU")
    small = make_problem(64, 4096, 64, arguments.topn, torch.float32, "cpu")
    found = errors(small, "CPU, ours")
    for name, run in (("ours", ours), ("torch, naive", naive), ("separate passes", separate)):
        forward, total = [], []
        for _ in range(arguments.repeats):
            marks: list[float] = []

            def mark(marks: list[float] = marks) -> None:
                marks.append(time.perf_counter())

            once(Way(name, run), small, small.logits_TV.clone(), mark)
            forward.append(1e3 * (marks[1] - marks[0]))
            total.append(1e3 * (marks[2] - marks[0]))
        for part, values in (("forward", forward), ("forward and backward", total)):
            value, note = statistics.median(values), "64 x 4,096, float32"
            found.append(Figure(f"CPU, {name}: {part}", value, "ms", repeats=len(values), note=note))
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="rows of logits")
    parser.add_argument("--vocab", type=int, default=151936, help="columns")
    parser.add_argument("--hidden", type=int, default=2560, help="of the rows that begin with hidden states")
    parser.add_argument("--topn", type=int, default=3, help="candidates, 1 to 8")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the logits")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each row, after three that warm up")
    parser.add_argument("--tune", action="store_true", help="try the kernels' tiles instead; needs CUDA")
    arguments = parser.parse_args()
    if min(arguments.tokens, arguments.hidden, arguments.repeats) < 1:
        parser.error("--tokens, --hidden and --repeats must be 1 or more")
    if not 1 <= arguments.topn <= min(8, arguments.vocab):
        parser.error("--topn must be 1 to 8, and at most --vocab")
    cuda = torch.cuda.is_available()
    if arguments.tune and not cuda:
        parser.error("--tune needs CUDA: there is none here")
    # Without CUDA the rows only say what they would be of.
    tokens, vocab, hidden = (arguments.tokens, arguments.vocab, arguments.hidden) if cuda else (1, arguments.topn, 1)
    dtype = DTYPES[arguments.dtype]
    problem = make_problem(tokens, vocab, hidden, arguments.topn, dtype, "cuda" if cuda else "cpu")
    other = unusual(parser, arguments, ("tokens", "vocab", "hidden", "topn", "dtype"))
    settings: dict[str, Setting] = {name: value for name, value in vars(arguments).items() if name != "tune"}
    where, subject = machine(PACKAGES), " ".join(filter(None, ("tuning" if arguments.tune else "", other)))

    def kept(figures: Sequence[Figure], where: Machine = where) -> None:
        keep("bench_head", figures, settings, where, subject=subject)

    if arguments.tune:
        report("bench_head", tune(problem, arguments.repeats, kept), settings, PACKAGES, subject=subject)
        return
    rows = [copy_rate(problem, arguments.repeats)]
    why_no_bars = f"bars are not for {other}" if other else ""
    if cuda and not torch.cuda.get_device_name().startswith("NVIDIA H200"):
        why_no_bars = "bars are for an H200"
    # Right or wrong comes first: an early end leaves it.
    rows += errors_or_why_not(problem) if cuda else on_cpu(arguments)
    for way in ways():
        rows += measure(way, problem, arguments.repeats, why_no_bars)
        kept(rows)
    report("bench_head", rows, settings, PACKAGES, subject=subject)


if __name__ == "__main__":
    main()
