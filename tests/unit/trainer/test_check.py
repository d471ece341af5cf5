"""Keys of collection and sampling that cannot be followed are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import apply_overrides, parse_yaml, validate
from megasharp.config.rollout import RolloutConfig
from megasharp.config.run_config import RunConfig, load_run
from megasharp.trainer.resolve.resolved_run import check, check_rollout
from megasharp.trainer.resolve.summary import describe


@each_case("key", [{"oversample": 0.5}, {"max_staleness": 1}, {"stragglers": "keep"}, {"request_limit_s": 5.0}])
def test_the_engine_in_this_process_samples_one_batch_at_a_time(key: dict[str, object]) -> None:
    with pytest.raises(UserError, match=rf"run\.yaml: rollout\.{next(iter(key))} needs engines") as raised:
        check_rollout(RolloutConfig.model_validate(key), "run.yaml")
    assert "\n" not in str(raised.value)
    if "stragglers" not in key:
        check_rollout(RolloutConfig.model_validate({"max_staleness": 1, **key, "engine": "sglang"}), "run.yaml")


def test_on_policy_oversampling_is_asked_for_twice() -> None:
    """It throws away what is slow: the longest answers."""
    biased = {"engine": "sglang", "oversample": 0.25}
    with pytest.raises(UserError, match=r"long responses train too seldom; set rollout\.max_staleness=1.*=true$"):
        check_rollout(RolloutConfig.model_validate(biased), "run.yaml")
    for allowed in ({"max_staleness": 1}, {"allow_length_bias": True}):
        check_rollout(RolloutConfig.model_validate({**biased, **allowed}), "run.yaml")


def test_kept_stragglers_need_staleness() -> None:
    keep = {"engine": "sglang", "stragglers": "keep"}
    with pytest.raises(UserError, match=r"run\.yaml: rollout\.stragglers=keep .* rollout\.max_staleness=0 forbids"):
        check_rollout(RolloutConfig.model_validate(keep), "run.yaml")
    check_rollout(RolloutConfig.model_validate({**keep, "max_staleness": 1}), "run.yaml")


def test_the_defaults_pass() -> None:
    check_rollout(RolloutConfig(), "run.yaml")


@each_case("key", ["max_staleness=1", "oversample=0.5"])
def test_what_depends_on_speed_is_not_deterministic(key: str) -> None:
    minimal = "{name: minimal, steps: 3, model: {path: no/such/folder}, data: {task: countdown}, deterministic: true}"
    keys = ["rollout.engine=sglang", "rollout.allow_length_bias=true", f"rollout.{key}"]
    tree = apply_overrides(parse_yaml(minimal, "minimal"), keys)
    with pytest.raises(
        UserError, match=rf"run\.yaml: deterministic: with rollout\.{key.split('=')[0]} above 0"
    ) as raised:
        check(validate(RunConfig, tree, "minimal"), "run.yaml")
    assert "\n" not in str(raised.value)
    tree["deterministic"] = False
    with pytest.raises(UserError, match="no/such/folder"):
        check(validate(RunConfig, tree, "minimal"), "run.yaml")


@each_case("engine", ["inprocess", "sglang"])
def test_one_token_to_choose_from_is_no_sampling(engine: str) -> None:
    minimal = "{name: minimal, steps: 3, model: {path: no/such/folder}, data: {task: countdown, path: train.jsonl}}"
    tree = apply_overrides(parse_yaml(minimal, "minimal"), [f"rollout={{engine: {engine}, top_k: 1}}"])
    with pytest.raises(UserError, match=r"run\.yaml: rollout\.top_k=1 samples one response again and again"):
        check(validate(RunConfig, tree, "minimal"), "run.yaml")


def test_lengths_beyond_a_models_positions_say_which_keys_to_lower() -> None:
    quickstart = "{name: tiny, steps: 3, model: {path: examples/quickstart/base}, data: "
    quickstart += "{task: countdown, path: examples/quickstart/data/dev.jsonl, max_response_tokens: 64}}"
    config = validate(RunConfig, parse_yaml(quickstart, "tiny"), "tiny")
    with pytest.raises(UserError, match=r"data\.max_prompt_tokens \+ .* = 80 is more than the 64 .*; lower one"):
        check(config, "run.yaml")


def test_a_mini_batch_has_a_group() -> None:
    config = load_run(Path("examples/quickstart/run.yaml"), ["data.prompts_per_step=2", "recipe.mini_batches=3"])
    with pytest.raises(UserError, match=r"run\.yaml: recipe\.mini_batches=3 is more than data\.prompts_per_step=2"):
        check(config, "run.yaml")


_MAZE = "examples/maze/run.yaml"


@each_case(
    ("overrides", "words"),
    [
        (
            ["recipe.methods=[grpo, dlc]", "recipe.dlc.memory.path=examples/maze/base", "recipe.dlc.window=4"],
            r"recipe\.dlc\.window=4 with an environment: .*; leave the window out$",
        ),
        (["reward.function=judge.py:one"], r"judge\.py:one would judge responses of task maze, whose environment"),
    ],
)
def test_what_environments_cannot_be_combined_with_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(load_run(Path(_MAZE), overrides), _MAZE)


def test_the_summary_says_how_many_turns_a_response_has() -> None:
    assert "<= 40 tokens and 10 turns\n" in describe(check(load_run(Path(_MAZE), []), _MAZE))
