"""What one command evaluates: suites and groups by name, each suite with all that is said of how it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasharp.errors import UserError
from megasharp.evals.groups import Member, Sampling, Settings, SuiteGroup, check_suite, complete, load_group
from megasharp.evals.suites import Suite, load_suite


@dataclass(frozen=True, slots=True)
class Planned:
    """One evaluation: `suite` under the name of its files, the `member` of its group that it is, its seed."""

    suite: Suite
    member: str
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group, or None for suites that were named by themselves, and its evaluations.

    `name` is the group's file. `ours` are the settings in use that the group's paper does not give.
    """

    name: str
    group: SuiteGroup | None
    evaluations: tuple[Planned, ...]
    ours: tuple[str, ...] = ()


def plan_suites(names: Sequence[str], asked: Settings, seed: int) -> list[PlannedGroup]:
    """What `names` stand for; what is `asked` counts before what groups say.

    Raises:
        UserError: an unknown name, a name twice, data that cannot be had, or settings that do not go together.
    """
    found = [_plan(name, asked, seed) for name in names]
    files = [name for each in found for name in _files(each)]
    for name in files:
        if files.count(name) > 1:
            raise UserError(f"--suite {','.join(names)}: {name} is named twice, and both would write {name}.json")
    return found


def _files(planned: PlannedGroup) -> list[str]:
    own = [planned.name] if planned.group is not None else []
    return [*own, *(each.suite.name for each in planned.evaluations)]


def _plan(name: str, asked: Settings, seed: int) -> PlannedGroup:
    group = load_group(name)
    if group is None:
        check_suite(name)
        # Here and below a mistake in the settings is told before problems are read or fetched.
        sampling = complete(asked)
        suite = load_suite(name)
        return PlannedGroup(suite.name, None, (Planned(suite, suite.name, sampling, seed),))
    planned = [each for member in group.members for each in _member(member, group, asked, seed)]
    ours = tuple(key for key in group.ours if getattr(asked, key, None) is None)
    return PlannedGroup(_stem(name), group, tuple(planned), ours)


def _member(member: Member, group: SuiteGroup, asked: Settings, seed: int) -> list[Planned]:
    sampling = complete(asked.over(member.settings.over(group.settings)))
    suite = load_suite(member.suite, prompt=member.prompt, limit=member.limit, seed=member.limit_seed)
    if member.repeats == 1:
        return [Planned(suite, suite.name, sampling, seed)]
    return [
        Planned(replace(suite, name=f"{suite.name}_repeat{number + 1}"), suite.name, sampling, seed + number)
        for number in range(member.repeats)
    ]


def _stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".yaml")
