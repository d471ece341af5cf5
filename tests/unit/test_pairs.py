"""All-pairs coverings: every pair that the product has, in far fewer cases."""

from __future__ import annotations

import itertools

from pairs import Case, all_pairs, product

AXES = {"a": (1, 2), "b": (1, 2), "c": "xyz", "d": (True, False), "e": (None, 1)}


def pairs_of(cases: list[Case]) -> set[object]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_pair_of_the_product_is_covered() -> None:
    assert pairs_of(all_pairs(AXES)) == pairs_of(product(AXES))
    assert len(product(AXES)) == 48 and len(all_pairs(AXES)) <= 9


def test_what_is_not_allowed_is_neither_chosen_nor_missed() -> None:
    def allowed(case: Case) -> bool:
        return case["a"] * case["b"] <= 2

    chosen = all_pairs(AXES, allowed)
    assert all(map(allowed, chosen))
    assert pairs_of(chosen) == pairs_of(product(AXES, allowed))
    assert chosen == all_pairs(AXES, allowed)
