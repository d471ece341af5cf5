"""`megasharp plan`: golden plans of the shipped models, both examples, CPU runs, problems, suggestions, the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.run_config import load_run
from megasharp.planner.formulas import Lengths
from megasharp.planner.records import Plan, Rates, StageTime
from megasharp.planner.suggest import gains, make_plan, suggest
from megasharp.planner.text import plan_text, suggestions_text
from megasharp.planner.transport import FITTED_S
from megasharp.trainer.plan import Options, ask, compare, formula_counts, limits_that_bite
from tests.unit.trainer.plans import EXAMPLES, REPOSITORY, asked, asked_in_process, planned, texts, write_run


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


# Piece, dp: static GB of a GPU, its memory network's GB, tokens of an engine's cache, checkpoint GB. The first columns
# are bytes a parameter (18 at d = 1, 6 + 12 / d) times parameters / tp; the rest is pinned, so that a change is seen.
GOLDEN = {
    ("qwen2.5-32b", 1): (73.7, 0.0, 1_353_369, 458.7),
    ("qwen2.5-32b", 4): (36.9, 0.0, 1_353_369, 458.7),
    ("qwen3-32b", 1): (73.7, 0.0, 1_353_383, 458.7),
    ("qwen3-32b", 4): (36.9, 0.0, 1_353_383, 458.7),
    ("qwen3-32b+qwen3-1.7b", 1): (73.7, 3.9, 932_352, 482.8),
    ("qwen3-32b+qwen3-1.7b", 4): (36.9, 1.9, 932_352, 482.8),
    ("qwen3-14b", 8): (27.7, 0.0, 1_102_393, 206.8),
    ("qwen3-8b+qwen3-1.7b", 16): (27.6, 5.8, 325_217, 138.8),
}


@each_case(("piece", "dp"), GOLDEN)
def test_golden_plans(tmp_path: Path, piece: str, dp: int) -> None:
    plan = planned(tmp_path, piece, f"policy.dp={dp}")
    (stage,) = plan.stages
    assert plan.engine is not None
    found = (stage.static / 1e9, stage.memory_network / 1e9, plan.engine.tokens, plan.checkpoint.size / 1e9)
    assert found == pytest.approx(GOLDEN[piece, dp], abs=0.06)


def test_dlc_costs_what_is_read_besides(tmp_path: Path) -> None:
    """A decode step reads weights and cache once: 64 KiB a token of the policy on a GPU, 28 of the memory network."""
    sizes = ["data.max_prompt_tokens=2", "rollout.sglang.max_running_requests=64"]
    question = asked(tmp_path, "qwen3-32b+qwen3-1.7b", *sizes, options=Options(response=4096)).request
    weights, live = (32_762_123_264 / 2, 1_720_574_976 / 2), 64 * question.batch.lengths.context * 1024
    plain = weights[0] + 64 * live
    found = make_plan(question).dlc
    assert found is not None and found.at_once == 64
    assert found.step == pytest.approx((plain + weights[1] + 28 * live) / plain, rel=1e-3)
    plan = planned(tmp_path, "qwen3-32b+qwen3-1.7b", *sizes, "recipe.dlc.window=256", options=Options(response=4096))
    assert not plan.works and "recipe.dlc.window is refused by SGLang engines on GPUs" in texts(plan, "error")
    windowed = plan.dlc
    assert windowed is not None and windowed.cache < 64 * 257 * 28 * 1024 < found.cache / 10
    assert 1.0 < windowed.step < 1.08 < found.step


def test_pipeline_stages_of_qwen3_32b_have_the_measured_parameters(tmp_path: Path) -> None:
    found = formula_counts(asked(tmp_path, "qwen3-32b", "policy.pp=2", "policy.dp=2"))
    assert found == [[2_047_926_272, 2_047_931_392]]
    plan = planned(tmp_path, "qwen3-32b", "policy.pp=4", "policy.dp=1", "policy.recompute=none")
    assert [stage.kind for stage in plan.stages] == ["first", "middle", "middle", "last"]
    assert [stage.logits > 0 for stage in plan.stages] == [False, False, False, True]
    assert [round(stage.activations / plan.stages[3].activations) for stage in plan.stages] == [4, 3, 2, 1]


def test_recompute_trades_activations_for_time(tmp_path: Path) -> None:
    plans = {
        setting: planned(tmp_path, "qwen3-32b", f"policy.recompute={setting}")
        for setting in ("none", "selective", "full")
    }
    kept = {setting: plan.stages[0].activations for setting, plan in plans.items()}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert all(plan.stages[0].activations_by == kept for plan in plans.values())
    update = {setting: plan.times[1].seconds or 0.0 for setting, plan in plans.items()}
    # Of what tensor-parallel ranks exchange there are three passes for two.
    assert 4 / 3 < update["full"] / update["none"] < 3 / 2
    assert update["none"] < update["selective"] < update["full"]


def test_a_virtual_pipeline_shares_layers_out_in_turns(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3-32b", "policy.pp=4", "policy.vpp=2", "policy.tp=4", "policy.dp=2")
    assert plan.stages[1].layers == (range(8, 16), range(40, 48))
    assert [stage.kind for stage in plan.stages] == ["first", "middle", "middle", "last"]


def test_a_real_model_that_differs_from_the_table_is_an_error() -> None:
    compare([[5, 6]], [[5, 6]])
    with pytest.raises(UserError, match="stage 1: Megatron's model has 7 parameters on its first rank, the family's"):
        compare([[5, 7]], [[5, 6]])


@each_case("name", ["qwen2.5-32b-casp", "qwen3-32b-dlc", "qwen3-30b-a3b"])
def test_examples_show_the_plan_of_their_run(name: str) -> None:
    """Regenerate with `megasharp plan examples/NAME/run.yaml > examples/NAME/plan.txt`."""
    file = EXAMPLES / name / "run.yaml"
    question = ask(load_run(file), str(file), Options())
    plan = make_plan(question.request)
    text = plan_text(question.request, plan, question.notes)
    assert plan.works and max(map(len, text.splitlines())) <= 100
    assert (EXAMPLES / name / "plan.txt").read_text(encoding="utf-8") == text + "\n"


@each_case("name", ["quickstart", "fleet_on_cpu"])
def test_a_cpu_run_is_planned_without_gpu_lines(name: str) -> None:
    file = EXAMPLES / name / "run.yaml"
    question = ask(load_run(file), str(file), Options())
    plan = make_plan(question.request)
    text = plan_text(question.request, plan, question.notes)
    assert plan.works and not plan.problems and plan.step_seconds is None
    assert "not predicted on CPUs" in text
    assert not {"GPU", "CUDA", "mem_fraction"} & set(text.replace(",", " ").split())


def test_nodes_fill_the_machines_and_say_so(tmp_path: Path) -> None:
    question = asked(tmp_path, "qwen3-32b", options=Options(nodes=4, gpu="h100"))
    assert (question.request.split.dp, question.request.engines and question.request.engines.count) == (4, 8)
    assert "policy.dp=4 fills 4 node(s) of 8 GPUs (the file says 1)" in question.notes
    assert "rollout.engines=8 fill them (the file says 1)" in question.notes
    with pytest.raises(UserError, match=r"24 GPUs cannot be filled with policy.tp x pp x cp = 16"):
        asked(tmp_path, "qwen3-32b", "policy.pp=2", options=Options(nodes=3))


# tp of policy and engine, dp and engines of the file, nodes to fill: dp and engines that do.
APART = [
    ((8, 8, 1, 1, 2), (1, 1)),
    ((8, 4, 1, 2, 4), (2, 4)),
    ((8, 4, 3, 2, 2), (1, 2)),
    ((4, 2, 1, 1, 1), (1, 2)),
    ((2, 1, 3, 1, 1), (3, 2)),
]


@each_case(("file", "filled"), APART)
def test_nodes_are_filled_by_engines_of_their_own_too(
    tmp_path: Path, file: tuple[int, int, int, int, int], filled: tuple[int, int]
) -> None:
    """About as the file shares its GPUs out, with none left over."""
    tp, engine_tp, dp, engines, nodes = file
    keys = ["cluster.placement=disaggregated", f"policy.tp={tp}", f"rollout.tp={engine_tp}"]
    keys += [f"policy.dp={dp}", f"rollout.engines={engines}"]
    request = asked(tmp_path, "qwen3-32b", *keys, options=Options(nodes=nodes)).request
    assert request.engines is not None
    assert (request.split.dp, request.engines.count) == filled
    assert filled[0] * tp + filled[1] * engine_tp == 8 * nodes
    assert "stay idle" not in texts(make_plan(request), "warning")


def test_nodes_that_cannot_be_filled_apart_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"8 GPUs cannot be filled with policy.tp x pp x cp = 8 and engines of"):
        asked(tmp_path, "qwen3-32b", "cluster.placement=disaggregated", options=Options(nodes=1))


def test_more_mini_batches_than_groups_are_refused_as_train_does(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe.mini_batches=65 is more than data.prompts_per_step=64; a mini-batch"):
        asked(tmp_path, "qwen3-32b", "recipe.mini_batches=65")


def test_without_nodes_the_file_is_planned_as_it_is(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3-32b", "cluster.nodes=2")
    assert plan.world == 8 and "8 of 16 GPUs stay idle" in texts(plan, "warning")


def test_unknown_models_and_gpus_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"run.yaml: Nobody/None-1b is no folder .* configs/model has none of that name"
    ):
        asked(tmp_path, "qwen3-32b", "model.path=Nobody/None-1b")
    with pytest.raises(UserError, match="--gpu h300: give one of h200, h100, b200, or its memory in MiB"):
        asked(tmp_path, "qwen3-32b", options=Options(gpu="h300"))
    assert planned(tmp_path, "qwen3-32b", options=Options(gpu="81559")).gpu_memory == 81559 * 2**20


def test_indivisible_heads_and_layers_are_errors_that_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy.tp=16 does not divide kv_heads=8"):
        planned(tmp_path, "qwen3-32b", "policy.tp=16")
    with pytest.raises(UserError, match=r"policy.pp=3 does not divide num_layers=64"):
        planned(tmp_path, "qwen3-32b", "policy.pp=3")
    with pytest.raises(UserError, match=r"rollout.tp=3 does not divide heads=64"):
        planned(tmp_path, "qwen3-32b", "rollout.tp=3")


PROBLEMS = {
    "policy.tp=8 cluster.gpus_per_node=4 cluster.nodes=2": ("error", "policy.tp=8 crosses nodes of 4 GPUs"),
    "policy.dp=2": ("error", "the run needs 16 GPUs, 1 node(s) of 8 have 8"),
    "rollout.sglang.mem_fraction_static=0.9": ("error", "set rollout.sglang.mem_fraction_static to 0.86 (now 0.900)"),
    "policy.offload=[]": ("error", "GB of 150 GB do not fit; add gradients, optimizer to policy.offload"),
    "policy.recompute=none policy.micro_batch_tokens=40960": ("error", "set policy.recompute=selective"),
    "rollout.tp=1": ("warning", "have no engine and idle"),
    "data.max_response_tokens=40000": (
        "error",
        "42048 tokens exceed the 40960 positions of Qwen3-32B, of which SGLang keeps 6; lower data.max_prompt_tokens "
        "or data.max_response_tokens",
    ),
    # One more than SGLang leaves.
    "data.max_response_tokens=38907": ("error", "40955 tokens exceed the 40960 positions"),
    "eval.max_response_tokens=40000": ("error", "lower data.max_prompt_tokens or eval.max_response_tokens"),
    "policy.micro_batch_tokens=4096": ("warning", "prompt and response may have 10240 tokens"),
    "data.prompts_per_step=63 recipe.mini_batches=2": ("warning", "is not divisible by recipe.mini_batches=2"),
    "data.responses_per_prompt=7 cluster.nodes=3 policy.dp=3": ("warning", "448 responses are not divisible by"),
    "policy.pp=8 policy.tp=1 data.prompts_per_step=8": ("warning", "pipeline ranks idle for"),
    "cluster.nodes=2 policy.dp=2 rollout.engines=4 sync.transport=disk": ("warning", "by way of the disk"),
    "rollout.sglang.mem_fraction_static=0.11": ("error", "tokens; raise rollout.sglang.mem_fraction_static or"),
    "cluster.nodes=2 cluster.placement=disaggregated rollout.engines=2 rollout.sglang.mem_fraction_static=0.999": (
        "error",
        "do not fit; lower rollout.sglang.mem_fraction_static, or raise rollout.tp",
    ),
    "rollout.request_limit_s=90": ("error", "and rollout.request_limit_s is 90: it ends there and is not trained on"),
    "rollout.request_limit_s=500": ("warning", "a response of 8,192 tokens, from its first to its last, takes 3"),
    "rollout.first_token_limit_s=5 rollout.sglang.max_running_requests=64": (
        "error",
        "and rollout.first_token_limit_s is 5: it is sent again, three times at most; raise it",
    ),
    "guard.long_stages.rollout=60": ("error", "and guard.long_stages.rollout is 60: the watchdog ends the run there"),
    "guard.stage_timeout_s=60": ("error", "the update takes"),
}


def test_a_dry_run_says_which_limit_would_end_responses(tmp_path: Path) -> None:
    """Ten times as many responses wait ten times as long, but a response's own limit is as far away as before."""
    file = write_run(tmp_path, "qwen3-32b")
    more = ["rollout.sglang.max_running_requests=64", "rollout.request_limit_s=900"]
    assert limits_that_bite(load_run(file, [*more, "data.responses_per_prompt=8"]), str(file)) == []
    assert limits_that_bite(load_run(file, [*more, "data.responses_per_prompt=80"]), str(file)) == []
    (said,) = limits_that_bite(load_run(file, [*more, "rollout.request_limit_s=50"]), str(file))
    assert "rollout.request_limit_s is 50" in said
    assert limits_that_bite(load_run(EXAMPLES / "quickstart" / "run.yaml"), "quickstart") == []


# MiB of the GPU, prefill chunk, tp: MiB that SGLang 0.5.21 keeps out of its share (`_handle_gpu_memory_settings`, less
# the graphs of prefill): 512 + 1.5 max(chunk, 2048) + 128 tp + 2 x the largest batch; above 60 GiB 10 GiB at least.
SGLANG_RESERVES = [
    (16000, None, 1, 512 + 3072 + 128 + 16),
    (24000, None, 1, 512 + 6144 + 128 + 96),
    (24000, 512, 1, 512 + 3072 + 128 + 96),
    (141000, 2048, 4, 10240),
    (141000, None, 4, 512 + 12288 + 512 + 1024),
]


def test_a_window_that_engines_ignore_is_an_error(tmp_path: Path) -> None:
    model = tmp_path / "windowed"
    model.mkdir()
    known = json.loads((REPOSITORY / "configs/model/ministral-8b-instruct-2410/config.json").read_text())
    (model / "config.json").write_text(json.dumps({**known, "sliding_window": 4096}))
    path, short = f"model.path={model}", "data.max_response_tokens=2048"
    words = "exceed the window of 4096 positions of windowed, which SGLang ignores"
    assert words in texts(planned(tmp_path, "qwen3-8b", path, "data.max_response_tokens=4096"), "error")
    assert words not in texts(planned(tmp_path, "qwen3-8b", path, short), "error")
    longer = f"{words}: the run would be refused; lower data.max_prompt_tokens or eval.max_response_tokens"
    assert longer in texts(planned(tmp_path, "qwen3-8b", path, short, "eval.max_response_tokens=4096"), "error")


def test_windows_make_passes_shorter_and_say_so(tmp_path: Path) -> None:
    known = json.loads((REPOSITORY / "configs/model/ministral-8b-instruct-2410/config.json").read_text())
    times, shown = [], []
    for name, window in (("windowed", 4096), ("whole", None)):
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**known, "sliding_window": window}))
        keys = (f"model.path={model}", "data.max_prompt_tokens=2048", "data.max_response_tokens=30000")
        question = asked(tmp_path, "qwen3-8b", *keys)
        plan = make_plan(question.request)
        times.append({time.name: time.seconds or 0.0 for time in plan.times})
        shown.append(" ".join(plan_text(question.request, plan, ()).split()))
    assert times[0]["update"] < 0.9 * times[1]["update"]
    assert times[0]["rollout"] == times[1]["rollout"]
    assert "36 of 36 layers of windowed see 4,096 positions." in shown[0] and "windows" not in shown[1]


def test_a_full_cache_is_told_twice_when_all_responses_could_be_long(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3-32b", "data.prompts_per_step=512")
    told = texts(plan, "warning")
    assert "responses of full length" in told and "set rollout.sglang.max_running_requests where that happens" in told
    assert "waves" in told and "more at once: raise rollout.sglang.mem_fraction_static or rollout.tp" in told


@each_case("overrides", PROBLEMS)
def test_what_hurt_others_is_told(tmp_path: Path, overrides: str) -> None:
    level, text = PROBLEMS[overrides]
    plan = planned(tmp_path, "qwen3-32b", *overrides.split())
    assert text in texts(plan, level)
    assert plan.works == (not texts(plan, "error"))


@each_case(("budget", "expected"), [(1, 8), (1000, 8), (5120, 8), (40960, 1)])
def test_there_are_no_more_micro_batches_than_responses(tmp_path: Path, budget: int, expected: int) -> None:
    """Eight responses of 4,096 tokens, which are not cut: both warnings show."""
    pipeline = ("policy.pp=4", "policy.tp=4", "cluster.nodes=2", "data.prompts_per_step=1")
    plan = planned(tmp_path, "qwen3-32b", *pipeline, f"policy.micro_batch_tokens={budget}")
    assert plan.micro_batches == expected
    assert plan.bubble == 3 / (expected + 3)
    assert "pipeline ranks idle for" in texts(plan, "warning")
    assert ("a response is not cut" in texts(plan, "warning")) == (budget < 10240)
    virtual = planned(tmp_path, "qwen3-32b", *pipeline, "policy.vpp=4", f"policy.micro_batch_tokens={budget}")
    assert virtual.micro_batches == -(-expected // 4) * 4


def test_micro_batches_that_launches_outlast_are_told(tmp_path: Path) -> None:
    """By hand for a layer of Qwen3-8B: 25 launches of 10 us at 42 % of 989 TFLOPS, over the layer's FLOPs a token."""
    weights = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    seen = Lengths(32, 64, 32, 64).context
    least = math.ceil(25 * 10e-6 * 0.42 * 989e12 * 4 / (2 * (weights + 4096 / 36) + 4 * 4096 * seen))
    short = ("policy.tp=4", "data.max_prompt_tokens=64", "data.max_response_tokens=64")

    def told(budget: int) -> bool:
        plan = planned(tmp_path, "qwen3-8b", *short, f"policy.micro_batch_tokens={budget}")
        return "and the GPU waits" in texts(plan, "warning")

    assert [told(budget) for budget in (512, 4 * least)] == [True, False]


@each_case("longest", [64, 100, 257, 512])
@each_case("prompts", [64, 509])
def test_the_advice_on_micro_batches_ends_its_warning(tmp_path: Path, longest: int, prompts: int) -> None:
    """Micro-batches are filled in part: a budget of what hides launches would be warned of again."""
    keys = ("policy.tp=4", f"data.max_prompt_tokens={longest}", f"data.max_response_tokens={longest}")
    keys = (*keys, f"data.prompts_per_step={prompts}")
    warned = False
    for budget in (1, 600, 1000):
        told = texts(planned(tmp_path, "qwen3-8b", *keys, f"policy.micro_batch_tokens={budget}"), "warning")
        if advice := re.search(r"raise policy.micro_batch_tokens to ([0-9,]+)", told):
            warned = True
            better = f"policy.micro_batch_tokens={advice[1].replace(',', '')}"
            assert "the GPU waits" not in texts(planned(tmp_path, "qwen3-8b", *keys, better), "warning"), budget
        else:
            assert "the GPU waits" not in told
    assert warned


def test_interleaved_pipelines_of_few_tokens_are_told_to_take_more(tmp_path: Path) -> None:
    """A rank has at least as many micro-batches as stages: no budget makes them longer."""
    keys = ("policy.pp=4", "policy.vpp=4", "policy.tp=2", "data.max_prompt_tokens=64", "data.max_response_tokens=64")
    told = texts(planned(tmp_path, "qwen3-32b", *keys, "data.prompts_per_step=2"), "warning")
    assert "the GPU waits; raise data.prompts_per_step" in told


def test_the_drivers_seconds_hold_the_transport(tmp_path: Path) -> None:
    """Of a small step by its constant, of a large one by what is sent beyond the published runs' batches."""
    small, large = (planned(tmp_path, "qwen3-32b", f"data.prompts_per_step={count}") for count in (64, 16384))
    for plan, more in ((small, False), (large, True)):
        (driver,) = (time for time in plan.times if time.name == "driver")
        sent = plan.transport
        assert sent is not None and sent.seconds is not None and driver.seconds is not None
        assert driver.seconds == pytest.approx(Rates().driver_s + max(0.0, sent.seconds - FITTED_S)) and more == (
            driver.seconds > Rates().driver_s
        )
        assert sent.seconds < driver.seconds and ("because a larger batch" in driver.how) == more


def test_responses_annotated_while_engines_sample_are_sent_twice(tmp_path: Path) -> None:
    """By hand: 21 bytes a token with labels, 12 before without them and 4 of a log-prob; the labels once, not twice."""
    keys = ("recipe.methods=[grpo, kl]", "cluster.placement=disaggregated", "cluster.nodes=2", "rollout.engines=1")
    plain, ahead = (planned(tmp_path, "qwen3-32b", *keys, f"rollout.overlap_annotation={on}") for on in (False, True))
    question = asked(tmp_path, "qwen3-32b", *keys).request
    responses = question.batch.sequences * question.batch.lengths.response
    prompts, sequences = plain.rows - responses, question.batch.sequences
    passes = len(question.passes.before)
    assert passes and plain.transport is not None and ahead.transport is not None
    assert plain.transport.step == pytest.approx(30 * responses + 4 * prompts + 60 * sequences)
    assert ahead.transport.step == pytest.approx((33 + 4 * passes) * responses + 8 * prompts + 120 * sequences)
    assert ahead.transport.store == plain.transport.store


def test_a_sleeping_engine_leaves_its_graphs_and_its_process(tmp_path: Path) -> None:
    """Beside the same learners with the engine in their process, in each phase in which it does not sample."""
    methods = "recipe.methods=[grpo, kl]"
    plan = planned(tmp_path, "qwen3-32b", methods)
    alone = make_plan(asked_in_process(tmp_path, "qwen3-32b", methods, options=Options(gpu="h200")).request)
    engine, (stage,), (bare,) = plan.engine, plan.stages, alone.stages
    assert engine is not None
    left = 2 * 256 * 2**20 * 2 + 1_000_000_000
    assert {phase: stage.totals[phase] - bare.totals[phase] for phase in ("training", "annotation")} == {
        "training": left,
        "annotation": left,
    }
    learners = stage.static + stage.reference + stage.reserved
    assert stage.totals["handover"] == learners + left + engine.weights
    outside = engine.graphs + engine.workspace + engine.context
    assert stage.totals["sampling"] == stage.reserved + stage.reference + engine.weights + engine.cache + outside
    text = plan_text(asked(tmp_path, "qwen3-32b").request, plan, ())
    assert "a sleeping engine's graphs and context" in text and "1.0 GB (CUDA context and NCCL, assumed)" in text


def test_what_must_leave_is_told_in_the_values_of_its_key(tmp_path: Path) -> None:
    def told(*overrides: str) -> str:
        question = asked(tmp_path, "qwen3-32b", *overrides)
        text = plan_text(question.request, make_plan(question.request), ())
        assert max(map(len, text.splitlines())) <= 100
        return " ".join(text.split("while engines sample (policy.offload): ")[1].split("cache ")[0].split())

    assert told() == "gradients, optimizer"
    assert told("policy.dp=4", "cluster.nodes=4", "rollout.engines=8") == "gradients"
    assert told("rollout.sglang.mem_fraction_static=0.2") == "nothing"
    assert told("rollout.sglang.mem_fraction_static=0.85") == "gradients, optimizer, weights"
    assert told("rollout.sglang.mem_fraction_static=0.98") == "even all is not enough"


def test_the_table_of_a_virtual_pipeline_has_a_line_for_each_run_of_layers(tmp_path: Path) -> None:
    question = asked(tmp_path, "qwen3-32b", "policy.pp=4", "policy.vpp=4", "policy.tp=1", "policy.dp=2")
    lines = plan_text(question.request, make_plan(question.request), ()).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  layers"))
    assert [line.split() for line in lines[first : first + 4]] == [
        ["layers", "0-3", "4-7", "8-11", "12-15"],
        ["16-19", "20-23", "24-27", "28-31"],
        ["32-35", "36-39", "40-43", "44-47"],
        ["48-51", "52-55", "56-59", "60-63"],
    ]
    assert len(lines[first + 4].split()) == 4 + 4
    assert max(map(len, lines)) <= 100


def test_a_single_layer_is_one_number(tmp_path: Path) -> None:
    question = asked(tmp_path, "qwen3-32b", "policy.pp=16", "policy.vpp=4", "policy.tp=1")
    text = plan_text(question.request, make_plan(question.request), ())
    assert next(line.split() for line in text.splitlines() if line.startswith("  layers")) == ["layers", *"0123"]


def test_a_layout_that_cuts_no_model_is_told_before_nodes_are_filled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy.tp=3 does not divide heads=64 of .*: choose from 1, 2, 4, 8"):
        asked(tmp_path, "qwen3-32b", "policy.tp=3", options=Options(nodes=4))
    with pytest.raises(UserError, match=r"rollout.tp=3 does not divide heads=64"):
        asked(tmp_path, "qwen3-32b", "rollout.tp=3", options=Options(nodes=4))
    with pytest.raises(UserError, match=r"both must divide 24, or give another --nodes"):
        asked(tmp_path, "qwen3-32b", "policy.pp=2", options=Options(nodes=3))


# Its sizes were not looked up.
NOT_KNOWN = {"deepseek-ai/DeepSeek-Prover-V1.5-SFT"}


def test_every_model_of_a_paper_is_known_or_listed_as_not() -> None:
    named = set()
    for file in (REPOSITORY / "configs/algo/paper").glob("*.yaml"):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = tree.get("model", {}).get("path")
        memory = tree.get("recipe", {}).get("memory_network", {}).get("path")
        named |= {path for path in (model, memory) if path}
    assert len(named) > 10
    shipped = REPOSITORY / "configs" / "model"
    assert {path for path in named if not (shipped / Path(path).name.lower() / "config.json").is_file()} == NOT_KNOWN


@each_case(("gpu", "chunk", "tp", "reserved"), SGLANG_RESERVES)
def test_sglangs_default_fraction_reserves_what_sglang_does(
    tmp_path: Path, gpu: int, chunk: int | None, tp: int, reserved: int
) -> None:
    keys = ["model.path=Qwen/Qwen3-1.7B", f"rollout.tp={tp}", "rollout.sglang.mem_fraction_static=null"]
    keys += [f"rollout.sglang.chunked_prefill_size={chunk}"] if chunk else []
    plan = planned(tmp_path, "qwen3-32b", *keys, options=Options(gpu=str(gpu)))
    assert plan.engine is not None and plan.engine.fraction == round((gpu - reserved) / gpu, 3)
    question = asked(tmp_path, "qwen3-32b", *keys, options=Options(gpu=str(gpu)))
    assert "SGLang's default (its prefill graphs are left out)" in " ".join(
        plan_text(question.request, plan, ()).split()
    )


def test_a_reference_lies_on_the_host_and_changes_places(tmp_path: Path) -> None:
    plans = [planned(tmp_path, "qwen3-32b", f"recipe.methods={methods}") for methods in ("[grpo]", "[grpo, kl]")]
    without, with_it = (plan.stages[0] for plan in plans)
    assert (with_it.reference, with_it.reference_on_host, without.reference_on_host) == (0, with_it.weights, 0)
    assert with_it.totals["sampling"] == without.totals["sampling"]
    assert plans[1].host - plans[0].host == 8 * with_it.weights
    assert "annotation" not in without.totals
    assert with_it.totals["annotation"] < with_it.totals["training"]
    (seconds,) = [time.seconds for time in plans[1].times if time.name == "reference"]
    assert seconds == pytest.approx(4 * with_it.weights / 50e9)


def test_chunks_of_logits_take_less(tmp_path: Path) -> None:
    """A shard of the vocabulary has 18,992 columns; what autograd is given for its weight is the most."""
    whole, chunks = (planned(tmp_path, "qwen3-32b", f"policy.head={head}").stages[0] for head in ("logits", "chunked"))
    rows = planned(tmp_path, "qwen3-32b").micro_batch_rows
    assert whole.logits == 2 * 2 * rows * 18_992
    assert chunks.logits == 2 * 2 * rows * 5120 + 2 * 18_992 * 5120
    assert whole.totals["training"] - chunks.totals["training"] == whole.logits - chunks.logits


def test_engines_of_their_own_have_gpus_of_their_own(tmp_path: Path) -> None:
    apart = ("cluster.placement=disaggregated", "cluster.nodes=2", "rollout.engines=2", "rollout.max_staleness=1")
    plan = planned(tmp_path, "qwen3-32b", *apart)
    assert plan.works and (plan.world, plan.gpus, plan.host) == (8, 16, 0)
    assert list(plan.stages[0].totals) == ["training"]
    seconds = {time.name: time.seconds or 0.0 for time in plan.times}
    size, rates = 2 * 32_762_123_264, Rates()
    assert seconds["sync"] == pytest.approx(size / (50e9 * 0.8) + 2 * size / rates.sync)
    others = seconds["update"] + seconds["sync"] + seconds["driver"]
    assert plan.step_seconds == pytest.approx(max(seconds["rollout"], others))
    in_turn = planned(tmp_path, "qwen3-32b", *apart[:3])
    assert in_turn.step_seconds == pytest.approx(sum(seconds.values()))


def test_a_plan_hides_annotation_where_the_policy_idles_and_says_what_the_key_would(tmp_path: Path) -> None:
    """With the key the step is shorter by just what the plan without it says; lines keep within the text's width."""
    apart = ("policy.offload=[]", "policy.dp=4", "rollout.engines=8", "cluster.nodes=2", "recipe.methods=[grpo,kl]")
    apart, key = (*apart, "cluster.placement=disaggregated"), "rollout.overlap_annotation=true"

    def annotation(plan: Plan) -> StageTime:
        (time,) = [time for time in plan.times if time.name == "annotate"]
        return time

    without, hidden = planned(tmp_path, "qwen3-8b", *apart), planned(tmp_path, "qwen3-8b", *apart, key)
    before, after = annotation(without).seconds, annotation(hidden).seconds
    assert before is not None and after is not None and 0 < after < 0.7 * before
    assert f"{key} would hide {before - after:.1f} s of it" in annotation(without).how
    assert f"{before - after:.1f} s more while engines sample" in annotation(hidden).how
    assert without.step_seconds and hidden.step_seconds == pytest.approx(without.step_seconds - (before - after))
    request = asked(tmp_path, "qwen3-8b", *apart).request
    assert max(map(len, plan_text(request, without, []).splitlines())) <= 100
    ahead = annotation(planned(tmp_path, "qwen3-8b", *apart, "rollout.max_staleness=1"))
    assert ahead.seconds == before and "overlap_annotation" not in ahead.how
    assert "overlap_annotation" not in annotation(planned(tmp_path, "qwen3-8b", "recipe.methods=[grpo,kl]")).how


@each_case(("tp", "rate"), [(8, 50e9), (4, 450e9)], ids=["over nodes", "in a node"])
@each_case(("recompute", "times"), [("none", 2), ("selective", 2), ("full", 3)])
def test_context_ranks_wait_for_each_others_keys(
    tmp_path: Path, tp: int, rate: float, recompute: str, times: int
) -> None:
    """64 layers with 8 heads of 128 keys and values over tp: of every row's the other rank has half."""
    keys = (f"policy.tp={tp}", "policy.pp=1", f"policy.recompute={recompute}", "recipe.methods=[grpo]")
    alone = planned(tmp_path, "qwen3-32b", *keys, "policy.dp=2")
    plan = planned(tmp_path, "qwen3-32b", *keys, "policy.dp=2", "policy.cp=2")
    assert "context" not in {time.name for time in alone.times}
    seconds = {time.name: time.seconds or 0.0 for time in plan.times}
    assert "annotate" not in seconds
    each = 64 * 2 * 8 / tp * 128 * 2 / 2
    assert seconds["context"] == pytest.approx(times * each * plan.rows / 2 / (rate * 0.8))


def test_adapters_alone_have_gradients_moments_and_a_reference(tmp_path: Path) -> None:
    methods = "recipe.methods=[grpo, kl]"
    full = planned(tmp_path, "qwen3-32b", methods)
    lora = planned(tmp_path, "qwen3-32b", methods, "policy.lora={rank: 16, targets: [qkv, fc2]}")
    (stage,) = lora.stages
    adapters = 64 * 16 * ((3 * 5120 + (8192 + 2 * 1024) // 8) + (25600 // 8 + 5120))
    assert stage.trained == adapters == stage.parameters - full.stages[0].parameters
    assert (stage.gradients, stage.optimizer, stage.reference) == (4 * adapters, 12 * adapters, 0)
    assert stage.reference_on_host == 2 * adapters
    times = [{time.name: time.seconds for time in plan.times} for plan in (full, lora)]
    # Two passes' work for three; their exchange is the same.
    assert 2 / 3 < (times[1]["update"] or 0.0) / (times[0]["update"] or 1.0) < 3 / 4
    assert lora.checkpoint.size < full.checkpoint.size / 3


def test_suggestions_fit_and_are_ranked(tmp_path: Path) -> None:
    question = asked(tmp_path, "qwen3-32b+qwen3-1.7b", options=Options(nodes=4))
    found = suggest(question.request)
    assert len(found) == 3
    assert all(one.plan.works and one.plan.world == 32 and one.keys["policy.cp"] == 1 for one in found)
    assert len({(one.keys["policy.tp"], one.keys["policy.pp"]) for one in found}) == 3
    first = found[0].plan.step_seconds
    assert first is not None and first < (make_plan(question.request).step_seconds or 0.0)
    overrides = [f"{key}={value}" for key, value in found[0].keys.items()]
    again = planned(tmp_path, "qwen3-32b+qwen3-1.7b", *overrides, "cluster.nodes=4")
    assert again.step_seconds == pytest.approx(first) and again.works
    text = suggestions_text(found, make_plan(question.request))
    assert max(map(len, text.splitlines())) <= 100
    assert "file        the run file's own layout: " in text


def test_suggestions_say_which_part_of_a_step_they_change_and_that_ranges_overlap(tmp_path: Path) -> None:
    question = asked(tmp_path, "qwen3-32b", options=Options(nodes=4))
    own = make_plan(question.request)
    (first,) = suggest(question.request, 1)
    before = {time.name: time.seconds or 0.0 for time in own.times}
    faster = tuple(replace(time, seconds=time.seconds - 50) if time.name == "rollout" else time for time in own.times)
    one = replace(first, plan=replace(own, times=faster, step_seconds=own.step_seconds - 50))
    text = " ".join(suggestions_text([one], own).split())
    assert "beside the file's own: rollout -50 s" in text and before["rollout"] > 50
    same, half = replace(first, plan=own), replace(first, plan=replace(own, step_seconds=own.step_seconds / 2))
    assert "beside" not in suggestions_text([same], own)
    for found, near in ([same], "file"), ([same, half, same], "file, 3"), ([half, half, same], "2"):
        said = " ".join(suggestions_text(found, own).split())
        assert f"note the range of 1 overlaps with {near}: measure some steps of each before you choose" in said
    assert "overlap" not in suggestions_text([half], own)


def test_changes_are_of_all_parts_with_a_digit_below_ten_seconds(tmp_path: Path) -> None:
    plan = make_plan(asked(tmp_path, "qwen3-32b", options=Options(nodes=4)).request)

    def of(rollout: float, **others: float) -> Plan:
        seconds = {"rollout": rollout, **others}
        return replace(plan, times=tuple(StageTime(*each, "") for each in seconds.items()), step_seconds=20.0)

    changed = gains(of(11.7, update=3.0), of(12.0, offload=2.04, update=14.6))
    assert [*changed] == ["beside the file's own: update -12 s, offload -2 s, rollout -0.3 s"]


def test_of_layouts_as_fast_the_simplest_is_first_and_the_others_are_compared() -> None:
    """A driver that takes most of a step puts all layouts within 5 %: then the one of fewer stages comes first."""
    file = EXAMPLES / "qwen2.5-32b-casp" / "run.yaml"
    request = ask(load_run(file), str(file), Options(nodes=4, gpu="h100")).request
    found = suggest(replace(request, rates=replace(request.rates, driver_s=1e5)))
    assert [(one.keys["policy.cp"], one.keys["policy.pp"]) for one in found] == [(1, 1), (1, 1), (1, 2)]
    first, *others = (one.plan.step_seconds or 0.0 for one in found)
    for seconds, one in zip(others, found[1:], strict=True):
        assert one.reasons[0].endswith(f"{'less' if seconds < first else 'more'} than the first")


@each_case(("response", "recompute"), [(8192, "none"), (34_000, "selective")])
def test_a_suggestion_chooses_recompute_and_head_and_says_what_others_cost(
    tmp_path: Path, response: int, recompute: str
) -> None:
    """One node has no room for all activations of a long response; learners fill no GPU to the brim."""
    override = f"data.max_response_tokens={response}"
    (first,) = suggest(asked(tmp_path, "qwen3-32b", override, options=Options(nodes=1)).request, 1)
    costs = {(one.recompute, one.head): one for one in first.alternatives}
    assert len(costs) == 6
    chosen = costs[recompute, "logits"]
    assert (first.keys["policy.recompute"], first.keys["policy.head"]) == (recompute, "logits")
    assert chosen.fits and chosen.seconds == first.plan.step_seconds
    assert chosen.learning <= 0.9 * (first.plan.gpu_memory or 0)
    for (setting, head), one in costs.items():
        assert one.seconds is not None
        if head == "chunked":
            whole = costs[setting, "logits"]
            assert one.learning < whole.learning and one.seconds > (whole.seconds or 0.0)
    seconds = [costs[setting, "logits"].seconds or 0.0 for setting in ("none", "selective", "full")]
    assert seconds == sorted(seconds)
    faster = [one for one in costs.values() if (one.seconds or 0.0) < (chosen.seconds or 0.0)]
    assert not any(one.fits for one in faster)
    text = suggestions_text([first], first.plan)
    assert text.count("chosen") == 1 and ("does not fit" in text) == any(not one.fits for one in costs.values())


def test_rollouts_in_the_process_leave_the_step_open(tmp_path: Path) -> None:
    question = asked_in_process(tmp_path, "qwen3-32b", options=Options(gpu="h200"))
    plan = make_plan(question.request)
    assert plan.step_seconds is None and plan.tokens_per_second_per_gpu is None
    assert "rollouts by the engine in this process are not predicted" in plan_text(question.request, plan, ())
    with pytest.raises(UserError, match=r"set rollout.engine=sglang"):
        suggest(question.request)


def test_the_disk_of_a_long_run_is_counted_by_retention(tmp_path: Path) -> None:
    """512 responses of 8,192 tokens and 5,000 steps: the defaults keep the order of 10 GB of responses, not of 50."""
    long = ("steps=5000", "data.prompts_per_step=32", "data.responses_per_prompt=16", "data.max_response_tokens=8192")
    options = Options(gpu="h200", response=8192)

    def of(*overrides: str) -> Plan:
        return make_plan(asked(tmp_path, "qwen3-32b", *long, *overrides, options=options).request)

    plan = of()
    assert plan.disk.rollouts == 1400 * (8_000 + 51_200 + 2 * 512 * 8192) and 5e9 < plan.disk.rollouts < 15e9
    # A group of 16 x 8,192 tokens is more than log.rollouts.tokens.
    assert plan.disk.rollout_tokens == 0
    assert plan.disk.checkpoints == 4 * plan.checkpoint.size
    assert plan.disk.metrics + plan.disk.tensorboard == 5000 * 7_000
    whole = of("log.rollouts.keep_last=null").disk
    assert whole.rollouts * 1400 == plan.disk.rollouts * 5000
    apart = of("log.rollouts={tokens: 300000, tokens_keep_last: 50}").disk
    assert apart.rollout_tokens == 50 * (2_000 + 5 * 2 * 16 * 8192)
    assert of("log.rollouts=null", "log.tensorboard=false").disk.total == plan.disk.checkpoints + plan.disk.metrics
    kept = of("checkpoint={every: 100, keep_last: 2, keep_every: 1000, keep_best: eval/dev/pass@1}").disk
    # Steps 1,000 to 5,000 by thousands, the two newest, the best and the one being written.
    assert kept.checkpoints == 8 * plan.checkpoint.size
    exported = of("checkpoint.export_hf=true").disk.checkpoints - plan.disk.checkpoints
    assert exported == 4 * 2 * sum(plan.parameters.values())
    # Before the first step, after each hundredth and so after the last: 51 times 4 samples and a greedy one.
    evaluated = ("eval={suites: [dev], every: 100, n: 4, k: [1], max_response_tokens: 1000}",)
    request = asked(tmp_path, "qwen3-32b", *long, *evaluated, options=options).request
    assert request.kept.samples == 51 * 5 * (100 + 1.5 * 1000) and request.kept.samples_bound == 2 << 30
    text = plan_text(request, plan, ())
    said = " ".join(text.split())
    assert "at most 408.0 kB of samples for each problem that is evaluated, texts up to 2.1 GB" in said
    text = plan_text(asked(tmp_path, "qwen3-32b", *long, options=options).request, plan, ())
    assert "after 5,000 steps" in text and "of responses, of 1,400 steps (log.rollouts)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


@each_case("overrides", ["data.max_response_tokens=40000", "cluster.nodes=1"])
def test_nothing_is_suggested_where_nothing_works(tmp_path: Path, overrides: str) -> None:
    """Too long for the model's positions; too large for 24 GiB."""
    gpu = "h200" if "data" in overrides else "24576"
    with pytest.raises(UserError, match="--suggest found no layout that fits"):
        suggest(asked(tmp_path, "qwen3-32b", overrides, options=Options(gpu=gpu)).request)


@each_case(
    ("override", "told"),
    [
        ("policy.fp8=hybrid", "set model.dtype=bfloat16"),
        ("policy.transformer_engine=true", "policy.transformer_engine=true needs a GPU"),
        ("policy.fp8_recipe=tensorwise", "policy.fp8_recipe has no effect"),
        ("policy.recompute_modules=[core_attn,mlp]", "policy.recompute_modules has no effect"),
        ("policy.offload=[optimizer]", "policy.offload is for engines of their own"),
    ],
)
def test_what_training_refuses_is_not_planned(override: str, told: str) -> None:
    file = EXAMPLES / "quickstart" / "run.yaml"
    with pytest.raises(UserError, match=told):
        ask(load_run(file, [override]), str(file), Options())


def test_the_number_of_gpus_names_what_can_be_lowered(tmp_path: Path) -> None:
    told = texts(planned(tmp_path, "qwen3-32b", "policy.cp=64", "policy.dp=1"), "error")
    assert "lower policy.tp, pp or cp" in told
    assert "lower policy.dp" in texts(planned(tmp_path, "qwen3-32b", "policy.dp=64"), "error")


def test_suggestions_need_gpus() -> None:
    file = EXAMPLES / "quickstart" / "run.yaml"
    with pytest.raises(UserError, match="--suggest ranks layouts on GPUs"):
        suggest(ask(load_run(file), str(file), Options()).request)
