r"""Units, percent signs and words behind a number: those that leave it as it is, and those that change its value.

A word behind a number is a unit or says what was counted (`5\text{ apples}`), and is left out; but `5\text{ million}`
is a million times as much, `5\text{ squared}` a power, `5\text{ (or 6)}` another answer, and `5\mathrm{i}` is no 5.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    name: names[0]
    for names in (
        ("mm", "millimeter", "millimetre"),
        ("cm", "centimeter", "centimetre"),
        ("m", "meter", "metre"),
        ("km", "kilometer", "kilometre"),
        ("in", "inch", "inches"),
        ("ft", "foot", "feet"),
        ("yd", "yard"),
        ("mi", "mile"),
        ("g", "gram"),
        ("kg", "kilogram"),
        # Pounds of weight and of money are one name; no answer has both.
        ("lb", "pound", "£"),
        ("s", "sec", "second"),
        ("min", "minute"),
        ("h", "hr", "hour"),
        ("day",),
        ("year",),
        ("mph", "miles per hour", "mile per hour"),
        ("km/h", "kph", "kilometers per hour"),
        ("m/s", "meters per second"),
        ("cent",),
        ("dollar", "usd"),
        ("euro", "€", "eur"),
        ("rupee", "₹", "rs"),
        ("degree", r"^\circ", r"^{\circ}"),
        ("arcminute", "'", r"^\prime", r"^{\prime}"),
        ("radian", "rad"),
        ("am", "a.m"),
        ("pm", "p.m"),
    )
    for name in names
}
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|operatorname)"
_SPACES = r"(?:\\[,;:! ]|\\quad|[\s~])*"
_UNIT = re.compile(
    rf"{_SPACES}(?:{_TEXT}\s*\{{\s*(?P<command>[A-Za-z/. €£₹]+?)\s*\}}|(?<=[\d\s}}])(?P<bare>[A-Za-z/ ]+?|[ap]\.m\.?)"
    r"|(?P<sign>\^\s*\{?\s*\\(?:circ|prime)\s*\}?|(?<=\d)'|[€£₹]))"
    r"(?P<power>\s*\^\s*\{?[23]\}?)?$"
)
_PER = re.compile(rf"{_TEXT}\s*\{{\s*([A-Za-z]+)(?:\\[,;: ]|\\cdot\s*|\s)*([A-Za-z]+)\s*\^\s*\{{?-1\}}?\s*\}}$")
_OVER = re.compile(
    rf"\\d?frac\s*\{{\s*{_TEXT}\s*\{{\s*([a-z]+)\s*\}}\s*\}}\s*\{{\s*{_TEXT}\s*\{{\s*([a-z]+)\s*\}}\s*\}}$"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)$")
_CURRENCY = re.compile(
    r"^(-?)\s*(?:(?P<dollar>\\?\$)|(?P<lb>£|\\pounds(?![A-Za-z]))|(?P<euro>€|\\euro(?![A-Za-z])|\\text\{\s*€\s*\})"
    r"|(?P<rupee>₹|\\text\{\s*(?:₹|Rs\.?)\s*\}))\s*(?=[\d.\\])"
)

# Words by which a number is multiplied, of English and Chinese.
_TIMES: dict[str, Fraction] = {
    "dozen": Fraction(12), "gross": Fraction(144), "hundred": Fraction(100), "thousand": Fraction(1000),
    "million": Fraction(10**6), "mn": Fraction(10**6), "billion": Fraction(10**9), "bn": Fraction(10**9),
    "trillion": Fraction(10**12), "lakh": Fraction(10**5), "crore": Fraction(10**7),
    "half": Fraction(1, 2), "halves": Fraction(1, 2), "third": Fraction(1, 3), "quarter": Fraction(1, 4),
    "fourth": Fraction(1, 4), "fifth": Fraction(1, 5), "sixth": Fraction(1, 6), "seventh": Fraction(1, 7),
    "eighth": Fraction(1, 8), "ninth": Fraction(1, 9), "tenth": Fraction(1, 10), "eleventh": Fraction(1, 11),
    "twelfth": Fraction(1, 12), "hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000),
    "百": Fraction(100), "千": Fraction(1000), "万": Fraction(10**4), "亿": Fraction(10**8),
}  # fmt: skip
_POWERS = {"squared": 2, "cubed": 3}
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_CARDINALS = {word: number for number, word in enumerate(_ONES)} | {
    word: 10 * number for number, word in enumerate(_TENS, start=2)
}
# Words that make another answer, or several, of what stands before them.
_OTHER = re.compile(
    r"\b(?:or|and|to|times|plus|minus|over|by|divided|multiplied|factorial|choose|mod|modulo|raised|pi|sqrt|sin|cos|tan"
    r"|log|ln|exp|not|about|at least|at most|double|triple|twos|negative|maybe|perhaps|possibly|probably|wrong"
    r"|incorrect|guess)\b|\?",
    re.IGNORECASE,
)
_LAST_TEXT = re.compile(rf"{_SPACES}{_TEXT}\s*\{{(?P<text>[^{{}}]*)\}}$")
_UNIT_POWER = re.compile(rf"{_SPACES}{_TEXT}\s*\{{\s*units?\s*\}}\s*\^\s*\{{?\s*[23]\s*\}}?$")
_LAST_WORDS = re.compile(r"(?<=[\d)}])(?:\s+|~|\\[,;: ])(?P<text>[A-Za-z]{2,}(?:[ -][A-Za-z]{2,})*)$")
_NUMBER_IN_TEXT = re.compile(rf"{_TEXT}\s*\{{\s*(-?\d[\d,]*(?:\.\d+)?)(?:\s+([A-Za-z][A-Za-z .'-]*?))?\s*\}}")
# A number goes on: `5\ldots` is no 5.
_GOES_ON = re.compile(r"(?:\\[lcv]?dots|\.{3}|\u2026)\s*$")
_FUNCTIONS = re.compile(r"sin|cos|tan|log|ln|exp|sqrt|pi|mod|cup|cap|frac|inf")


def without_unit(text: str) -> tuple[str, str]:
    r"""A plain answer without the unit at its end or the dollar sign before it, and that unit's name; `""` for none.

    Example: `without_unit(r"60\,\text{ kilometers per hour}")` is `("60", "km/h")`.
    """
    text = _PER.sub(r"\\text{\1/\2}", _OVER.sub(r"\\text{\1/\2}", text))
    currency = _CURRENCY.match(text)
    if currency:
        return currency[1] + text[currency.end() :], currency.lastgroup or ""
    match = _UNIT.search(text)
    if match is None or not match.start():
        return text, ""
    name = re.sub(r"\s", "", match["sign"] or "") or (match["command"] or match["bare"] or "").strip(" .").casefold()
    known = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
    if known is None:
        return text, ""
    power = re.sub(r"\D", "", match["power"] or "")
    return text[: match.start()].strip(), known + power


def is_bare_letter(text: str, unit: str) -> bool:
    """Return True where a unit is one letter that stands at its number, as a variable does: `3m`."""
    return len(unit) == 1 and re.search(r"[\d})][a-z]$", text) is not None


def without_percent(text: str) -> tuple[str, bool]:
    """A plain answer without a percent sign at its end, and whether it had one."""
    match = _PERCENT.search(text)
    return (text[: match.start()], True) if match and match.start() else (text, False)


def without_words(text: str) -> str | None:
    r"""A plain answer whose last words are left out, or count where they change its value; None where they tell more.

    Example: `without_words(r"5\text{ million people}")` is `5\cdot 1000000`, `without_words(r"5\text{ (or 6)}")` None.
    """
    if _GOES_ON.search(text) and re.fullmatch(r"-?\d+", _GOES_ON.sub("", text).strip()):
        return None
    text = _UNIT_POWER.sub("", text)
    match = _LAST_TEXT.search(text) or _LAST_WORDS.search(text)
    if match is None or not match.start():
        return text
    before, said = text[: match.start()].strip(), match["text"].strip()
    if said in ("i", "e"):
        return before + said
    word = said.partition(" ")[0].casefold().strip(".,")
    if word in _POWERS:
        return f"({before})^{{{_POWERS[word]}}}"
    # `36\text{k}` is 36,000; K is no such sign.
    factor = Fraction(1000) if said == "k" else _TIMES.get(word) or _TIMES.get(word.removesuffix("s"))
    if re.search(r"\d", said) or _OTHER.search(said):
        return None
    if factor is not None:
        return rf"({before})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    if match.re is _LAST_WORDS and _FUNCTIONS.search(said):
        return text
    return before


def number_in_text(text: str) -> str:
    r"""A plain answer set as text that begins with its number, with the words alone as text.

    Example: of `\text{36 years old}` it is `36\text{ years old}`, of `\text{073}` `073`.
    """
    match = _NUMBER_IN_TEXT.fullmatch(text)
    if match is None:
        return text
    return rf"{match[1]}\text{{ {match[2]}}}" if match[2] else match[1]


def measures(text: str) -> list[tuple[str, str]]:
    r"""The numbers and units of `2\text{ hours } 30\text{ minutes}`, in words or not; none of another answer."""
    words = re.sub(rf"{_TEXT}|\\[,;: ]|[{{}},~]|\band\b", " ", text).casefold()
    if not re.fullmatch(r"(?:\s*\d+(?:\.\d+)?\s*[a-z]{2,}){2,}\s*", words):
        return []
    found = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", words)
    return [(number, _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or name) for number, name in found]


def number_in_words(text: str) -> Fraction | None:
    """The number that English words are; None for other words.

    Example: `number_in_words("two and a half")` is 5/2, of `"three quarters"` 3/4, of `"twenty-five thousand"` 25000.
    """
    total, part, seen = Fraction(0), Fraction(0), False
    for word in text.casefold().replace("-", " ").split():
        factor = _TIMES.get(word) or _TIMES.get(word.removesuffix("s"))
        if word in _CARDINALS:
            part += _CARDINALS[word]
        elif word in ("a", "an") and not part:
            part = Fraction(1)
        elif word == "and" and seen:
            total, part = total + part, Fraction(0)
        elif factor is not None:
            part = (part or 1) * factor
            if factor >= 1000:
                total, part = total + part, Fraction(0)
        else:
            return None
        seen = True
    return total + part if seen and text.casefold().strip() not in ("a", "an") else None
