"""The rollout table, read back by another library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from megasharp.common.records import FinishReason, Outcome, VersionSpan
from megasharp.metrics.response_table import SCHEMA, TokenColumns, write_rollouts

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
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = page.split("## Every response")[1]
    assert [name for name in SCHEMA.names if f"`{name}`" not in rows] == []


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
    written = table[table.token_texts.notna()]
    assert set(written.group_id) == chosen
    assert written.token_texts.iloc[0].tolist() == ["<0>"] * written.length.iloc[0]
    assert written.token_policy_logp.iloc[0].tolist() == [-1.0, -2.0, -3.0, -4.0][: written.length.iloc[0]]
    assert set(table.prompt) == {"1 2=3:"}


def test_a_limit_below_every_group_writes_none(tmp_path, make_response, make_group):
    columns = TokenColumns(lambda tokens: [""] * len(tokens), limit=1)
    table = table_of(write_rollouts(tmp_path, 3, [make_group(make_response(Outcome.WRONG, 2))], tokens=columns))
    assert table.token_texts.isna().all()


def _of_prompt(group, prompt_id):
    return replace(group, prompt=replace(group.prompt, id=prompt_id))
