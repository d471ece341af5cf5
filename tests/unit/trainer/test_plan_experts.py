"""`megasharp plan` of mixtures of experts: parts on a rank, the exchange, engines, replay, problems, suggestions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.run_config import load_run
from megasharp.planner.memory import rows_of
from megasharp.planner.records import Plan, Rates
from megasharp.planner.suggest import make_plan, suggest
from megasharp.planner.text import plan_text, plan_tree
from megasharp.planner.transport import FITTED_S, transport
from megasharp.trainer.plan import Options, ask, ray_store_bytes
from tests.unit.trainer.plans import REPOSITORY, asked, planned, texts, write_run

PIECE = "qwen3-30b-a3b"
# Of one layer: an expert, all experts, and the rest without router and norms' few.
EXPERTS = 48 * 128 * 3 * 2048 * 768
DENSE = 30_532_122_624 - EXPERTS


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def seconds(plan: Plan) -> dict[str, float]:
    return {time.name: time.seconds or 0.0 for time in plan.times}


@each_case(
    ("keys", "experts", "dense", "shared"),
    [
        ("policy.dp=8 policy.tp=1 policy.ep=8", 8, 1, (8, 1)),
        ("policy.dp=8 policy.tp=1 policy.ep=4", 4, 1, (8, 2)),
        ("policy.dp=4 policy.tp=2 policy.ep=2 policy.etp=2", 4, 2, (4, 2)),
        ("policy.dp=2 policy.tp=2 policy.cp=2 policy.ep=8", 8, 2, (4, 1)),
    ],
)
def test_experts_and_the_rest_are_cut_and_shared_apart(
    tmp_path: Path, keys: str, experts: int, dense: int, shared: tuple[int, int]
) -> None:
    """The optimizer's 12 bytes a parameter: of the dense part over dp x cp, of experts over those with the same."""
    (stage,) = planned(tmp_path, PIECE, *keys.split()).stages
    rest = stage.parameters - EXPERTS // experts
    assert stage.experts == EXPERTS // experts
    # Routers and norms are whole on every rank.
    assert rest == pytest.approx(DENSE / dense, rel=0.01)
    assert stage.weights == 2 * stage.parameters and stage.gradients == 4 * stage.parameters
    expected = 12 * (rest / shared[0] + stage.experts / shared[1])
    assert stage.optimizer == pytest.approx(expected, abs=2)


def test_adapters_leave_experts_frozen(tmp_path: Path) -> None:
    lora = "policy.lora={rank: 16, targets: [qkv, proj]}"
    plan = planned(tmp_path, PIECE, lora)
    assert plan.works
    adapters = 48 * 16 * ((3 * 2048 + (4096 + 2 * 512) // 2) + (4096 // 2 + 2048))
    (stage,) = plan.stages
    assert stage.trained == adapters and stage.optimizer == 12 * adapters // 4
    with pytest.raises(UserError, match=r"policy\.lora\.targets: fc1 is in the experts"):
        planned(tmp_path, PIECE, "policy.lora={rank: 16, targets: [qkv, fc1]}")


@each_case(
    ("recompute", "modules", "passes"),
    [("none", "[mlp]", 2), ("selective", "[mlp]", 3), ("selective", "[core_attn]", 2), ("full", "[mlp]", 3)],
)
def test_tokens_wait_for_the_links_to_their_experts(tmp_path: Path, recompute: str, modules: str, passes: int) -> None:
    """Eight copies of 4 KiB to and fro, 7 / 8 of them to other ranks, at 80 % of 450 GB/s: forward, backward, again."""
    keys = (f"policy.recompute={recompute}", "recipe.methods=[grpo]")
    keys += (f"policy.recompute_modules={modules}",) if recompute == "selective" else ()
    plan = planned(tmp_path, PIECE, *keys)
    moved = 48 * 2 * 8 * 7 / 8 * 4096 * plan.rows / 8
    assert seconds(plan)["experts"] == pytest.approx(passes * moved / (450e9 * 0.8))
    # The old policy's log-probs are one pass more.
    before = planned(tmp_path, PIECE, *keys[:1], *keys[2:], "recipe.mini_batches=2")
    assert seconds(before)["experts"] == pytest.approx((passes + 1) / passes * seconds(plan)["experts"])


def test_beyond_a_node_the_network_is_what_tokens_wait_for(tmp_path: Path) -> None:
    """Of 15 other ranks 8 are on the other node, at 80 % of 50 GB/s."""
    keys = ("cluster.nodes=2", "policy.dp=8", "rollout.engines=4", "policy.ep=16")
    plan = planned(tmp_path, PIECE, *keys)
    moved = 2 * 48 * 2 * 8 * 15 / 16 * 4096 * plan.rows / 16
    assert seconds(plan)["experts"] == pytest.approx(moved * 8 / 15 / (50e9 * 0.8))
    assert "policy.ep x etp = 16 crosses nodes of 8 GPUs" in texts(plan, "warning")
    (time,) = [time for time in plan.times if time.name == "experts"]
    assert time.how.endswith("over NVLink and the network") and time.range is not None
    inside = planned(tmp_path, PIECE, *keys[:3])
    assert seconds(inside)["experts"] < seconds(plan)["experts"] / 4
    assert "crosses nodes" not in texts(inside, "warning")


def test_without_parts_nothing_is_exchanged(tmp_path: Path) -> None:
    alone = planned(tmp_path, PIECE, "policy.ep=1")
    assert "experts" not in seconds(alone) and alone.stages[0].experts == EXPERTS
    dense = planned(tmp_path, "qwen3-8b")
    assert "experts" not in seconds(dense) and dense.stages[0].experts == dense.stages[0].dispatch == 0


def test_experts_products_take_longer_and_say_so(tmp_path: Path) -> None:
    question = asked(tmp_path, PIECE).request
    slow, fast = (replace(question, rates=replace(Rates(), grouped=rate)) for rate in (0.5, 1.0))
    plans = [make_plan(each) for each in (slow, fast)]
    both = [seconds(plan) for plan in plans]
    assert both[0]["update"] > 1.3 * both[1]["update"] and both[0]["rollout"] > both[1]["rollout"]
    assert "products reach 50% of dense ones' rate" in " ".join(plan_text(slow, plans[0], ()).split())


def test_engines_read_few_experts_for_few_responses(tmp_path: Path) -> None:
    """One response at a time reads 8 of 128 experts; memory holds all, whatever ep_size is."""
    few = ["data.prompts_per_step=1", "data.responses_per_prompt=2", "rollout.engines=2"]
    plan = planned(tmp_path, PIECE, *few)
    engine = plan.engine
    assert engine is not None and engine.at_once == 1
    assert engine.weights == 2 * 30_532_122_624 // 4 and engine.experts == 2 * EXPERTS // 4
    parts = planned(tmp_path, PIECE, *few, "rollout.sglang.ep_size=4")
    assert parts.engine == engine and parts.works
    read = (engine.weights - engine.experts * 15 / 16) / (4.8e12 * Rates().bandwidth)
    assert seconds(plan)["rollout"] > 8192 / 4 * read
    assert seconds(plan)["rollout"] < 8192 * engine.weights / (4.8e12 * Rates().bandwidth) + 48 * 8192 * Rates().layer_s


def test_replayed_routes_travel_with_every_token(tmp_path: Path) -> None:
    """384 bytes of each packed token, and in the driver of each response with its prompt; Ray's store has room."""
    plain, replayed = (asked(tmp_path, PIECE, f"policy.experts.replay={on}").request for on in (False, True))
    rows = rows_of(plain)
    before, after = transport(plain, rows), transport(replayed, rows)
    assert before is not None and after is not None
    assert (before.route, before.routes, after.route) == (0, 0, 384)
    assert after.step - before.step == 384 * rows.step
    responses = plain.batch.sequences * (plain.batch.lengths.prompt + plain.batch.lengths.response)
    assert after.routes == pytest.approx(384 * (rows.step + responses), abs=1)
    longest = plain.batch.sequences * (2048 + 8192)
    assert after.store - before.store == pytest.approx(1.25 * 384 * longest, abs=2)
    file = write_run(tmp_path, PIECE)
    assert ray_store_bytes(load_run(file, ["policy.experts.replay=true"])) > 1.25 * 384 * longest
    large = planned(tmp_path, PIECE, "policy.experts.replay=true", "data.prompts_per_step=1024")
    assert seconds(large)["driver"] > Rates().driver_s + 384 * 16 * rows.step / 2e9 - FITTED_S
    shown = " ".join(plan_text(replayed, make_plan(replayed), ()).split())
    assert "384 a token more for its route (policy.experts.replay)" in shown


PROBLEMS = {
    "policy.etp=2 policy.ep=4": ("warning", "policy.ep=8 policy.etp=1 needs as much memory for weights"),
    "rollout.sglang.ep_size=3": ("error", "rollout.sglang.ep_size=3 does not divide rollout.tp=4"),
    "policy.micro_batch_tokens=16384": ("warning", "if a rank's experts get twice as many tokens as others'"),
    "policy.transformer_engine=false": ("warning", "copies the weights of a rank's 16 experts"),
    "cluster.gpus_per_node=6 cluster.nodes=2 policy.ep=4": (
        "warning",
        "policy.ep x etp = 4 does not divide the 6 GPUs",
    ),
}


@each_case("overrides", PROBLEMS)
def test_what_slows_a_mixture_is_told(tmp_path: Path, overrides: str) -> None:
    level, text = PROBLEMS[overrides]
    assert text in texts(planned(tmp_path, PIECE, *overrides.split()), level)
    assert text not in texts(planned(tmp_path, PIECE), level)


def test_an_allgather_that_sends_more_than_an_alltoall_is_told(tmp_path: Path) -> None:
    """To all eight ranks, where a token has two experts."""
    keys = ("policy.dp=1", "policy.tp=8", "policy.ep=8")
    text = "policy.experts.dispatcher=allgather exchanges tokens for"
    for dispatcher, told in (("allgather", True), ("alltoall", False)):
        plan = planned(tmp_path, "mixtral-8x7b-v0.1", *keys, f"policy.experts.dispatcher={dispatcher}")
        assert (text in texts(plan, "warning")) == told


def test_layouts_of_experts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy.ep=16 x policy.etp=1 does not divide dp x tp x cp = 8"):
        asked(tmp_path, PIECE, "policy.ep=16")
    with pytest.raises(UserError, match=r"policy.ep=3 does not divide experts=128"):
        asked(tmp_path, PIECE, "policy.ep=3", "policy.dp=3")
    with pytest.raises(UserError, match=r"policy.ep=8, policy.etp=1: .*qwen3-8b has no experts"):
        asked(tmp_path, "qwen3-8b", "policy.ep=8", "policy.dp=8")
    # Nodes are filled first: two of them have ranks enough.
    request = asked(tmp_path, PIECE, "policy.ep=16", options=Options(nodes=2)).request
    assert (request.split.dp, request.split.ep) == (8, 16)


def test_a_dense_memory_network_has_no_part_in_the_layout_of_experts(tmp_path: Path) -> None:
    memory = ("recipe.methods=[grpo, dlc]", "recipe.dlc={memory: {path: Qwen/Qwen3-1.7B}}")
    plan = planned(tmp_path, PIECE, *memory)
    assert plan.stages[0].memory_parameters == pytest.approx(1_720_574_976 / 2, rel=0.01)


def test_suggestions_cut_experts_and_keep_each_whole(tmp_path: Path) -> None:
    request = asked(tmp_path, PIECE, "policy.ep=4", "policy.etp=2").request
    found = suggest(request)
    assert all(one.keys["policy.etp"] == 1 and one.plan.works for one in found)
    assert any(int(str(one.keys["policy.ep"])) > 1 for one in found)
    for one in found:
        again = planned(tmp_path, PIECE, *(f"{key}={json.dumps(value)}" for key, value in one.keys.items()))
        assert again.step_seconds == pytest.approx(one.plan.step_seconds)
    assert "policy.ep" not in suggest(asked(tmp_path, "qwen3-8b").request, 1)[0].keys


def test_the_plan_shows_experts_and_active_parameters(tmp_path: Path) -> None:
    question = asked(tmp_path, PIECE)
    plan = make_plan(question.request)
    lines = plan_text(question.request, plan, ()).splitlines()
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 100
    assert "30,532,122,624 parameters (3,353,032,704 active)" in text and "x cp 1, ep 8 x etp 1, recompute" in text
    assert "128 a layer, 8 for each token; a rank holds 16 (ep 8 x etp 1), and 0 other rank(s) the same" in text
    assert any(line.startswith("  experts ") and "alltoall over NVLink" in line for line in lines)
    assert any(line.split()[:4] == ["of", "them", "experts'", f"{EXPERTS // 8:,}"] for line in lines)
    tree = json.loads(json.dumps(plan_tree(question.request, plan, (), ())))
    assert tree["experts"]["on_a_rank"] == 16 and tree["policy"]["active_parameters"] == 3_353_032_704
    assert "mixtures of experts: rates are fitted to runs of dense models" in " ".join(tree["notes"])
    dense = asked(tmp_path, "qwen3-8b").request
    assert not {"experts", "active", "etp"} & set(plan_text(dense, make_plan(dense), ()).split())


def test_an_export_costs_all_weights(tmp_path: Path) -> None:
    plan = planned(tmp_path, PIECE, "checkpoint.export_hf=true")
    assert plan.checkpoint.exported == 2 * 30_532_122_624
    assert plan.checkpoint.exporting == plan.checkpoint.exported / Rates().disk
    assert seconds(plan)["sync"] == seconds(planned(tmp_path, PIECE))["sync"] > 2 * 30_532_122_624 / Rates().sync


@each_case("piece", ["qwen3-30b-a3b", "mixtral-8x7b-v0.1"])
def test_shipped_layouts_of_mixtures_fit(tmp_path: Path, piece: str) -> None:
    assert planned(tmp_path, piece).works


def test_the_paper_run_of_a_mixture_is_planned_alone_and_with_a_layout(tmp_path: Path) -> None:
    row = REPOSITORY / "configs" / "algo" / "paper" / "gspo_math_qwen3-30b-a3b-base.yaml"
    alone = ask(load_run(row), str(row), Options()).request
    assert alone.policy.name == "Qwen3-30B-A3B-Base" and alone.policy.architecture.experts is not None
    file = tmp_path / "run.yaml"
    file.write_text(f"name: placed\ninclude: [{REPOSITORY}/configs/model/{PIECE}.yaml, {row}]\n")
    placed = ask(load_run(file), str(file), Options()).request
    assert make_plan(placed).works and placed.policy == alone.policy and placed.split.ep == 8
