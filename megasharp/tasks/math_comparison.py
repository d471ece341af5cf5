"""Two plain answers compared: as words, names, bases, lists and equations, then by units, percent and algebra.

What the algebra cannot read, must not be given (`math_bounds`) or fails at is compared as text; `Comparison.fault` says
so. Only a fault of the machine passes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasharp.common.errors import one_line
from megasharp.tasks.math_bounds import MAX_LENGTH, beyond
from megasharp.tasks.math_equations import concluded, modulus_of, residue_of, sides, unknowns, values, with_values
from megasharp.tasks.math_lists import MOST, inside_braces, members, with_both_signs
from megasharp.tasks.math_notation import as_row, one_notation, without_domain, without_place
from megasharp.tasks.math_text import (
    bracket,
    fraction_of,
    has_index,
    in_base,
    is_row,
    is_words,
    plain,
    same_text,
    words,
)
from megasharp.tasks.math_units import (
    is_bare_letter,
    measures,
    number_in_text,
    without_percent,
    without_unit,
    without_words,
)

_MARKED_NAME = re.compile(
    r"(?:\\(?P<mark>overline|bar|angle|triangle|text|mathrm|mathbf)\s*)?\{?\s*(?P<letters>[A-Z]{2,4})\s*\}?"
)
# A share with its percentage: `\frac14\ (25\%)`.
_BESIDE = re.compile(r"(.*[^\s\\~])(?:\\[,;: ]|[\s~])+\(\s*=?\s*(-?\d+(?:\.\d+)?\s*\\?%)\s*\)", re.DOTALL)
_INDIAN = re.compile(r"-?\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt)q?(?![A-Za-z])")
_FUNCTION_VALUE = re.compile(r"y|[A-Za-z]\s*\(\s*x\s*\)")
_ASSIGNED = re.compile(r"\s*([A-Za-z])\s*=\s*([^=]+)")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\\circ")
_RADIANS = r"(\\frac{\1\\pi}{180})"
_CONSTANT = re.compile(r"(.*[^\s+])\s*\+\s*[A-Z]$", re.DOTALL)


@dataclass(slots=True)
class Comparison:
    """One comparison; `fault` says why, if at all, algebra was not asked or did not answer."""

    fault: str = ""

    # One question after the other: the first that applies decides, and the order is what there is to read.
    def same(self, gold: str, given: str) -> bool:
        """Return True where two plain answers are the same; the first is the known one."""
        gold, given = _same_letters(*map(one_notation, (gold, given)))
        if same_text(gold, given):
            return True
        if max(len(gold), len(given)) > MAX_LENGTH:
            self.fault = f"longer than {MAX_LENGTH} characters"
            return False
        if len(members(gold)[0]) == 1:
            given = without_place(concluded(given))
            given = given if r"\text" in gold else number_in_text(given)
            given = given if residue_of(gold) else residue_of(given) or given
        if measures(gold) and measures(gold) == measures(given):
            return True
        beside = _BESIDE.fullmatch(given)
        if beside:
            return self.same(gold, beside[1]) and self.same(gold, beside[2])
        if is_words(gold) or is_words(given):
            return words(gold) == words(given)
        if is_row(gold) or is_row(given):
            return False
        if in_base(gold) or in_base(given):
            return _same_in_base(gold, given)
        if has_index(given):
            return False
        named = _same_names(gold, given)
        if named is not None:
            return named
        listed = self._same_lists(gold, given)
        return self._same_equations(gold, given) if listed is None else listed

    def _same_lists(self, gold: str, given: str) -> bool | None:
        """Compare lists member by member, in any order; None where the two are not lists."""
        (known, _), (read, alternatives) = members(gold), members(given)
        known, read = with_both_signs(known), with_both_signs(read)
        if len(read) > 1 and len(known) == 1:
            if _INDIAN.fullmatch(given):
                return self._same_values(gold, given.replace(",", ""))
            if alternatives and r"\cup" in gold:
                known = gold.split(r"\cup")
            elif alternatives:
                # One value, said in several ways.
                return all(self.same(gold, plain(each)) for each in read)
            else:
                return self._same_computed(gold, read)
        elif len(known) > 1 and len(read) == 1 and r"\cup" in given and any(map(_INEQUALITY.search, known)):
            read = given.split(r"\cup")
        if min(len(known), len(read)) == 1 or max(len(known), len(read)) > MOST:
            return None
        if (inside_braces(gold) is None) != (inside_braces(given) is None) or inside_braces(gold) is not None:
            known, read = list(dict.fromkeys(known)), list(dict.fromkeys(read))
        return len(known) == len(read) and self._same_members(known, read)

    def _same_members(self, known: list[str], read: list[str]) -> bool:
        left = [plain(each) for each in read]
        for each in map(plain, known):
            found = next((place for place, other in enumerate(left) if self.same(each, other)), None)
            if found is None:
                return False
            del left[found]
        return True

    def _same_computed(self, gold: str, read: list[str]) -> bool | None:
        """Compare with one answer what is computed in a list, of letters with values: `m=27, n=43, m+n=70` is 70."""
        chain = [side.text for side in sides(plain(read[-1]))]
        named = _assigned(read[:-1])
        if len(named) < len(read) - 1 or len(chain) < 2 or not 1 < len(unknowns(chain[0])) <= len(named):
            return False if fraction_of(gold) is not None else self._same_assignments(gold, read)
        computed = [with_values(each, named) for each in chain[:-1]]
        return all(self._agree(each, chain[-1]) for each in computed) and self._same_values(gold, chain[-1])

    def _same_assignments(self, gold: str, read: list[str]) -> bool | None:
        """Compare `x=2, y=3` with a pair, whose members are in the order of their names."""
        named = _assigned(read)
        if bracket(gold) != "(" or len(named) < len(read):
            return None
        return self._same_values(gold, f"({','.join(named[name] for name in sorted(named))})")

    def _same_equations(self, gold: str, given: str) -> bool:
        known, read = modulus_of(gold), modulus_of(given)
        if known and read and known[1] == read[1] and known[0].isdecimal() and read[0].isdecimal():
            return (int(known[0]) - int(read[0])) % known[1] == 0 and same_text(
                gold.partition(r"\equiv")[0], given.partition(r"\equiv")[0]
            )
        if len(sides(gold)) == 1:
            stated = values(given, self._agree)
            if stated is None:
                return False
            if stated != [given]:
                return any(self.same(gold, plain(each)) for each in stated)
        elif _right_side_of_function(gold) and _right_side_of_function(given):
            return self._same_values(_right_side_of_function(gold), _right_side_of_function(given))
        return self._same_values(gold, given)

    def _same_values(self, gold: str, given: str) -> bool:
        if {bracket(gold), bracket(given)} == {"{", "("}:
            return False
        if bracket(gold) == "(" or bracket(given) == "(":
            gold, given = as_row(gold), as_row(given)
        gold, given = _in_radians(gold, given), _in_radians(given, gold)
        (known, known_unit), (read, read_unit) = without_unit(gold), without_unit(given)
        if known_unit and read_unit and known_unit != read_unit:
            return False
        if known_unit and not read_unit and is_bare_letter(gold, known_unit):
            known = gold
        (known, known_percent), (read, read_percent) = without_percent(known), without_percent(read)
        counted = without_words(read)
        if counted is None or (known_unit and read_percent) or (read_unit and known_percent):
            return False
        known, read = _without_constant(without_words(known) or known, counted)
        if known_percent == read_percent:
            return self._equal(known, read)
        if read_percent:
            # 25% is 0.25, and where the known answer is a percentage without its sign it is 25.
            if self._equal(known, _hundredth(read)):
                return True
            # Of a number from -1 to 1 a percent sign can say only a hundredth.
            number = fraction_of(known)
            return (number is None or abs(number) > 1) and self._equal(known, read)
        return self._equal(known, read) or self._equal(_hundredth(known), read)

    def _agree(self, one: str, other: str) -> bool:
        one, other = _DEGREES.sub(_RADIANS, plain(one)), _DEGREES.sub(_RADIANS, plain(other))
        return same_text(one, other) or self._equal(one, other)

    def _equal(self, gold: str, given: str) -> bool:
        from megasharp.tasks.math_algebra import equal

        numbers = fraction_of(gold), fraction_of(given)
        if None not in numbers and numbers[0] == numbers[1]:
            return True
        bound = beyond(given) or beyond(gold)
        if bound:
            self.fault = bound
            return same_text(gold, given)
        try:
            return equal(gold, given)
        except MemoryError:
            raise
        # Whatever sympy raises over what a model wrote says nothing of the machine.
        except Exception as error:
            self.fault = f"{type(error).__name__}: {one_line(error)}"[:200]
            return same_text(gold, given)


def _assigned(texts: list[str]) -> dict[str, str]:
    """The values of the letters that equations such as `x=2` name."""
    found = [_ASSIGNED.fullmatch(each) for each in texts]
    return {each[1]: each[2].strip() for each in found if each}


def _same_letters(gold: str, given: str) -> tuple[str, str]:
    r"""Both without the sets of their letters, where these agree, an integer under one name: `n\pi, n\in\mathbb{Z}`."""
    (known, _, domain), (read, other, named) = without_domain(gold), without_domain(given)
    if not named or (domain and domain != named):
        return gold, given
    free = unknowns(known) - unknowns(read)
    if named == "Z" and other in unknowns(read) - unknowns(known) and len(free) == 1:
        read = re.sub(rf"(?<![\\A-Za-z]){other}(?![A-Za-z])", free.pop(), read)
    return known, read


def _same_names(gold: str, given: str) -> bool | None:
    r"""Compare names of points written together; None where one is none.

    `BA` is not `AB`, which may be a word or a product, but `\overline{BA}` is the same segment, and \angle CBA is ABC.
    """
    known, read = _MARKED_NAME.fullmatch(gold), _MARKED_NAME.fullmatch(given)
    if known is None or read is None:
        return None
    if known["letters"] == read["letters"]:
        return True
    marks = {known["mark"], read["mark"]}
    if "triangle" in marks:
        return sorted(known["letters"]) == sorted(read["letters"])
    return bool(marks & {"overline", "bar", "angle"}) and known["letters"] == read["letters"][::-1]


def _right_side_of_function(text: str) -> str:
    r"""The right side of `y=...`, `f(x)=...` or `x\mapsto ...`, where it speaks of x; `""` of others."""
    text = re.sub(r"^\s*(?:[a-z]\s*:\s*)?x\s*\\mapsto(?![A-Za-z])", "y=", text)
    parts = sides(text)
    if len(parts) != 2 or not _FUNCTION_VALUE.fullmatch(parts[0].text.strip()) or "x" not in unknowns(parts[1].text):
        return ""
    return parts[1].text


def _without_constant(gold: str, given: str) -> tuple[str, str]:
    """Both without the constant of integration that they end with, if the known one's is `+C`; its letter is free."""
    known, read = _CONSTANT.fullmatch(gold), _CONSTANT.fullmatch(given)
    if known and read and gold.endswith("C"):
        return known[1], read[1]
    return gold, given


def _in_radians(text: str, other: str) -> str:
    """Degrees as radians where the other answer speaks of pi; elsewhere a degree sign is a unit like others."""
    return text.replace(r"^\circ", r"\cdot\frac{\pi}{180}") if r"\pi" in other and r"\pi" not in text else text


def _hundredth(text: str) -> str:
    return rf"\frac{{{text}}}{{100}}"


def _same_in_base(gold: str, given: str) -> bool:
    """Numbers with a base have a value; one without is in base ten, or in the base that the known answer names."""
    known, read = in_base(gold), in_base(given)
    if known and not read and known[0] == given:
        return True
    values_of = [
        int(*each) if each else int(text) if text.isdecimal() else None for each, text in ((known, gold), (read, given))
    ]
    return values_of[0] is not None and values_of[0] == values_of[1]
