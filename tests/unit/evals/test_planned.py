"""Which evaluations a command's suites and groups come to, and the groups that ship."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.evals import groups as planned
from megasharp.evals.groups import PlannedGroup, Settings, complete, group_names, load_group, plan_suites

PAPERS = {
    "casp_math6": (256, 0.6, 0.95, 4096, 6, 256),
    "casp_logic": (128, 0.7, 0.95, 8192, 2, 128),
    "casp_code": (16, 0.7, 0.95, 8192, 2, 16),
    "iac_math6": (8, 0.6, 0.95, 8192, 6, 8),
    "ds_math5": (128, 0.7, 1.0, 2048, 5, 64),
    "ds_base_vs_rl": (8192, 0.7, 1.0, 2048, 3, 8192),
    "ds_countdown": (64, 1.0, 0.7, 8192, 2, 64),
    "ds_knights": (8, 1.0, 0.7, 2048, 1, 8),
    "two_stage_id_ood": (256, 0.6, 0.95, 3072, 6, 256),
}


@each_case(("name", "wanted"), PAPERS.items())
def test_groups_have_their_papers_settings(name: str, wanted: tuple[int, float, float, int, int, int]) -> None:
    group = load_group(name)
    assert group is not None
    sampling = complete(group.settings)
    found = (sampling.n, sampling.temperature, sampling.top_p, sampling.max_tokens)
    assert (*found, len(group.members), max(sampling.ks)) == wanted


def test_every_group_of_the_papers_ships_and_names_what_is_ours() -> None:
    assert set(PAPERS) <= set(group_names())
    two_stage = load_group("two_stage_id_ood")
    assert two_stage is not None
    out_of_domain = {member.suite: (member.limit, member.repeats) for member in two_stage.members if member.limit}
    assert out_of_domain == {"arc_c": (128, 3), "mmlu_pro": (128, 3)}
    assert {member.prompt for member in two_stage.members} == {"boxed_chatml"}
    countdown = load_group("ds_countdown")
    assert countdown is not None and countdown.settings.top_k == 50
    casp = load_group("casp_math6")
    assert casp is not None
    assert {member.suite for member in casp.members if member.n == 300} == {"aime24", "aime25", "amc23"}


def test_a_suite_in_a_folder_of_this_name_is_no_group(tmp_path: Path) -> None:
    own = tmp_path / "suites" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("task: countdown\npath: mine.jsonl\n")
    assert load_group(str(own)) is None
    own.write_text("source: mine\nsettings: {n: 4}\nsuites: [countdown_test]\n")
    assert load_group(str(own)) is not None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two suites of twenty problems and a group of both."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        lines = (json.dumps({"id": f"{name}-{i}", "numbers": [1, 2], "target": 3}) for i in range(20))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        folder = tmp_path / "configs" / "task"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(f"task: countdown\npath: {name}.jsonl\n")
    group = tmp_path / "configs" / "suites"
    group.mkdir()
    (group / "both.yaml").write_text(
        'source: a paper, Table 1\nsettings: {n: 32, k: "1,2,4,...,32", temperature: 0.6, max_tokens: 8}\n'
        "ours: [max_tokens]\nsuites:\n  - {suite: one, n: 40}\n  - {suite: two, limit: 5, limit_seed: 3, repeats: 3}\n"
    )
    return tmp_path


def only(planned: list[PlannedGroup]) -> PlannedGroup:
    (group,) = planned
    return group


def test_a_group_is_its_members_with_its_settings(place: Path) -> None:
    group = only(plan_suites(["both"], Settings(), seed=7))
    assert [(each.suite.name, each.member, each.seed) for each in group.evaluations] == [
        ("one", "one", 7), ("two_repeat1", "two", 7), ("two_repeat2", "two", 8), ("two_repeat3", "two", 9),
    ]  # fmt: skip
    one, two, *others = group.evaluations
    assert (one.sampling.n, two.sampling.n, one.sampling.temperature, one.sampling.max_tokens) == (40, 32, 0.6, 8)
    assert one.sampling.ks == two.sampling.ks == (1, 2, 4, 8, 16, 32)
    assert len(two.suite.items) == 5 and all(each.suite.items == two.suite.items for each in others)
    assert group.ours == ("max_tokens",) and group.name == "both"


def test_what_is_asked_for_counts_before_a_group(place: Path) -> None:
    asked = Settings(n=16, k="1,16", temperature=1.0, top_p=0.9, max_tokens=4)
    group = only(plan_suites(["both"], asked, seed=1))
    for each in group.evaluations:
        assert (each.sampling.n, each.sampling.ks, each.sampling.temperature) == (16, (1, 16), 1.0)
        assert (each.sampling.top_p, each.sampling.max_tokens) == (0.9, 4)
    assert group.ours == ()


def test_fewer_samples_alone_are_refused_where_the_group_asks_for_a_larger_k(place: Path) -> None:
    with pytest.raises(UserError, match=r"16 samples per problem cannot give pass@32; raise --n or lower --k"):
        plan_suites(["both"], Settings(n=16), seed=1)


def test_suites_by_themselves_have_the_defaults(place: Path) -> None:
    one, two = plan_suites(["one", str(place / "configs" / "task" / "two.yaml")], Settings(n=8), seed=1)
    assert one.group is None and two.evaluations[0].suite.name == "two"
    sampling = one.evaluations[0].sampling
    assert (sampling.n, sampling.ks, sampling.temperature) == (8, (1, 4, 8), 1.0)
    assert (sampling.top_p, sampling.max_tokens) == (1.0, 32)


def test_names_that_are_none_or_come_twice_are_one_line(place: Path) -> None:
    with pytest.raises(UserError, match=r"--suite on: no suite or group .*; did you mean one\?; suites: .*two"):
        plan_suites(["on"], Settings(), 1)
    with pytest.raises(UserError, match=r"one is named twice, and both would write one\.json"):
        plan_suites(["one", "both"], Settings(), 1)


@each_case(
    ("text", "message"),
    [
        ("source: p\nsettings: {n: 4, k: '8'}\nsuites: [one]\n", r"n=4 samples cannot give pass@8"),
        ("source: p\nsettings: {}\nsuites: [one, one]\n", "names one twice"),
        ("source: p\nsettings: {}\nsuites: []\n", "suites"),
        ("settings: {}\nsuites: [one]\n", "source: this key is required"),
        ("source: p\nsettings: {n: 4, k: '1,x'}\nsuites: [one]\n", "expected whole numbers"),
    ],
)
def test_a_wrong_group_is_one_line_with_its_file(place: Path, text: str, message: str) -> None:
    file = place / "configs" / "suites" / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        plan_suites(["mine"], Settings(), 1)
    assert "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_drawn_questions_are_fixed_by_their_seed_alone(place: Path) -> None:
    random.seed(1)
    first = only(plan_suites(["both"], Settings(), seed=1)).evaluations[1].suite.items
    random.seed(2)
    assert first == only(plan_suites(["both"], Settings(), seed=5)).evaluations[1].suite.items


def test_the_two_stage_group_on_files_of_the_same_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows by hand stand for each set: one ChatML prompt for all, the same questions in all three repeats."""
    files = Path(__file__).parents[1] / "tasks" / "data" / "files" / "sets"
    shipped = Path(__file__).parents[3] / "configs" / "suites" / "two_stage_id_ood.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "task").mkdir(parents=True)
    for name in ("amc23", "aime24", "aime25", "math500", "arc_c", "mmlu_pro"):
        rows = next(path for path in (files / f"{name}.jsonl", files / name) if path.exists())
        (tmp_path / "configs" / "task" / f"{name}.yaml").write_text(f"set: {name}\npath: {rows}\n")
    own = tmp_path / "two.yaml"
    own.write_text(shipped.read_text().replace("limit: 128", "limit: 4"))
    group = only(plan_suites([str(own)], Settings(), seed=1))
    assert [each.member for each in group.evaluations] == [
        "amc23",
        "aime24",
        "aime25",
        "math500",
        *["arc_c"] * 3,
        *["mmlu_pro"] * 3,
    ]
    for each in group.evaluations:
        for item in each.suite.items:
            assert item.text.startswith(
                "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            )
            assert item.text.endswith(
                "\nPlease reason step by step, and put your final answer within \\boxed{}.\n<|im_end|>\n"
                "<|im_start|>assistant\n"
            )
    arc = [each for each in group.evaluations if each.member == "arc_c"]
    assert all(each.suite.items == arc[0].suite.items and len(each.suite.items) == 4 for each in arc)
    assert [each.seed for each in arc] == [1, 2, 3]
    with pytest.raises(UserError, match=r"limit: 128 of 10 problems .* cannot be drawn"):
        plan_suites([str(shipped)], Settings(), seed=1)


def test_settings_that_do_not_go_together_are_told_before_anything_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(planned, "load_suite", read)
    for name in ("both", "one"):
        with pytest.raises(UserError, match="n"):
            plan_suites([name], Settings(n=2, k="1,2,4"), seed=0)
