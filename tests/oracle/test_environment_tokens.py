"""Every method: an environment's tokens between the policy's change neither loss nor gradient nor metrics."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from harness import CUTS, Case, Cut, answered, random_case, run, with_estimator

from megasharp.algos import METHODS

# Its draws count from the response's first token, whose tokens are others then; and lengths count all tokens.
DRAWING = {name for name, method in METHODS.items() if method(method.Params()).needs().draw}
POSITIONAL = DRAWING | {"soft_overlong", "dapo"}
# Each response by itself, and many of them in one row and over ranks: test_invariance.py has the other cuts.
HERE = {"whole": Cut(), **{title: CUTS[title] for title in ("one response at a time", "two data-parallel ranks")}}
# Compares turns, of which a response has more then: test_turns.py.
OTHERS = POSITIONAL | {"turn_returns"}


@pytest.fixture(scope="module")
def fixed() -> Case:
    return random_case(4)


@each_case("name", [name for name in METHODS if name not in OTHERS])
def test_methods_see_the_policys_tokens_alone(fixed: Case, name: str) -> None:
    alone = run(fixed, with_estimator(name))
    longer, said = answered(fixed, seed=5)
    assert said.sum() > 20
    scale = np.abs(alone.gradient).max()
    for title, cut in HERE.items():
        found = run(longer, with_estimator(name), cut=cut)
        assert found.loss == pytest.approx(alone.loss, rel=1e-10, abs=1e-12), title
        assert not found.gradient[said].any(), title
        assert np.abs(found.gradient[~said] - alone.gradient).max() <= 1e-10 * scale, title
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-9, abs=1e-12), title


@each_case("name", sorted(POSITIONAL))
def test_methods_whose_draws_or_lengths_count_places_do_not_depend_on_packing(fixed: Case, name: str) -> None:
    """Their values are others with an environment's tokens, by what they are; those have no gradient here too."""
    longer, said = answered(fixed, seed=5)
    whole = run(longer, with_estimator(name))
    assert np.abs(whole.gradient).max() > 0
    for title, cut in CUTS.items():
        found = run(longer, with_estimator(name), cut=cut)
        assert found.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-12), title
        assert not found.gradient[said].any(), title
        assert np.abs(found.gradient - whole.gradient).max() <= 1e-10 * np.abs(whole.gradient).max(), title
