"""Resuming with another configuration, and into folders that are not runs."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml
from cases import each_case

from megasharp.checkpoint.attempts import AttemptLog
from megasharp.checkpoint.manifest import Inputs
from megasharp.checkpoint.run_folder import RunFolder
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml, parse_yaml
from megasharp.config.run_config import RunConfig, load_run, run_tree
from megasharp.convert.architecture import record_arguments
from megasharp.convert.hf_folder import read_config
from megasharp.ops.attention_kernels import Kernels
from megasharp.trainer.assembly import tell_attention
from megasharp.trainer.factories import Learners, learner_settings
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.resume import (
    check_inputs,
    check_recorded,
    check_resume,
    inputs_of,
)
from megasharp.trainer.stored_config import resumed_config
from tests.unit.saving import save_at_once

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = REPOSITORY / "examples" / "quickstart" / "base"


def _config(*overrides: str) -> RunConfig:
    return load_run(REPOSITORY / "examples" / "quickstart" / "run.yaml", overrides)


def _stored(folder: Path, *overrides: str) -> Path:
    (folder / "config.yaml").write_text(dump_yaml(_config(*overrides)))
    return folder


def test_the_same_configuration_resumes_without_a_word(tmp_path: Path) -> None:
    assert check_resume(_stored(tmp_path), _config()) == []


def test_a_key_that_is_younger_than_the_run_had_its_default(tmp_path: Path) -> None:
    """A run of before there were stages goes on without a word; with stages it would be another run."""
    path = _stored(tmp_path) / "config.yaml"
    tree = parse_yaml(path.read_text(), "stored")
    del tree["data"]["stages"], tree["eval"]["max_response_tokens"]
    path.write_text(yaml.safe_dump(tree))
    assert check_resume(tmp_path, _config()) == []
    with pytest.raises(UserError, match=r"data\.stages was \[\] .* which is another run"):
        check_resume(tmp_path, _config("data.stages=[{until: 3, max_response_tokens: 8}]"))


def test_a_key_of_the_first_versions_that_did_nothing_is_left_out(tmp_path: Path) -> None:
    """Runs until fc02a83 (2026-11-21) stored `recipe.dlc.memory.tp`, before there was DLC."""
    path = _stored(tmp_path, "recipe.dlc.memory.path=memory") / "config.yaml"
    tree = parse_yaml(path.read_text(), "stored")
    tree["recipe"]["dlc"]["memory"]["tp"] = 1
    path.write_text(yaml.safe_dump(tree))
    assert check_resume(tmp_path, load_run(path)) == []


def _resumed(root: Path, *overrides: str) -> tuple[RunConfig, list[str]]:
    said: list[str] = []
    tree = run_tree(REPOSITORY / "examples" / "quickstart" / "run.yaml", overrides)
    return resumed_config(root, tree, "run.yaml", said.append), said


def _edited(folder: Path, *overrides: str, without: Sequence[str] = (), **changed: object) -> Path:
    """A run's folder whose stored configuration lacks some keys, as an older release wrote it, or has others."""
    tree = parse_yaml(dump_yaml(_config(*overrides)), "stored")
    for key in without:
        section, _, name = key.rpartition(".")
        table = tree
        for part in section.split("."):
            table = table[part]
        del table[name]
    for section, values in changed.items():
        tree[section] |= values
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def _goes_on(root: Path, *overrides: str) -> RunConfig:
    """The configuration of a resume, which names no change, this time and the next."""
    config, said = _resumed(root, *overrides)
    assert len(said) == 1 and check_resume(root, config) == []
    (root / "config.yaml").write_text(dump_yaml(config))
    again, _ = _resumed(root, *overrides)
    assert again == config and check_resume(root, again) == []
    return config


def test_a_key_that_the_user_does_not_set_keeps_the_runs_value(tmp_path: Path) -> None:
    root = _stored(tmp_path, "guard.spike_sigma=9", "rollout.top_p=0.9", "eval.n=128", "policy.lora={rank: 4}")
    config, (told,) = _resumed(root, "eval.n=256")
    assert (config.guard.spike_sigma, config.rollout.top_p, config.policy.lora.rank) == (9.0, 0.9, 4)
    assert "guard.spike_sigma 9.0" in told and "rollout.top_p 0.9" in told and "eval.n" not in told
    assert check_resume(root, config) == ["changed since the last attempt: eval.n: 128 -> 256"]
    with pytest.raises(UserError, match=r"rollout.top_p was 0.9 and is now 1.0"):
        check_resume(root, _resumed(root, "rollout.top_p=1")[0])
    assert _resumed(tmp_path / "new") == (_config(), [])


def test_a_run_that_kept_all_tables_goes_on_so_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    """Its stored file says rollouts: true: no newer default removes what is there."""
    root = _edited(tmp_path, log={"rollouts": True, "rollout_tokens": 65536})
    assert check_resume(root, load_run(root / "config.yaml")) == []
    chosen, _ = _resumed(root, "log.rollouts.keep_last=1000")
    assert check_resume(root, chosen) == [
        "changed since the last attempt: log.rollouts.keep_last: None -> 1000 (the tables that are there are kept or "
        "removed by it too)"
    ]
    assert _goes_on(root).log.rollouts.keep_last is None


def test_a_run_that_oversampled_on_policy_before_there_was_a_key_goes_on(tmp_path: Path) -> None:
    biased = ("rollout.engine=sglang", "rollout.oversample=0.25")
    root = _edited(tmp_path, *biased, without=["rollout.allow_length_bias"])
    assert _goes_on(root, *biased).rollout.allow_length_bias
    refused, _ = _resumed(root, *biased, "rollout.allow_length_bias=false")
    assert not refused.rollout.allow_length_bias


def test_a_run_from_before_the_rule_of_answers_goes_on_reading_whole_responses(tmp_path: Path) -> None:
    keys = ["reward.answer_after", "reward.truncated"]
    root = _edited(tmp_path, without=keys)
    reward = _goes_on(root).reward
    assert (reward.answer_after, reward.truncated) == ("", "as_whole")
    with pytest.raises(UserError, match=r"reward\.truncated was 'as_whole' and is now 'wrong'"):
        check_resume(root, _resumed(root, "reward.truncated=wrong")[0])


# The small file, which is read faster.
DLC = ("recipe.methods=[grpo,dlc]", "data.path=examples/quickstart/data/dev.jsonl")


def _before_schedules(folder: Path, *overrides: str) -> Path:
    """The stored configuration of a run with a memory network from before 2026-11-25."""
    resolved = check(_config(*DLC, "recipe.dlc.memory.lr=null", *overrides), "run.yaml")
    tree = parse_yaml(dump_yaml(resolved.config), "stored")
    tree["recipe"]["dlc"]["memory"] = {"path": tree["recipe"]["dlc"]["memory"]["path"], "lr": None}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def test_a_memory_network_goes_on_by_the_schedule_of_the_policy_where_it_began_so(tmp_path: Path) -> None:
    """The quickstart's policy has a warm-up of 10 steps and a linear decay: by its stored file and by the user's."""
    root, policy = _before_schedules(tmp_path), _config().policy.optimizer
    stored = resumed_config(root, run_tree(root / "config.yaml"), "config.yaml", lambda line: None)
    for config in (stored, _goes_on(root, *DLC)):
        kept = check(config, "run.yaml")
        assert kept.memory is not None and learner_settings(kept)["memory"].policy.optimizer == policy
        assert check_resume(root, kept.config) == []


def test_a_memory_networks_schedule_that_is_set_is_another_run(tmp_path: Path) -> None:
    root = _before_schedules(tmp_path)
    config, _ = _resumed(root, *DLC, "recipe.dlc.memory.lr=3x", "recipe.dlc.memory.warmup_steps=4")
    changed = r"memory\.lr was None and is now '3x'; recipe\.dlc\.memory\.warmup_steps was 10 and is now 4"
    with pytest.raises(UserError, match=changed):
        check_resume(root, config)


def test_a_run_begun_before_corrections_were_added_keeps_what_it_trained_with(tmp_path: Path) -> None:
    """Without the key nothing was added beside dlc, and what was named was against the sampler."""
    # A memory network with a schedule of its own is newer than the key that older runs lack for it.
    own = "recipe.dlc.memory.warmup_steps=3"
    stale = ("rollout.engine=sglang", "rollout.max_staleness=1", "recipe.truncated_is.high=3", own)
    for methods, key in (("[grpo,dlc]", "correction"), ("[grpo,dlc,truncated_is]", "against")):
        given = (*stale, f"recipe.methods={methods}")
        root = _edited(tmp_path / key, *given, without=["recipe.correction"])
        goes_on = _goes_on(root, *given)
        assert goes_on.recipe.correction == "none"
        assert goes_on.recipe.params()["truncated_is"].against == ("sampler" if key == "against" else None)
    chosen, _ = _resumed(root, *given, "recipe.correction=auto", "recipe.truncated_is.against=policy")
    with pytest.raises(UserError, match=r"recipe.correction was 'none' and is now 'auto'; recipe.truncated_is.against"):
        check_resume(root, chosen)


def test_a_run_that_does_not_exist_yet_begins(tmp_path: Path) -> None:
    assert check_resume(tmp_path / "new", _config()) == []


def test_a_folder_in_which_a_job_has_only_logs_is_a_run_that_does_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "logs" / "slurm_7" / "restart_0").mkdir(parents=True)
    assert check_resume(tmp_path, _config()) == []


def test_harmless_changes_are_named(tmp_path: Path) -> None:
    lines = check_resume(_stored(tmp_path), _config("steps=300", "policy.tp=2", "policy.attention=fa2"))
    assert lines == [
        "changed since the last attempt: policy.attention: 'auto' -> 'fa2' (kernels round differently: curves go on, "
        "bits are not reproduced)",
        "changed since the last attempt: policy.tp: 1 -> 2",
        "changed since the last attempt: steps: 200 -> 300 (the linear decay of the learning rate ends there)",
    ]


@each_case(
    "override",
    [
        "seed=7",
        "model.path=elsewhere",
        "data.prompts_per_step=4",
        "recipe.methods=[grpo,kl]",
        "rollout.temperature=0.7",
        "policy.optimizer.lr=0.5",
    ],
)
def test_another_experiment_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="another run") as refused:
        check_resume(_stored(tmp_path), _config(override))
    assert override.split("=")[0] in str(refused.value)


def test_every_refused_key_is_named_with_the_way_to_allow_it(tmp_path: Path) -> None:
    before, other = _stored(tmp_path), _config("seed=7", "policy.optimizer.lr=0.5", "steps=9")
    lr = _config().policy.optimizer.lr
    with pytest.raises(
        UserError,
        match=rf"policy\.optimizer\.lr was {lr} and is now 0\.5; seed was 1 and is now 7, .* say --allow-change KEY$",
    ):
        check_resume(before, other)
    with pytest.raises(UserError, match=r"policy\.optimizer\.lr was [^;]*, which is another run"):
        check_resume(before, other, ["seed"])
    assert check_resume(before, other, ["seed", "policy.optimizer"]) == [
        f"changed since the last attempt: policy.optimizer.lr: {lr} -> 0.5",
        "changed since the last attempt: seed: 1 -> 7",
        "changed since the last attempt: steps: 200 -> 9 (the linear decay of the learning rate ends there)",
    ]
    with pytest.raises(UserError, match="--allow-change sed: no configuration has this key"):
        check_resume(before, other, ["sed"])


def test_where_a_run_is_carried_out_is_not_what_it_is(tmp_path: Path) -> None:
    assert len(check_resume(_stored(tmp_path), _config("rollout.engines=3", "policy.dp=2"))) == 2


def test_a_schedule_that_does_not_end_with_the_run_needs_no_word(tmp_path: Path) -> None:
    constant = "policy.optimizer.decay=constant"
    (line,) = check_resume(_stored(tmp_path, constant), _config(constant, "steps=300"))
    assert line.endswith("steps: 200 -> 300")


@each_case("override", ["rank=4", "alpha=8.0", "targets=[qkv]"])
def test_other_adapters_are_another_run(tmp_path: Path, override: str) -> None:
    before = _stored(tmp_path, "policy.lora.rank=8")
    assert check_resume(before, _config("policy.lora.rank=8")) == []
    with pytest.raises(UserError, match=f"policy.lora.{override.split('=')[0]} was .* which is another run"):
        check_resume(before, _config("policy.lora.rank=8", f"policy.lora.{override}"))
    with pytest.raises(UserError, match=r"policy\.lora.* which is another run"):
        check_resume(before, _config())


def test_a_folder_that_is_no_run_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not a run folder"):
        check_resume(tmp_path, _config())
    assert (tmp_path / "thesis.txt").exists()


def _checkpoint(folder: Path, norm_eps: str = "1e-06") -> Path:
    """What a checkpoint keeps of its model beside the weights, as older versions wrote it."""
    (folder / "hf").mkdir(parents=True)
    text = (BASE / "config.json").read_text()
    (folder / "hf" / "config.json").write_text(text.replace("1e-06", norm_eps))
    return folder


def test_recorded_arguments_are_compared_without_a_word(tmp_path: Path) -> None:
    arch = read_config(BASE)[2]
    checkpoint = _checkpoint(tmp_path / "step")
    record_arguments(checkpoint, arch)
    assert check_recorded(checkpoint, checkpoint / "policy", BASE, arch) == []


def test_without_a_record_the_saved_config_is_compared_and_a_line_says_so(tmp_path: Path) -> None:
    arch = read_config(BASE)[2]
    checkpoint = _checkpoint(tmp_path / "step")
    weights, saved = checkpoint / "policy", checkpoint / "hf" / "config.json"
    assert check_recorded(checkpoint, weights, BASE, arch) == [
        f"{weights} has no record of the model's arguments (arguments.json): {BASE / 'config.json'} was compared with "
        f"{saved}, which was saved with it"
    ]
    other = _checkpoint(tmp_path / "other", "1e-05")
    with pytest.raises(UserError, match="rms_norm_eps=1e-06, recorded 1e-05"):
        check_recorded(other, other / "policy", BASE, arch)


def test_weights_with_nothing_beside_them_are_taken_and_a_line_says_so(tmp_path: Path) -> None:
    (line,) = check_recorded(tmp_path, tmp_path, BASE, read_config(BASE)[2])
    assert line == (
        f"{tmp_path} has no record of the model's arguments (arguments.json): {BASE / 'config.json'} could not be "
        "checked against it"
    )


def test_a_step_that_is_past_is_refused_before_the_configuration_is_kept(tmp_path: Path) -> None:
    root = _stored(tmp_path)
    store = CheckpointStore(root / "checkpoints", 9, None)
    save_at_once(store, RunState("base", step=12), lambda folder: None)
    with pytest.raises(UserError, match=r"step 12 is done already; steps=9 is less$"):
        check_resume(root, _config("steps=9"))
    assert check_resume(root, _config("steps=12"))


def test_what_the_run_reads_may_not_be_edited_unseen() -> None:
    resolved = check(_config(), "run.yaml")
    now = inputs_of(resolved)
    assert check_inputs(now, now, resolved, ()) == [] == check_inputs(Inputs(), now, resolved, ())
    base, data = "examples/quickstart/base", "examples/quickstart/data/train.jsonl"
    edited = [
        ("data.path", {"problems": "1"}, f"the problems in {data}"),
        ("model.path", {"weights": "1"}, f"the weights in {base}"),
        ("model.path", {"tokenizer": "1"}, f"the tokenizer and its end tokens in {base}"),
        ("eval.suites", {"suites": {"countdown_test": "1"}}, "the problems of suite countdown_test"),
    ]
    for key, update, what in edited:
        before = now.model_copy(update=update)
        with pytest.raises(UserError, match=rf"^{what}.* are not those that .* say --allow-change {key}$"):
            check_inputs(before, now, resolved, ["steps"])
        (line,) = check_inputs(before, now, resolved, [key])
        assert line.startswith(f"changed since the last attempt: {what}")
    another = now.model_copy(update={"suites": {"a suite that is no longer asked for": "1"}})
    assert check_inputs(another, now, resolved, ()) == []


def test_kernels_of_attention_that_have_changed_are_said(tmp_path: Path) -> None:
    """`auto` may find others on another card, or after an installation."""

    class Policy:
        def attention(self) -> Kernels:
            return Kernels("fa2", "not fa3: it is not here")

    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    (tmp_path / "logs" / "attempt_2").mkdir()
    folder, said = RunFolder(tmp_path, 2, True, StringIO()), list[str]()
    learners = cast("Learners", SimpleNamespace(policy=Policy()))
    with AttemptLog(tmp_path / "logs" / "attempt_1") as first:
        first.attends("fa3")
    with AttemptLog(folder.logs) as second:
        tell_attention(learners, folder, second, said.append)
        assert second.record.attention == "fa2"
    assert said[0] == "attention: FlashAttention-2, torch's own (fa2), not fa3: it is not here"
    assert said[1].startswith("attention was fa3 in the attempt before: ") and len(said) == 2
