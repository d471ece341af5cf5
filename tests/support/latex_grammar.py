r"""A grammar of LaTeX answers for fuzzing, and of numbers whose value is known.

It reaches every construct that the verifier's own rules speak of, and the commands of latex2sympy2's grammar that
results are written with; broken braces and characters of other scripts too. It cannot reach what takes sympy for ever
within the bounds (equations on both sides that are solved), texts of more than some 120 characters, nor the prose in
which a response wraps its answer: `test_extraction.py` and the labelled corpus have that.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random

_LETTERS = ["x", "y", "n", "a", "b", "i", "e", "A", "B", "N", r"\theta", r"\alpha", r"\pi", "AB", "x_1", "x_{2}", "f"]
_FUNCTIONS = [r"\sin", r"\cos", r"\tan", r"\ln", r"\log", r"\log_2", r"\arcsin", r"\exp", r"\Gamma", r"\gcd", r"\det"]
_RELATIONS = ["=", "=", "<", ">", r"\le", r"\ge", r"\neq", r"\equiv", r"\approx", r"\in", r"\sim", r"\subset", r"\to"]
_WORDS = [
    r"\text{ cm}", r"\text{ million}", r"\text{ or }", r"\text{ and }", r"\%", "%", r"^\circ", r"\text{ apples}", "'",
    r"\pmod{7}", r"\bmod 5", r"\ (\mathrm{mod}\ 7)", r"\text{ squared}", r"\mathrm{i}", r"\text{ (or 6)}", " cm^2", "!",
    r"\text{ six}", "_8", r"_{\text{six}}", r"\ldots", "+C", r"\text{ p.m.}", ",", ";", ".", r"\ ",
]  # fmt: skip
_ODD = [
    r"\therefore ", "\N{EN DASH}", "√", "½", "²", "\uff15", "٣", "∞", r"\text{", r"\frac", r"\sqrt", "{", "}", "(", ")",
    r"\left(", r"\right)", "$", "\\", "&", "^", "_", "|", r"\{", r"\}", r"\boxed{", "[", "]", r"\begin{pmatrix}", "  ",
    r"\dot{3}", r"\overline{36}", "万", "\u2026", r"\infty", r"\mathbb{R}", r"\emptyset", r"\pm", "#", "@", "\n",
]  # fmt: skip


def number(random: Random) -> str:
    """A small number, fraction or decimal."""
    kind = random.randrange(7)
    one, two = random.randrange(100), random.randrange(1, 30)
    if kind < 3:
        return str(one)
    return (rf"\frac{{{one}}}{{{two}}}", f"{one}.{two}", f"-{one}", rf"{one}/{two}")[kind - 3]


def expression(random: Random, depth: int = 2) -> str:
    """An expression; `depth`: groups within groups at most."""
    if depth == 0 or random.random() < 0.25:
        return random.choice((number(random), random.choice(_LETTERS)))

    def inner() -> str:
        return expression(random, depth - 1)

    forms: list[Callable[[], str]] = [
        lambda: f"{inner()}{random.choice('+-')}{inner()}",
        lambda: rf"{inner()}\cdot {inner()}",
        lambda: f"{random.randrange(2, 9)}{random.choice(_LETTERS)}",
        lambda: rf"\frac{{{inner()}}}{{{inner()}}}",
        lambda: rf"\sqrt{{{inner()}}}",
        lambda: rf"\sqrt[3]{{{inner()}}}",
        lambda: f"{random.choice(_LETTERS)}^{{{random.randrange(9)}}}",
        lambda: f"({inner()})^{random.randrange(4)}",
        lambda: rf"{random.choice(_FUNCTIONS)}({inner()})",
        lambda: f"|{inner()}|",
        lambda: rf"\lfloor {inner()}\rfloor",
        lambda: rf"\binom{{{random.randrange(9)}}}{{{random.randrange(9)}}}",
        lambda: f"f({inner()})",
        lambda: rf"{inner()}\pm {inner()}",
        lambda: rf"\overline{{{random.choice(['AB', 'x', '3'])}}}",
        lambda: rf"{inner()}\mathbf{{i}}+{inner()}\mathbf{{j}}",
    ]
    return random.choice(forms)()


def answer(random: Random) -> str:
    """An answer: an expression, a list, a pair, a set, an interval, a matrix, an equation or inequality, with words."""

    def one() -> str:
        return expression(random, random.randrange(1, 3))

    forms: list[Callable[[], str]] = [
        one,
        one,
        lambda: ", ".join(one() for _ in range(random.randrange(2, 4))),
        lambda: f"({one()},{one()})",
        lambda: rf"\{{{one()}, {one()}\}}",
        lambda: f"{random.choice('[(]')}{one()}{random.choice(',;')}{one()}{random.choice('])[')}",
        lambda: rf"\begin{{pmatrix}}{one()}&{one()}\\{one()}&{one()}\end{{pmatrix}}",
        lambda: rf"\begin{{pmatrix}}{one()}\\{one()}\end{{pmatrix}}",
        lambda: f"{one()}{random.choice(_RELATIONS)}{one()}",
        lambda: f"{one()}={one()}={number(random)}",
        lambda: f"(p,q)=({one()},{one()})",
        lambda: rf"{one()}\cup {one()}",
        lambda: rf"\{{x\mid {one()}{random.choice(_RELATIONS)}{one()}\}}",
        lambda: f"{one()}{random.choice(_WORDS)}",
        lambda: f"{number(random)}{random.choice(_WORDS)}{random.choice(_WORDS)}",
        lambda: f"x={one()}{random.choice((',', ' and ', ' or '))} y={one()}",
    ]
    text = random.choice(forms)()
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        place = random.randrange(len(text) + 1)
        text = text[:place] + random.choice(_ODD) + text[place + random.randrange(2) :]
    return text


def pair(random: Random) -> tuple[str, str]:
    """A known answer and a given one: unlike, alike, or alike but for a sign or two."""
    gold = answer(random)
    kind = random.random()
    if kind < 0.5:
        return gold, answer(random)
    if kind < 0.6:
        return gold, gold
    place, other = random.randrange(len(gold) + 1), answer(random)
    return gold, gold[:place] + random.choice([*_ODD, *_WORDS, other[:4]]) + gold[place + random.randrange(3) :]


def spelling(random: Random, value: Fraction) -> str:
    """One of many spellings of a rational number."""
    above, below = value.numerator, value.denominator
    times = random.randrange(2, 7)
    spellings = [
        rf"\frac{{{above}}}{{{below}}}",
        rf"\dfrac{{{above * times}}}{{{below * times}}}",
        f"{above * times}/{below * times}",
        rf"\left(\frac{{{above}}}{{{below}}}\right)",
        rf"x=\frac{{{above}}}{{{below}}}",
        rf"m+n=\frac{{{above}}}{{{below}}}",
        rf"\frac{{{above}}}{{{below}}}\text{{ apples}}",
        rf"\text{{The answer is }}\frac{{{above}}}{{{below}}}",
        rf"{above}\div {below}",
        rf"\therefore \frac{{{above}}}{{{below}}}",
        rf"\frac{{{above - below}}}{{{below}}}+1",
        repr(above / below),
    ]
    if below == 1:
        spellings += [
            str(above),
            f"{above}.0",
            f"{above}.",
            f"{above}^1",
            rf"\sqrt{{{above * above}}}" if above >= 0 else str(above),
        ]
        spellings += [str(above).translate({48 + digit: 0xFF10 + digit for digit in range(10)}), f"{above} apples"]
        spellings += [str(above).replace("-", "\N{EN DASH}"), rf"N\equiv {above} \pmod{{1000}}", rf"|AB|={above}"]
    if (100 * value).denominator == 1 and abs(value) < 1:
        spellings.append(rf"{100 * value}\%")
    return random.choice(spellings)
