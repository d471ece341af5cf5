"""`megasharp eval --rejudge`: the stored samples of an evaluation, judged again without their model.

The problems are read as an evaluation reads them, so that corrected answers count too. The judgement is an evaluation's
folder of its own: results, tables, and samples without their texts, which `--compare` sets beside the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count, groupby
from pathlib import Path
from time import perf_counter
from typing import Any

from megasharp.checkpoint.run_folder import write_like_run
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.common.files import held
from megasharp.common.signals import interruptible
from megasharp.config.run_config import RunConfig
from megasharp.evals.evaluate import WITH_MEMORY
from megasharp.evals.groups import plan_suites, repeated
from megasharp.evals.harness_log import write_log
from megasharp.evals.rejudge import JUDGING, find_flips, judge_again, problem_of
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.result_files import load_result, result_lines, save, suites_of_group
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.samples import SuiteCounts
from megasharp.evals.stored_samples import (
    FOLDER,
    SamplesInfo,
    count_texts_missing,
    read_samples,
    samples_info,
    suites_with_samples,
)
from megasharp.evals.suites import Asking, Suite, parse_ks
from megasharp.reporting.comparison import flip_lines
from megasharp.tasks.environment import plays
from megasharp.tasks.final_answer import WHOLE, AnswerRule, rule_of
from megasharp.tasks.judge import Judge, TaskItem
from megasharp.tasks.own_reward import OWN_TASK
from megasharp.tasks.user_import import look_beside
from megasharp.trainer.eval_source import config_of
from megasharp.trainer.evaluation import Asked, judged_by_functions, judging_identity, read_as
from megasharp.trainer.resolve.prompt_format import asking_of, checked_name
from megasharp.trainer.reward_judge import RewardJudge, check_judging, own_rewards

_FOLDER = "rejudged"


def rejudge_folder(folder: Path, asked: Asked, named: bool, say: Say, note: Say) -> None:
    """Judge all suites of an evaluation's folder again, or those that are asked for, and print results and flips.

    With `named`, every sample that flips has a line. Raises UserError in one line, in particular where texts were not
    kept or a suite cannot be found.
    """
    asked, suites, run = _with_samples(folder, asked)
    numbered = (folder / (f"{_FOLDER}_{number}" if number > 1 else _FOLDER) for number in count(1))
    # Without --out the first of these that no earlier judgement has.
    out = asked.out or next(path for path in numbered if not path.exists())
    chosen = [_judgement(folder, out, name, suite, asked, run) for name, suite in suites.items()]
    for each in chosen:
        each.check()
    check_judging(asked.reward, {each.suite.task for each in chosen}, "eval")
    with interruptible(), held(out, "another megasharp eval writes there; give another --out"):
        write_like_run(out)
        # Suites of one rule share a judge.
        for reward, some in groupby(chosen, key=lambda each: each.asked.reward):
            same = list(some)
            with closing(RewardJudge(reward, {each.suite.task for each in same}, None, note)) as judging:
                for each in same:
                    for line in each.differences():
                        note(f"{each.name}: {line}")
                    for line in result_lines(each.result(judging.judge)):
                        say(line)
                    for line in flip_lines(find_flips(folder, out, each.name), named):
                        say(line)
                    say(f"wrote {out / each.name}.json")


def _with_samples(folder: Path, asked: Asked) -> tuple[Asked, dict[str, Suite], RunConfig | None]:
    """Return the suite of each name that a folder has samples of, of those that are asked for; and the folder's run."""
    there = {name: name.removesuffix(WITH_MEMORY) for name in suites_with_samples(folder)}
    if not there:
        # A run's evaluations are two levels below it.
        found = [*folder.glob(f"*/{FOLDER}"), *folder.glob(f"*/*/{FOLDER}")]
        below = [str(path.parent.relative_to(folder)) for path in sorted(found)]
        if below:
            named = ", ".join([*below[:8], *(["..."] if below[8:] else [])])
            raise UserError(f"{folder}: no samples here, but in its folders {named}; give one of them")
        raise UserError(
            f"{folder}: no samples here; give the folder of an evaluation's results, which has a folder samples unless "
            "it was evaluated with --keep none"
        )
    for name in there:
        info = samples_info(folder, name)
        if info is not None and "judged" in info.identity:
            raise UserError(
                f"{folder}: a judgement of samples, which keeps no texts; give the folder of the evaluation itself"
            )
    run = config_of(folder.resolve().parent.parent)
    asked, suites = _suites(folder, asked, sorted(set(there.values())), run)
    return asked, {name: suites[base] for name, base in there.items() if base in suites}, run


def _suites(folder: Path, asked: Asked, there: list[str], run: RunConfig | None) -> tuple[Asked, dict[str, Suite]]:
    """Load the suites that samples are of, by their names, and give them to functions as an evaluation would."""
    if asked.prompt is not None:
        asking = Asking(checked_name(asked.prompt), first=True)
    else:
        asking = Asking() if run is None else asking_of(run)
    names = list(asked.suites) or _groups(folder, there)
    for near in (*filter(Path.is_file, map(Path, names)), folder):
        look_beside(near)
    planned = plan_suites(names, asked.settings, asked.seed, asking)
    asked, (planned,) = judged_by_functions(asked, [planned], run)
    found = {each.suite.name: each.suite for group in planned for each in group.evaluations}
    if unknown := [name for name in found if name not in there]:
        raise UserError(f"{folder}: no samples of {', '.join(unknown)}; there are samples of {', '.join(there)}")
    return asked, found


def _groups(folder: Path, there: list[str]) -> list[str]:
    """Return the groups that a folder has a table of, and the suites that belong to none of them."""
    groups = {path.stem: suites_of_group(path) for path in sorted(folder.glob("*.json"))}
    members = {name for suites in groups.values() for name in suites}
    others = [name for name in there if name not in members and repeated(name) not in members]
    return [*(name for name, suites in groups.items() if suites), *others]


def _judgement(folder: Path, out: Path, name: str, suite: Suite, asked: Asked, run: RunConfig | None) -> _Judgement:
    """Return what is to be judged, by the rule that read it first where the command says none."""
    info = samples_info(folder, name)
    assert info is not None
    first = _first_rule(info.identity, run)
    if first is not None:
        asked = replace(asked, reward=read_as(first, asked.reward))
    return _Judgement(folder, out, name, suite, asked, info, first)


def _first_rule(identity: Mapping[str, str], run: RunConfig | None) -> AnswerRule | None:
    """Return the rule that samples were read by; None where functions judged them, or nothing says it.

    A run's evaluations do not store its rule, which it cannot change.
    """
    if "answers" in identity:
        return AnswerRule.of_words(identity["answers"])
    if "timeout_s" in identity and "reward" not in identity:
        return WHOLE
    return None if run is None else rule_of(run.reward)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """One suite's samples in `folder`, judged again in `out`. `first` is the rule by which they were read first."""

    folder: Path
    out: Path
    name: str
    suite: Suite
    asked: Asked
    info: SamplesInfo
    first: AnswerRule | None

    def check(self) -> None:
        """Raise UserError where the evaluation was cut off, texts are missing, or `out` has results already."""
        if not (self.folder / f"{self.name}.json").exists():
            raise UserError(
                f"{self.folder}: {self.name} was cut off before its result; let the same megasharp eval finish it first"
            )
        if (self.out / f"{self.name}.json").exists():
            raise UserError(f"{self.out}: results of {self.name} are there already; give another --out")
        if plays(self.suite.items):
            raise UserError(
                f"{self.folder}: {self.name} has an environment, which judges while responses are sampled; evaluate it "
                "again"
            )
        before = load_result(self.folder / f"{self.name}.json")
        self._ks(before)
        by = self.info.identity.get("reward")
        if by and self.suite.task == OWN_TASK and not own_rewards(self.asked.reward):
            raise UserError(
                f"{self.folder}: {self.name} was judged by {by}; give its functions again, each by --reward"
            )
        self._problems(before)
        missing, samples = count_texts_missing(self.folder, self.name)
        if missing:
            raise UserError(
                f"{self.folder}: the texts of {missing:,} of {samples:,} samples of {self.name} were not kept; "
                "evaluate with --keep texts, and with a --keep-mb that all have room in"
            )

    def result(self, judge: Judge) -> EvalResult:
        """Judge, store and count all samples, and write the result."""
        before = load_result(self.folder / f"{self.name}.json")
        setting = self._setting(self._ks(before))
        problems = self._problems(before)
        rows = [problems[row.id] for row in before.rows]
        counts = SuiteCounts(rows, before.n, before.greedy_accuracy is not None)
        told = SamplesInfo(self.name, self.info.setting, setting.identity, "answers")
        # A judgement that was cut off begins anew.
        SampleStore(self.out, told).remove()
        store = SampleStore(self.out, told)
        start = perf_counter()
        for some in judge_again(read_samples(self.folder, self.name), problems, self.suite.task, judge):
            store.add(some)
            for sample in some:
                counts.add(sample)
        result = summarize(counts.rows(), setting, perf_counter() - start)
        save(result, self.out)
        store.finish()
        return result

    def _problems(self, before: EvalResult) -> dict[str, TaskItem]:
        """Return the suite's problems by id. Raises UserError where one that was sampled is not among them."""
        problems = {item.id: item for item in self.suite.items}
        for row in before.rows:
            problem_of(row.id, problems)
        return problems

    def _ks(self, before: EvalResult) -> tuple[int, ...]:
        """Return every k of the result and of the command. Raises UserError for one above its samples."""
        asked = self.asked.settings.k
        ks = {*before.ks, *(() if asked is None else parse_ks(asked))}
        if max(ks) > before.n:
            raise UserError(f"{self.name}: {before.n} samples per problem cannot give pass@{max(ks)}; lower --k")
        return tuple(sorted(ks))

    def _setting(self, ks: tuple[int, ...]) -> EvalSetting:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self.info.setting.items()
        }
        # The samples' identity, with this judgement's in place of what said how they were judged.
        drawn = {name: value for name, value in self.info.identity.items() if name not in JUDGING}
        identity = drawn | judging_identity(self.asked.reward, self.suite) | {"judged": "again"}
        return EvalSetting(self.name, identity=identity, **values | {"ks": ks})

    def differences(self) -> Iterator[str]:
        """Yield a line for each way in which this judgement differs from the first by its problems, rule or judge."""
        before, now = self.info.identity, judging_identity(self.asked.reward, self.suite)
        if before.get("problems", now["problems"]) != now["problems"]:
            yield "the problems, their answers or prompts are others than those that were sampled"
        by, first = (each.get("reward", "the task's verifier") for each in (now, before))
        # Of a run's own evaluations nothing says who judged.
        if "timeout_s" in before and by != first:
            yield f"judged by {by}, at first by {first}"
        rule = rule_of(self.asked.reward)
        if self.first not in (None, rule) and "reward" not in {*before, *now}:
            yield f"responses are read {rule.in_words}; at first {self.first.in_words}"


def export_samples(folder: Path, asked: Asked, say: Say) -> None:
    """Write the stored samples of an evaluation's folder, or of the suites asked for, as lm-evaluation-harness does.

    Raises UserError as `rejudge_folder` does.
    """
    _, chosen, _ = _with_samples(folder, asked)
    date = datetime.now().isoformat().replace(":", "-")
    for name, suite in chosen.items():
        path = (asked.out or folder) / f"samples_{name}_{date}.jsonl"
        info = samples_info(folder, name)
        assert info is not None
        lines = write_log(path, suite, info, read_samples(folder, name))
        whole = (folder / f"{name}.json").exists()
        say(f"wrote {path}: {lines:,} lines" + ("" if whole else "; the evaluation was cut off before its end"))
