"""Make a recipe of methods' names: unfold bundles, fill in parameters, refuse by name what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

from megasharp.algos import DEFAULT_CORRECTION, DEFAULT_SURROGATE, METHODS
from megasharp.algos.base import (
    EXCLUSIVE_HOOKS,
    Method,
    MethodParams,
    Needs,
    Reduction,
    misspelt_hook,
    overridden_hooks,
)
from megasharp.algos.recipe import Recipe
from megasharp.common.errors import UserError, nearest

_ROLES = {"advantages": "estimator", "surrogate": "surrogate"}


@dataclass(frozen=True, slots=True)
class _Member:
    """A method of the recipe: the name in the user's list that brought it, and the values set on the way."""

    origin: str
    settings: Mapping[str, object]

    def label(self, name: str) -> str:
        """Return the method's quoted name, with the bundle that brought it where the user did not name it."""
        return repr(name) if self.origin == name else f"{name!r} (from {self.origin!r})"


def build_recipe(
    names: Sequence[str],
    params: Mapping[str, MethodParams],
    *,
    reduction: Reduction | None,
    constant: float,
    mini_batches: int,
    key: str = "recipe.methods",
    response_limit: int | None = None,
    stale: bool = False,
) -> Recipe:
    """Build and check a recipe; `params` are the user's tables by method name, `key` is what messages call the list.

    `constant` is the run's largest response limit in tokens, the horizon of `token_sum_over_constant`; `response_limit`
    is the stage's, where it has its own. `stale`: tokens may be older than the policy, so a recipe with a memory
    network and no correction gets one. The estimator goes first, the others keep the order in which they are named.
    Raises UserError, naming the methods, for one that is unknown or a combination that is not possible.
    """
    for name in names:
        if name not in METHODS:
            raise UserError(f"{key}: unknown method {name!r}; {nearest(name, METHODS)}")
    if len(set(names)) < len(names):
        raise UserError(f"{key}: a method is named twice in [{', '.join(names)}]")
    members = _unfolded(names)
    for name, member in members.items():
        if (misspelt := misspelt_hook(METHODS[name])) is not None:
            wrong, file, hook = misspelt
            raise UserError(
                f"{key}: nothing in {file} calls {wrong} of {member.label(name)}; the hook is named {hook}: rename it, "
                f"or begin a helper's name with _"
            )
    if not any(_fills(name, "surrogate") for name in members):
        members[DEFAULT_SURROGATE] = _Member(DEFAULT_SURROGATE, {})
    _check_exclusive(members, key)
    limit = response_limit or int(constant)
    methods = {name: _made(name, member, params, limit) for name, member in members.items()}
    needs = fold(lambda a, b: a | b, (method.needs() for method in methods.values()), Needs())
    if stale and needs.memory is not None and not any(method.corrects for method in methods.values()):
        members[DEFAULT_CORRECTION] = added = _fitting_correction(methods, limit)
        methods[DEFAULT_CORRECTION] = _made(DEFAULT_CORRECTION, added, params, limit)
    methods = {name: method.beside(needs) for name, method in methods.items()}
    _check_pairs(methods, members, key)
    ordered = dict(sorted(methods.items(), key=lambda item: not _fills(item[0], "advantages")))
    return Recipe(ordered, reduction or _prescribed(names, members, key), constant, mini_batches)


def _made(name: str, member: _Member, params: Mapping[str, MethodParams], limit: int) -> Method[Any]:
    """Make a method; a user's own values win over those of the bundles that bring it."""
    values = {**member.settings, **(_set_values(params[name]) if name in params else {})}
    return METHODS[name](METHODS[name].Params(**values)).within(limit)


def _fitting_correction(methods: Mapping[str, Method[Any]], limit: int) -> _Member:
    """The default correction by token, or by response where a ratio of whole responses refuses the former.

    The mean of a response's log-ratios, as in GSPO's own ratio: a product over a long one would be next to nothing.
    """
    origin = "recipe.correction"
    by_token = _made(DEFAULT_CORRECTION, _Member(origin, {}), {}, limit)
    refused = any(method.refuses(DEFAULT_CORRECTION, by_token) for method in methods.values())
    return _Member(origin, {"level": "geometric"} if refused else {})


def _fills(name: str, hook: str) -> bool:
    return hook in overridden_hooks(METHODS[name])


def _unfolded(names: Sequence[str]) -> dict[str, _Member]:
    """The named methods and those that they bring, each once; of a value that several set, the last one counts."""
    members: dict[str, _Member] = {}
    for name in names:
        for found, settings in _brought(name, {}):
            before = members.get(found)
            # A method that the user names is not attributed to a bundle that brings it too.
            origin = found if found in names else (before.origin if before else name)
            members[found] = _Member(origin, {**(before.settings if before else {}), **settings})
    return members


def _brought(name: str, settings: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield a method after all that it brings, so that a bundle's own values override its members'."""
    for brought, params in METHODS[name].brings.items():
        yield from _brought(brought, _set_values(params))
    yield name, settings


def _set_values(params: MethodParams) -> dict[str, object]:
    return {key: getattr(params, key) for key in params.model_fields_set}


def _check_exclusive(members: Mapping[str, _Member], key: str) -> None:
    for hook in EXCLUSIVE_HOOKS:
        filling = [member.label(name) for name, member in members.items() if _fills(name, hook)]
        role = _ROLES[hook]
        if len(filling) > 1:
            raise UserError(f"{key}: {filling[0]} and {filling[1]} are both the {role}; keep one")
        if not filling:
            choices = [name for name in METHODS if _fills(name, hook)]
            raise UserError(f"{key}: no {role} in [{', '.join(members)}]; add one of: {', '.join(choices)}")


def _check_pairs(methods: Mapping[str, Method[Any]], members: Mapping[str, _Member], key: str) -> None:
    for name, method in methods.items():
        for other, its in methods.items():
            reason = None if name == other else method.refuses(other, its)
            if reason is not None:
                pair = f"{members[name].label(name)} and {members[other].label(other)}"
                raise UserError(f"{key}: {pair} cannot be combined: {reason}")


def _prescribed(names: Sequence[str], members: Mapping[str, _Member], key: str) -> Reduction:
    """The reduction that the named methods prescribe, else that of the methods they bring, else the token mean."""
    for among in (names, list(members)):
        found = {name: METHODS[name].reduction for name in among if METHODS[name].reduction is not None}
        if len(set(found.values())) > 1:
            first = next(iter(found))
            second = next(name for name in found if found[name] is not found[first])
            raise UserError(f"{key}: {first!r} and {second!r} prescribe different reductions: set recipe.reduction")
        chosen = next(iter(found.values()), None)
        if chosen is not None:
            return chosen
    return Reduction.TOKEN_MEAN
