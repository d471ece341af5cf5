"""Groups of suites, named as the papers' tables, each with the settings that its paper measured with.

A group is a YAML file in configs/suites. Settings that a paper does not give are listed in `ours` by their keys, and in
the file's first lines; a command that uses such a value says so. A command evaluates suites and groups by name:
`plan_suites` loads them, each suite with its settings from the command line, the group and the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import SHIPPED, read_tree, validate
from megasharp.evals.suites import SUITE_FOLDER, Asking, Suite, default_ks, load_suite, parse_ks
from megasharp.tasks.problems import response_of

GROUP_FOLDER = Path("configs") / "suites"
SettingName = Literal[
    "n", "k", "temperature", "top_p", "top_k", "min_p", "stop", "max_tokens", "prompt", "limit_seed", "suites"
]


class Settings(Section):
    """Sampling of an evaluation, and its values of k. None: not set here. Lengths in tokens."""

    n: int | None = Field(
        default=None,
        ge=1,
        description="Number of samples per problem. null: not set here; the command's default is 64.",
    )
    k: str | None = Field(
        default=None,
        description="Values of k for pass@k, as text such as 1,4,16 or 1,2,4,...,256; none may exceed n. null: not "
        "set here; the default is powers of 4 up to n.",
    )
    temperature: float | None = Field(
        default=None,
        ge=0.0,
        description="Sampling temperature. 0: greedy. null: not set here; the default is 1.",
    )
    top_p: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Nucleus sampling; 1 is off. null: not set here; the default is 1.",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        description="Number of most likely tokens that may be sampled; 0 is all. null: not set here; the default is 0.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of the most likely token's probability that a token needs, after top_k and top_p; 0 is off. "
        "null: not set here; the default is 0.",
    )
    stop: list[str] | None = Field(
        default=None,
        description="Strings that end a response, whose text is judged without them. null: not set here; the default "
        "is none.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest response in tokens. null: not set here; the default is 32.",
    )

    def over(self, other: Settings) -> Settings:
        """Return `other` with what is set here in its place."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


class Member(Settings):
    """One suite of a group, with what is its own.

    `prompt` is a template's name. `limit` draws so many problems by `limit_seed`; the figures of `repeats` evaluations,
    with seeds one after the other, are averaged.
    """

    suite: str = Field(description="Name of a suite in configs/task, or the path of its YAML file.")
    prompt: str | None = Field(
        default=None,
        description="Name of a prompt template for this suite. null: the group's, or else the suite's own.",
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Number of problems to draw from the suite. null: the suite's own limit.",
    )
    limit_seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of the draw of problems. null: the suite's own seed.",
    )
    repeats: int = Field(
        default=1,
        ge=1,
        description="Number of evaluations of this suite with successive seeds; their metrics are averaged. 1: one "
        "evaluation.",
    )

    @property
    def settings(self) -> Settings:
        """The member's own settings of sampling."""
        return Settings(**{name: getattr(self, name) for name in Settings.model_fields})


class SuiteGroup(Section):
    """A group's YAML file. `source` cites the paper and where in it; `ours` names settings that it does not give."""

    source: str = Field(description="Paper, and the place in it, that the group is taken from.")
    prompt: str | None = Field(
        default=None,
        description="Name of a prompt template for all suites that name none. null: each suite's own.",
    )
    settings: Settings = Field(
        description="Sampling settings of all suites of the group; a suite's own and the command line's count first.",
    )
    suites: list[str | Member] = Field(
        min_length=1,
        description="Suites of the group: names, or tables with settings of their own.",
    )
    ours: list[SettingName] = Field(
        default=[],
        description="Settings that the paper does not give and that are chosen here; commands that use one say so.",
    )

    @model_validator(mode="after")
    def _each_once(self) -> SuiteGroup:
        names = [member.suite for member in self.members]
        if len(set(names)) < len(names):
            raise ValueError(f"suites: {', '.join(names)} names one twice")
        for member in self.members:
            settings = member.over(self.settings)
            if settings.k is None or settings.n is None:
                continue
            try:
                most = max(parse_ks(settings.k))
            except UserError as error:
                raise ValueError(str(error)) from None
            if most > settings.n:
                raise ValueError(f"n={settings.n} samples cannot give pass@{most}")
        return self

    @property
    def members(self) -> tuple[Member, ...]:
        """The suites in order."""
        members = (Member(suite=each) if isinstance(each, str) else each for each in self.suites)
        return tuple(each.model_copy(update={"prompt": each.prompt or self.prompt}) for each in members)


def load_group(name: str) -> SuiteGroup | None:
    """Load the group `name` of configs/suites, in the working directory or shipped, or a YAML file with `suites`.

    None where there is none of this name. Raises UserError for a file that is no group.
    """
    for candidate in (Path(name), *(root / GROUP_FOLDER / f"{name}.yaml" for root in (Path.cwd(), SHIPPED))):
        if candidate.is_file():
            tree = read_tree(candidate)
            # Elsewhere a folder of this name may hold a user's own suites.
            if candidate.absolute().parts[-3:-1] != GROUP_FOLDER.parts and "suites" not in tree:
                return None
            return validate(SuiteGroup, tree, str(candidate), candidate)
    return None


def group_names() -> list[str]:
    """Return the names of all groups."""
    return _names(GROUP_FOLDER)


def _names(folder: Path) -> list[str]:
    return sorted({path.stem for root in (Path.cwd(), SHIPPED) for path in (root / folder).glob("*.yaml")})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings with nothing left open, `ks` sorted."""

    n: int
    ks: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def identity(self) -> dict[str, str]:
        """Return what samples depend on, as text; so no values of k, nor a setting that was off before it was there."""
        found = {name: str(value) for name, value in asdict(self).items() if name not in ("ks", *LATER)}
        return found | {name: str(value) for name in LATER if (value := getattr(self, name))}


# Settings that came later; where they are off, nobody names them.
LATER = ("top_k", "min_p", "stop")
# Between a suite's name and the number of its repeat.
_REPEAT = "_repeat"
DEFAULTS = Settings(n=64, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[])


def complete(settings: Settings, longest: int = 1) -> Sampling:
    """Fill settings with the defaults: 64 samples at temperature 1, `longest` tokens; pass@k for powers of 4 up to n.

    Raises:
        UserError: a k above n, or a value of k that is none.
    """
    whole = settings.over(DEFAULTS)
    assert whole.n is not None and whole.temperature is not None
    assert whole.top_p is not None and whole.top_k is not None and whole.min_p is not None and whole.stop is not None
    ks = parse_ks(whole.k) if whole.k is not None else default_ks(whole.n)
    if max(ks) > whole.n:
        raise UserError(f"{whole.n} samples per problem cannot give pass@{max(ks)}; raise --n or lower --k")
    return Sampling(
        whole.n,
        ks,
        whole.temperature,
        whole.top_p,
        whole.max_tokens or longest,
        whole.top_k,
        whole.min_p,
        tuple(whole.stop),
    )


def check_suite(name: str) -> None:
    """Raise UserError, with all names, unless `name` is a suite's or the path of a file."""
    known = _names(SUITE_FOLDER)
    if name in known or Path(name).is_file():
        return
    near = " or ".join(get_close_matches(name, [*known, *group_names()], n=3, cutoff=0.5))
    raise UserError(
        f"--suite {name}: no suite or group of this name{f'; did you mean {near}?' if near else ''}; "
        f"{known_names()}; or give the path of a YAML file"
    )


def known_names() -> str:
    """Say the names of all suites and groups."""
    return f"suites: {', '.join(_names(SUITE_FOLDER)) or 'none'}; groups: {', '.join(group_names()) or 'none'}"


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


def plan_suites(
    names: Sequence[str],
    asked: Settings,
    seed: int,
    asking: Asking = Asking(),  # noqa: B008  (it is frozen)
    longest: int | None = None,
) -> list[PlannedGroup]:
    """Load the suites and groups that `names` name; settings that are `asked` count before a group's.

    So does the prompt of `asking`, where it is `first`. `longest` is a response's limit in tokens where nothing sets
    one; None is what a suite's task needs.

    Raises:
        UserError: an unknown name, a name twice, data that cannot be had, or settings that do not go together.
    """
    found = [_plan(name, asked, seed, asking, longest) for name in names]
    files = [planned.name for planned in found if planned.group is not None]
    files += [each.suite.name for planned in found for each in planned.evaluations]
    for name in files:
        if files.count(name) > 1:
            raise UserError(f"--suite {','.join(names)}: {name} is named twice, and both would write {name}.json")
    return found


def _plan(name: str, asked: Settings, seed: int, asking: Asking, longest: int | None) -> PlannedGroup:
    group = load_group(name)
    if group is None:
        check_suite(name)
        # Here and below a mistake in the settings is reported before problems are read or fetched.
        complete(asked)
        suite = load_suite(name, asking=asking)
        sampling = complete(asked, longest or response_of(suite.task))
        return PlannedGroup(suite.name, None, (Planned(suite, suite.name, sampling, seed),))
    planned = [each for member in group.members for each in _member(member, group, asked, seed, asking, longest)]
    named = {"prompt": asking.name if asking.first else None}
    ours = tuple(key for key in group.ours if named.get(key, getattr(asked, key, None)) is None)
    return PlannedGroup(name.rpartition("/")[2].removesuffix(".yaml"), group, tuple(planned), ours)


def _member(
    member: Member, group: SuiteGroup, asked: Settings, seed: int, asking: Asking, longest: int | None
) -> list[Planned]:
    settings = asked.over(member.settings.over(group.settings))
    complete(settings)
    prompt = None if asking.first else member.prompt
    suite = load_suite(member.suite, prompt=prompt, limit=member.limit, seed=member.limit_seed, asking=asking)
    sampling = complete(settings, longest or response_of(suite.task))
    if member.repeats == 1:
        return [Planned(suite, suite.name, sampling, seed)]
    return [
        Planned(replace(suite, name=f"{suite.name}{_REPEAT}{number + 1}"), suite.name, sampling, seed + number)
        for number in range(member.repeats)
    ]


def repeated(name: str) -> str:
    """Return the suite that one of its repeats is of. Example: `repeated("arc_c_repeat2")` is `arc_c`."""
    return re.sub(rf"{_REPEAT}\d+$", "", name)
