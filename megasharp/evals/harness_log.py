"""Stored samples as lm-evaluation-harness logs them, for tools that read its files.

With `--log_samples` the harness (0.4.13, `EvaluationTracker.save_results_samples`) makes `samples_<task>_<date>.jsonl`,
an object for each problem and filter, with all of its responses in `resps`. Here the filter `none` has the samples and
`greedy` the greedy one. `acc` is the share of correct responses. Ours are `outcomes`, `answers`, `finish`, `seeds` and
`tokens`, with an entry for each response. `doc` has the problem's id, question and task, not the row of a data set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from megasharp.common.files import completed
from megasharp.common.records import Outcome, TaskAnswer
from megasharp.evals.rejudge import problem_of, text_of
from megasharp.evals.stored_samples import SamplesInfo, StoredSample
from megasharp.evals.suites import Suite
from megasharp.tasks.judge import TaskItem

_FILTERS = {False: "none", True: "greedy"}


def write_log(path: Path, suite: Suite, info: SamplesInfo, samples: Iterable[StoredSample]) -> int:
    """Write samples, which come in the order of problems, as one file; return the number of its lines.

    Raises UserError for a sample without its text, of a problem that `suite` does not have, or where it cannot be
    written.
    """
    count = 0
    with completed(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records(suite, info, samples):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    return count


def records(suite: Suite, info: SamplesInfo, samples: Iterable[StoredSample]) -> Iterator[dict[str, Any]]:
    """Yield the harness's record of each problem, the greedy one first. Raises UserError as `write_log`."""
    problems = {item.id: item for item in suite.items}
    for (place, greedy), some in groupby(samples, key=lambda sample: (sample.number, sample.greedy)):
        same = list(some)
        until, most = list(info.setting.get("stop", ())), info.setting["max_tokens"]
        arguments: dict[str, Any] = {"until": until, "max_gen_toks": most, "do_sample": not greedy}
        if not greedy:
            drawn = ("temperature", "top_p", "top_k", "min_p")
            arguments |= {name: info.setting[name] for name in drawn if name in info.setting}
        yield _record(problem_of(same[0].problem, problems), suite.task, place, arguments, same)


def _record(
    item: TaskItem, task: str, place: int, arguments: dict[str, Any], samples: list[StoredSample]
) -> dict[str, Any]:
    texts = [text_of(sample) for sample in samples]
    prompt = item.text or "\n\n".join(f"{role}: {text}" for role, text in item.turns)
    doc, target = {"id": item.id, "task": task, "question": item.question or prompt}, target_of(item.answer)
    return {
        "doc_id": place,
        "doc": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": arguments}},
        "resps": [texts],
        "filtered_resps": [texts],
        "filter": _FILTERS[samples[0].greedy],
        "metrics": ["acc"],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        "acc": sum(sample.outcome is Outcome.CORRECT for sample in samples) / len(samples),
        "outcomes": [str(sample.outcome) for sample in samples],
        "answers": [sample.answer for sample in samples],
        "finish": [str(sample.finish) for sample in samples],
        "seeds": [sample.seed for sample in samples],
        "tokens": [sample.tokens for sample in samples],
    }


def target_of(answer: TaskAnswer) -> str:
    """Return a known answer as text: its one value, or all that it is made of as JSON."""
    values = asdict(answer)
    said = {each.name: values[each.name] for each in fields(answer) if each.repr}
    only = next(iter(said.values())) if len(said) == 1 else said
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False, default=str)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
