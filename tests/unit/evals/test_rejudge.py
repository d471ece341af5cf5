"""Stored samples judged again by real verifiers, without a model: figures, flips, refusals, and the harness's log."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.common.records import FinishReason, Outcome, Verdict
from megasharp.config.core import dump_yaml
from megasharp.config.data import RewardConfig
from megasharp.config.run_config import load_run
from megasharp.evals import rejudge
from megasharp.evals.groups import Settings
from megasharp.evals.rejudge import find_flips, judge_again
from megasharp.evals.result import EvalSetting, summarize
from megasharp.evals.result_files import load_result, save
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.samples import SuiteCounts
from megasharp.evals.stored_samples import SamplesInfo, StoredSample, read_samples
from megasharp.evals.suites import load_suite
from megasharp.tasks.final_answer import AnswerRule
from megasharp.tasks.judge import Item, TaskItem
from megasharp.trainer.evaluation import Asked
from megasharp.trainer.rejudging import export_samples, rejudge_folder
from tests.unit.evals.rule_engine import ANSWER
from tests.unit.evals.stored import sample

PROBLEMS = (("sky", "Which colour has the sky?", "blue"), ("two", "What is 1 + 1?", "2"))
TEXTS = (r"\boxed{blue}", "So the answer is blue.", "no idea"), (r"It is \boxed{2}.", r"\boxed{3}", r"\boxed{2}")
IDENTITY = {"weights": "abc", "seed": "1"}
DRAWN = ((0, False), (1, False), (2, False))


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    return evaluation(tmp_path, "sums", IDENTITY)


def evaluation(tmp_path: Path, name: str, identity: dict[str, str]) -> Path:
    """An evaluation whose verifier read nothing but `\\boxed{2}`, and a response that the engine aborted."""
    (tmp_path / f"{name}.yaml").write_text(f"{{task: short_answer, path: {name}.jsonl}}")
    rows = [{"id": problem, "input": question, "target": target} for problem, question, target in PROBLEMS]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = load_suite(str(tmp_path / f"{name}.yaml"))
    setting = EvalSetting(name, "mine", None, 3, (1, 2), 1.0, 1, max_tokens=64, identity=identity)
    counts = SuiteCounts(suite.items, 3, greedy=False)
    fields = {key: value for key, value in asdict(setting).items() if key not in ("suite", "identity")}
    store = SampleStore(tmp_path / "out", SamplesInfo(name, fields, identity))
    for number, texts in enumerate(TEXTS):
        for index, text in enumerate(texts):
            sample = _first_verdict(number, index, text)
            store.add([sample])
            counts.add(sample)
    save(summarize(counts.rows(), setting, 1.0), tmp_path / "out")
    store.finish()
    return tmp_path / "out"


def _first_verdict(number: int, index: int, text: str) -> StoredSample:
    right = text == r"\boxed{2}"
    outcome = Outcome.INFRA if text == r"\boxed{3}" else Outcome.CORRECT if right else Outcome.WRONG
    finish = FinishReason.ABORT if outcome is Outcome.INFRA else FinishReason.STOP
    seed, name = 10 * number + index, PROBLEMS[number][0]
    return StoredSample(name, number, index, False, seed, text, None, finish, outcome, float(right), None, "", 4)


@dataclass(frozen=True)
class Calls:
    """A judge that remembers the prompts of its calls."""

    asked: list[list[str]] = field(default_factory=list)
    tasks: Sequence[str] = ("countdown",)

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        self.asked.append([item.prompt for item in items])
        return [Verdict(Outcome.CORRECT, 1.0, detail=item.text) for item in items]


def test_a_reward_that_compares_gets_whole_problems_and_greedy_responses_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the evaluation gave them; a judgement's calls were of so many samples, greedy ones among them."""
    monkeypatch.setattr(rejudge, "_AT_ONCE", 6)
    samples = [sample(number, index, greedy) for number in range(3) for index, greedy in ((0, True), *DRAWN)]
    samples[2] = replace(samples[2], finish=FinishReason.ABORT)
    problems = {f"p{number}": TaskItem(f"p{number}", "countdown", str(number), ANSWER, "") for number in range(3)}
    judge = Calls()
    found = [each for some in judge_again(samples, problems, "countdown", judge) for each in some]
    assert judge.asked == [["0", "1"], ["0", "0", "1", "1", "1"], ["2"], ["2"] * 3]
    assert [each.key for each in found] == [each.key for each in samples]
    assert all(each.detail == each.text for each in found if each.finish is not FinishReason.ABORT)


def asked(evaluated: Path, **reward: object) -> Asked:
    suite = str(evaluated.parent / "sums.yaml")
    return Asked(None, [suite], Settings(), reward=RewardConfig(workers=0, **reward))


def test_a_better_verifier_flips_what_it_should(evaluated: Path) -> None:
    """The only test of the whole way back: texts on disk, this release's verifier, and the same counting."""
    lines: list[str] = []
    rejudge_folder(evaluated, asked(evaluated), True, lines.append, lines.append)
    after = load_result(evaluated / "rejudged" / "sums.json")
    assert [(row.correct, row.format, row.infra) for row in after.rows] == [(2, 1, 0), (2, 0, 1)]
    assert "3 of 6 samples flip between correct and not" in lines
    assert "    sky sample 1: wrong (no answer) -> correct 'blue'" in lines
    found = find_flips(evaluated, evaluated / "rejudged", "sums")
    assert [(flip.after.problem, flip.after.index) for flip in found.flips] == [("sky", 0), ("sky", 1), ("two", 0)]
    assert {pair: n for pair, n in found.outcomes.items() if pair[0] is not pair[1]} == {
        (Outcome.WRONG, Outcome.CORRECT): 3,
        (Outcome.WRONG, Outcome.FORMAT): 1,
    }


def judged(folder: Path, asked: Asked, name: str = "sums") -> tuple[str | None, int, list[str]]:
    """The rule by which a folder is judged again, how many responses it finds nothing in, and what is noted."""
    noted: list[str] = []
    rejudge_folder(folder, asked, False, lambda _: None, noted.append)
    result = load_result(folder / "rejudged" / f"{name}.json")
    return result.identity.get("answers"), sum(row.format for row in result.rows), noted


MARKED = AnswerRule("it's", "wrong").in_words
BY_MARK = {"timeout_s": "10", "answers": MARKED}
BY_FUNCTION = {"timeout_s": "10", "reward": "mine:exact x 1"}
AFTER_AUTO = "after 'auto', truncated wrong"
TODAYS = "after 'auto', truncated by_answer"


@pytest.mark.parametrize(
    ("first", "flags", "rule", "without", "notes"),
    [
        (BY_MARK, {}, MARKED, 5, []),
        (BY_MARK, {"answer_after": "auto"}, AFTER_AUTO, 1, [f"responses are read {AFTER_AUTO}; at first {MARKED}"]),
        ({"timeout_s": "10"}, {}, None, 1, []),
        (IDENTITY, {}, TODAYS, 1, []),
        (BY_FUNCTION, {}, TODAYS, 1, ["judged by the task's verifier, at first by mine:exact x 1"]),
    ],
)
def test_responses_are_read_as_they_were_first(
    tmp_path: Path, first: dict[str, str], flags: dict[str, str], rule: str | None, without: int, notes: list[str]
) -> None:
    """By the stored rule, of which options change a part; whole where none is stored beside a limit on time."""
    folder = evaluation(tmp_path, "sums", first)
    assert judged(folder, asked(folder, **flags)) == (rule, without, [f"sums: {note}" for note in notes])


def test_a_run_s_evaluations_are_read_by_its_rule(tmp_path: Path) -> None:
    evaluation(tmp_path, "sums", IDENTITY)
    run, folder = tmp_path / "run", tmp_path / "run" / "evals" / "step_000003"
    folder.parent.mkdir(parents=True)
    (tmp_path / "out").rename(folder)
    config = load_run(Path(__file__).parents[3] / "examples" / "quickstart" / "run.yaml", ["reward.answer_after=so"])
    (run / "config.yaml").write_text(dump_yaml(config))
    again = Asked(None, [str(tmp_path / "sums.yaml")], Settings(), reward=RewardConfig(workers=0))
    assert judged(folder, again) == ("after 'so', truncated by_answer", 5, [])
    read = replace(again, out=tmp_path / "other", reward=RewardConfig(workers=0, answer_after=""))
    noted: list[str] = []
    rejudge_folder(folder, read, False, lambda _: None, noted.append)
    assert noted == ["sums: responses are read after '', truncated by_answer; at first after 'so', truncated by_answer"]


def test_each_suite_of_a_folder_is_read_by_its_own_rule(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, "sums", BY_MARK)
    evaluation(tmp_path, "other", {"timeout_s": "10"})
    both = replace(asked(folder), suites=[str(tmp_path / name) for name in ("sums.yaml", "other.yaml")])
    assert judged(folder, both) == (MARKED, 5, [])
    assert load_result(folder / "rejudged" / "other.json").identity.get("answers") is None


def test_own_rows_name_the_functions_that_judged_them(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, "sums", BY_FUNCTION)
    (tmp_path / "sums.yaml").write_text("{path: sums.jsonl, prompt_key: input, answer_key: target}")
    with pytest.raises(
        UserError, match="sums was judged by mine:exact x 1; give its functions again, each by --reward"
    ):
        judged(folder, asked(folder))


def test_a_second_judgement_has_a_folder_of_its_own_and_changes_nothing(evaluated: Path) -> None:
    lines: list[str] = []
    rejudge_folder(evaluated, asked(evaluated), False, lines.append, lines.append)
    rejudge_folder(evaluated, asked(evaluated), False, lines.append, lines.append)
    one, other = (load_result(evaluated / name / "sums.json") for name in ("rejudged", "rejudged_2"))
    assert replace(one, seconds=0.0) == replace(other, seconds=0.0)
    assert all(sample.text is None for sample in read_samples(evaluated / "rejudged", "sums"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: (path / "sums.jsonl").write_text('{"id": "x", "input": "?", "target": "1"}'),
            "does not have it now",
        ),
        (lambda path: [each.unlink() for each in (path / "out" / "samples").iterdir()], "no samples here"),
        (lambda path: (path / "out" / "sums.json").unlink(), "was cut off before its result"),
    ],
)
def test_what_cannot_be_judged_again_is_refused(evaluated: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(evaluated.parent)
    with pytest.raises(UserError, match=message):
        rejudge_folder(evaluated, asked(evaluated), False, lambda _: None, lambda _: None)
    assert not (evaluated / "rejudged").exists()


def test_judgements_do_not_mix_and_take_the_ks_of_the_result_and_the_command(evaluated: Path) -> None:
    """One that was cut off begins anew in its folder; one that is there is not written over."""
    again = replace(asked(evaluated), out=evaluated / "mine", settings=Settings(k="3"))
    left = SamplesInfo("sums", {}, load_result(evaluated / "sums.json").identity)
    SampleStore(evaluated / "mine", left).add([_first_verdict(0, 0, "left by a kill")])
    with pytest.raises(UserError, match="of another evaluation"):
        rejudge_folder(evaluated, again, False, lambda _: None, lambda _: None)
    again = replace(again, out=evaluated / "other")
    rejudge_folder(evaluated, again, False, lambda _: None, lambda _: None)
    assert load_result(evaluated / "other" / "sums.json").ks == (1, 2, 3)
    with pytest.raises(UserError, match="results of sums are there already"):
        rejudge_folder(evaluated, again, False, lambda _: None, lambda _: None)
    with pytest.raises(UserError, match="cannot give pass@4"):
        rejudge_folder(
            evaluated, replace(asked(evaluated), settings=Settings(k="4")), False, lambda _: None, lambda _: None
        )


def test_samples_without_texts_are_refused(evaluated: Path) -> None:
    """Before one is judged, or anything is written; an aborted one needs no text."""
    samples = [*read_samples(evaluated, "sums")]
    store = SampleStore(evaluated, SamplesInfo("sums", {}, IDENTITY))
    store.remove()
    store.add([replace(each, text=None if each.problem == "two" else each.text) for each in samples])
    store.finish()
    with pytest.raises(UserError, match=r"the texts of 2 of 6 samples of sums were not kept; .* --keep-mb"):
        rejudge_folder(evaluated, asked(evaluated), False, lambda _: None, lambda _: None)
    assert not (evaluated / "rejudged").exists()


def test_a_folder_of_several_temperatures_names_theirs(evaluated: Path) -> None:
    (evaluated.parent / "sweep").mkdir()
    for name in ("temperature_1", "temperature_0.6"):
        (evaluated.parent / "sweep" / name).symlink_to(evaluated)
    with pytest.raises(UserError, match=r"no samples here, but in its folders temperature_0\.6, temperature_1;"):
        rejudge_folder(evaluated.parent / "sweep", asked(evaluated), False, lambda _: None, lambda _: None)


def test_a_run_names_its_evaluations(evaluated: Path) -> None:
    run = evaluated.parent / "run"
    (run / "evals").mkdir(parents=True)
    (run / "evals" / "step_000003").symlink_to(evaluated)
    with pytest.raises(UserError, match="no samples here, but in its folders evals/step_000003; give one of them"):
        rejudge_folder(run, asked(evaluated), False, lambda _: None, lambda _: None)


def test_a_judgement_is_not_judged_again(evaluated: Path) -> None:
    rejudge_folder(evaluated, asked(evaluated), False, lambda _: None, lambda _: None)
    with pytest.raises(UserError, match="a judgement of samples, which keeps no texts"):
        rejudge_folder(evaluated / "rejudged", asked(evaluated), False, lambda _: None, lambda _: None)


def test_the_log_has_the_harnesss_keys_and_all_responses(evaluated: Path) -> None:
    """Keys as lm-evaluation-harness 0.4.13 writes them; its own `datasets` reader must find one type a column."""
    export_samples(evaluated, asked(evaluated), lambda _: None)
    (path,) = evaluated.glob("samples_sums_*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(records[0])[:12] == [
        *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
        *("doc_hash", "prompt_hash", "target_hash", "acc"),
    ]
    assert [record["resps"] for record in records] == [[list(texts)] for texts in TEXTS]
    assert [record["target"] for record in records] == ["blue", "2"]
    assert records[1]["acc"] == pytest.approx(1 / 3) and records[1]["finish"] == ["stop", "abort", "stop"]
