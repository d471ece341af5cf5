"""The rollout table, read back by another library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megasharp.common.errors import UserError
from megasharp.common.records import FinishReason, Outcome, VersionSpan
from megasharp.config.log import RolloutTablesConfig
from megasharp.metrics.response_table import (
    TableRetention,
    TokenColumns,
    read_table,
    read_tokens,
    response_schema,
    table_step,
    token_schema,
    write_rollouts,
)

if TYPE_CHECKING:
    from pandas import DataFrame


def table_of(path: Path) -> DataFrame:
    from pandas import read_parquet

    return read_parquet(path)


def test_one_row_per_response(tmp_path, make_response, make_group):
    groups = [
        make_group(
            make_response(Outcome.CORRECT, 3, "1+2", gap=0.25),
            make_response(Outcome.WRONG, 2, finish=FinishReason.LENGTH, text="half \ud83d pair"),
            name="step7-0",
        ),
        make_group(make_response(Outcome.INFRA, 0), name="step7-1", dropped="uniform"),
    ]
    path = write_rollouts(tmp_path, 7, groups, {("step7-0", 1): 0.75})
    assert path == tmp_path / "rollouts" / "step_000007.parquet"
    table = table_of(path)
    assert list(table["group_id"]) == ["step7-0", "step7-0", "step7-1"]
    assert list(table["index"]) == [0, 1, 0]
    assert set(table["step"]) == {7}
    assert set(table["policy_version"]) == {5}
    assert list(table["outcome"]) == ["correct", "wrong", "infra"]
    assert list(table["finish_reason"]) == ["stop", "length", "stop"]
    assert list(table["length"]) == [3, 2, 0]
    assert list(table["text"][:2]) == ["1+2", "half ? pair"]
    assert table["mean_policy_logp"][:2].tolist() == pytest.approx([-2.0, -1.5])
    assert table["mean_sampler_logp"][0] == pytest.approx(-1.75)
    assert table["mean_policy_logp"].isna().tolist() == [False, False, True]
    assert table["mean_memory_logp"].isna().all()
    assert table["mean_entropy"].isna().tolist() == [True, False, True]
    assert table["dropped_reason"].isna().tolist() == [True, True, False]


def test_the_memorys_log_prob_has_a_column(tmp_path, make_response, make_group):
    plain = make_response(Outcome.WRONG, 2)
    beside = replace(plain, completion=replace(plain.completion, memory_logp=torch.tensor([-0.5, -3.0])))
    table = table_of(write_rollouts(tmp_path, 0, [make_group(beside, plain)]))
    assert table["mean_memory_logp"][0] == pytest.approx(-1.75)
    assert table["mean_memory_logp"].isna().tolist() == [False, True]


def test_every_span_names_both_networks_versions(tmp_path, make_response, make_group):
    """The memory network counts for itself, here three behind; what was sampled without it has none of its versions."""
    plain, spans = make_response(Outcome.WRONG, 5), (VersionSpan(6, 0, 2), VersionSpan(7, 2, 5))
    switched = replace(plain, completion=replace(plain.completion, version_spans=spans))
    beside = replace(
        switched, completion=replace(switched.completion, memory_logp=torch.zeros(5), policy_logp=torch.zeros(5))
    )
    empty = make_response(Outcome.INFRA, 0)
    unsampled = replace(empty, completion=replace(empty.completion, version_spans=()))
    path = write_rollouts(tmp_path, 0, [make_group(beside, switched, unsampled)], memory_ahead=-3)
    found = [[dict(span) for span in spans] for spans in table_of(path)["versions"]]
    assert found == [
        [{"start": 0, "end": 2, "policy": 6, "memory": 3}, {"start": 2, "end": 5, "policy": 7, "memory": 4}],
        [{"start": 0, "end": 2, "policy": 6, "memory": None}, {"start": 2, "end": 5, "policy": 7, "memory": None}],
        [],
    ]


def test_the_manual_names_every_column():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = page.split("## Every response")[1]
    assert [name for name in (*response_schema().names, *token_schema().names) if f"`{name}`" not in rows] == []


def test_a_repeated_step_replaces_its_table(tmp_path, make_response, make_group):
    write_rollouts(tmp_path, 1, [make_group(*[make_response(Outcome.WRONG)] * 3)])
    path = write_rollouts(tmp_path, 1, [make_group(make_response(Outcome.WRONG))])
    assert len(table_of(path)) == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_step_without_groups_keeps_the_columns(tmp_path):
    table = table_of(write_rollouts(tmp_path, 2, []))
    assert table.empty
    assert "canonical_answer" in table.columns


def test_whole_groups_are_written_token_by_token_up_to_the_limit(tmp_path, make_response, make_group):
    """The same prompts whatever the order of groups; what does not fit is left out, and what follows may fit."""
    groups = [
        _of_prompt(make_group(*[make_response(Outcome.WRONG, length)] * 2, name=prompt), prompt)
        for prompt, length in (("a", 3), ("b", 4), ("c", 3))
    ]
    columns = TokenColumns(lambda tokens: [f"<{token}>" for token in tokens], limit=13)
    chosen = columns.chosen(groups)
    assert chosen == columns.chosen(groups[::-1])
    assert len(chosen) == 2 or chosen == {"b"}
    table = table_of(write_rollouts(tmp_path, 3, groups, tokens=columns))
    written = table_of(tmp_path / "rollout_tokens" / "step_000003.parquet").merge(table, on=["group_id", "index"])
    assert set(written.group_id) == chosen
    assert written.token_texts.iloc[0].tolist() == ["<0>"] * written.length.iloc[0]
    assert written.token_policy_logp.iloc[0].tolist() == [-1.0, -2.0, -3.0, -4.0][: written.length.iloc[0]]
    assert set(table.prompt) == {"1 2=3:"}


def test_a_limit_below_every_group_writes_none(tmp_path, make_response, make_group):
    columns = TokenColumns(lambda tokens: [""] * len(tokens), limit=1)
    groups = [make_group(make_response(Outcome.WRONG, 2))]
    # Such as an earlier attempt at this step with a higher limit left.
    write_rollouts(tmp_path, 3, groups, tokens=replace(columns, limit=2))
    assert len(read_tokens(tmp_path / "rollouts" / "step_000003.parquet", {"g0"})) == 1
    path = write_rollouts(tmp_path, 3, groups, tokens=columns)
    assert read_tokens(path, {"g0"}) == {}


def test_tokens_are_read_of_the_groups_that_are_asked_for_in_both_formats(tmp_path, make_response, make_group):
    """Format 1 had them among the other columns, null where they were not written, and no number."""
    groups = [make_group(*[make_response(Outcome.WRONG, 2)] * 2, name=name) for name in ("a", "b")]
    columns = TokenColumns(lambda tokens: [f"<{token}>" for token in tokens], limit=99)
    path = write_rollouts(tmp_path, 3, groups, tokens=columns)
    expected = {("b", 0): (["<0>", "<0>"], [-1.0, -2.0]), ("b", 1): (["<0>", "<0>"], [-1.0, -2.0])}
    assert read_tokens(path, {"b"}) == expected
    apart = tmp_path / "rollout_tokens" / path.name
    old = pq.read_table(path)
    for name in ("token_texts", "token_policy_logp"):
        found = pq.read_table(apart)[name].to_pylist()
        old = old.append_column(name, pa.array([*found[:3], None]))
    apart.unlink()
    assert read_tokens(path, {"b"}) == {}
    pq.write_table(old.replace_schema_metadata({}), path)
    assert read_tokens(path, {"b"}) == {("b", 0): expected["b", 0]}


def test_a_table_of_a_newer_format_is_refused_in_one_line_and_one_that_is_gone_is_none(tmp_path):
    path = write_rollouts(tmp_path, 2, [])
    assert pq.read_schema(path).metadata[b"format"] == b"2"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"format": "99"}), path)
    with pytest.raises(UserError, match=r"step_000002\.parquet.* format 99") as refused:
        read_table(path, ["step"])
    assert "\n" not in str(refused.value)
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="cannot read this table of responses"):
        read_table(path, ["step"])
    path.unlink()
    assert read_table(path, ["step"]) is None


def test_retention_keeps_the_newest_tables_and_each_so_many_th_of_the_older(tmp_path, make_response, make_group):
    """Tokens go earlier than responses; nothing else in the folders does, nor what a resume moved elsewhere."""
    groups = [make_group(make_response(Outcome.WRONG, 2))]
    columns = TokenColumns(lambda tokens: [""] * len(tokens), limit=9)
    retention = TableRetention(tmp_path, RolloutTablesConfig(keep_last=4, every=5, tokens_keep_last=2))
    beside = tmp_path / "superseded" / "attempt_1" / "rollouts" / "step_000001.parquet"
    for path in (beside, tmp_path / "rollouts" / "step_by_step.parquet", tmp_path / "rollouts" / "notes.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for step in range(1, 13):
        write_rollouts(tmp_path, step, groups, tokens=columns)
        retention.written(step)
    assert tables_in(tmp_path / "rollouts") == [5, 9, 10, 11, 12]
    assert tables_in(tmp_path / "rollout_tokens") == [11, 12]
    assert beside.exists() and {path.name for path in (tmp_path / "rollouts").iterdir()} >= {
        "step_by_step.parquet", "notes.txt"
    }  # fmt: skip


def test_another_retention_removes_what_is_old_by_it_a_few_tables_a_step(tmp_path):
    """An attempt of a run with many tables must not wait at its first step; what is newer than that is not its own."""
    (tmp_path / "rollouts").mkdir()
    for step in (*range(1, 101), 999):
        (tmp_path / "rollouts" / f"step_{step:06d}.parquet").touch()
    retention = TableRetention(tmp_path, RolloutTablesConfig(keep_last=10, every=None))
    retention.written(100)
    assert retention.removed == TableRetention.MOST
    for step in range(101, 104):
        (tmp_path / "rollouts" / f"step_{step:06d}.parquet").touch()
        retention.written(step)
    assert tables_in(tmp_path / "rollouts") == [*range(94, 104), 999]


def test_without_limits_every_table_stays(tmp_path):
    retention = TableRetention(tmp_path, RolloutTablesConfig(keep_last=None, every=None))
    for step in range(1, 9):
        write_rollouts(tmp_path, step, [])
        retention.written(step)
    assert tables_in(tmp_path / "rollouts") == [*range(1, 9)]


def tables_in(folder):
    return sorted(step for path in folder.iterdir() if (step := table_step(path)) is not None)


def _of_prompt(group, prompt_id):
    return replace(group, prompt=replace(group.prompt, id=prompt_id))
