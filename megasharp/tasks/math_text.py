r"""Mathematical answers as text, before any algebra: one spelling for many, and what no algebra system should read.

math-verify reads every letter as a variable and drops what it takes for a unit, so words ("east" is no product that
equals "seat"), units (5 cm is not 5 m) and bases (11_2 is not 11_3) are told apart here.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megasharp.tasks.math_units import number_in_words

_WRAPPERS = (("**", "**"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
# Signs that end a sentence or clause, and spaces.
_CLOSING = re.compile(r"(?:(?<!\\)[.,;]|\\[,;:!]|\s)+$")
_EMPHASIS = re.compile(r"\\(?:underline|mathbf|boldsymbol|bm)\s*\{([^{}]*)\}")
# Colours, sizes and spaces, and a font's command before one sign.
_DRESS = re.compile(
    r"\\textcolor\s*\{[^{}]*\}|\\color\s*(?:\[[^\]]*\])?\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\[hvm]space\*?\s*\{[^{}]*\}"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|bfseries|textstyle)(?![A-Za-z])"
    r"|\\(?:mathbf|mathrm|mathit|boldsymbol|bm)\s+(?=[\w-])|(?<=[\d}\s])~|^~"
)
# The option's label before its value, as in AMC: `\textbf{(B)}\ 24`.
_OPTION = re.compile(
    r"(?:\\(?:textbf|mathbf|text|textrm|mathrm)\s*\{\s*\(?\s*[A-E]\s*[):]\s*\}|(?:\(?[A-E]\)|[A-E]:)(?=\\ |[\s~]))"
    r"(?:\\[,;:! ]|\\q?quad|[\s~:])*(?=[-\d\\$(])"
)
_ENVIRONMENT = re.compile(
    r"(?:\\left\s*\\\{\s*)?\\begin\s*\{(?P<name>cases|aligned|align\*?|gathered|split)\}(?P<rows>.*)\\end\s*\{(?P=name)\}"
    r"(?:\s*\\right\s*\.)?",
    re.DOTALL,
)
_ALIGNED = re.compile(r"&\s*(?=[=<>]|\\(?:approx|equiv|le|ge)|:=)|^\s*&", re.MULTILINE)
_GOES_ON = re.compile(r"=|\\(?:approx|equiv)(?![A-Za-z])")
_CAPITAL = re.compile(r"(?<![A-Za-z\\])[A-E](?![A-Za-z])")
_LABEL = re.compile(r"\(?\s*([A-E])\s*\)?")
_BRACED = re.compile(r"\s*\{([^{}]*)\}\s*")
_SPELLINGS = tuple(
    (re.compile(re.escape(written) + (r"(?![A-Za-z])" if written[-1].isalpha() else "")), kept)
    for written, kept in (
        (r"\dfrac", r"\frac"),
        (r"\tfrac", r"\frac"),
        (r"\displaystyle", ""),
        (":=", "="),
        (r"\checkmark", ""),
        ("infinity", r"\infty"),
        (r"\log_e", r"\ln"),
        (r"\log_{e}", r"\ln"),
        (r"\leq", r"\le"),
        (r"\geq", r"\ge"),
        (r"\varnothing", r"\emptyset"),
        (r"^{\circ}", r"^\circ"),
    )
)
# `{8 \choose 4}` and `\binom84`, with arguments that no braces are in.
_CHOOSE = re.compile(
    r"(?:\{|^)([^{}=]*[^{}=\s])\s*\\choose(?![A-Za-z])\s*([^{}=]+)(?:\}|$)|\\[dt]?binom\s*(\d)\s*(\d)(?!\d)"
)
# The library reads `2\binom{8}{4}` and `\binom{3}{1}\binom{2}{1}` as mixed numbers: 2 and 70, 3 and 2.
_TIMES_BINOMIAL = re.compile(r"(?<=\d)\s*(?=\\[dt]?binom(?![A-Za-z]))")
_BINOMIAL_TIMES = re.compile(r"(\\[dt]?binom\s*\{[^{}]*\}\s*\{[^{}]*\})\s*(?=\\[dt]?binom|\\frac|\()")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!)(?=\d{3}(?!\d))")
_COMMA_THOUSANDS = re.compile(r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL_SIGN = re.compile(r"(?<=\d)\{[,.]\}(?=\d)")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]\+?(-?\d+)")
_MIXED = re.compile(r"(-?\d+) (\d+)/(\d+)")
_REPEATING = re.compile(
    r"(-?)(\d*)\.(\d{0,99})\\(?:overline|bar|overset\{\s*[-_]+\s*\})\s*\{(\d{1,99})\}(?:\\ldots|\\dots|\.{3})?"
)
_NEARLY = re.compile(r"(?:\\approx|\\simeq|\\sim|=)(?![A-Za-z])\s*")
# What leads to an answer, and is no part of it: "The answer is 5", `\therefore 5`, `x is 5`.
_LED = re.compile(
    r"(?:\\(?:therefore|implies|Rightarrow|Longrightarrow)(?![A-Za-z])|\\text\s*\{[^{}]*(?:\bis|\bare|\bequals|\bexactly|\bso|\bthus|\bhence|[:=])\s*\}"
    r"|(?:[Tt]hus|[Hh]ence|[Ss]o|[Tt]herefore),?\s|(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?\s*:?\s+|[A-Za-z] is\s+"
    # "The smallest n is 36", "Number of ways: 36", but not "Twice n is 36".
    r"|\\text\s*\{\s*[Tt]he [^{}]*\}\s*[A-Za-z]\s*\\text\s*\{\s*(?:is|equals)\s*:?\s*\}"
    r"|\\text\s*\{\s*(?!(?:[Tt]wice|[Dd]ouble|[Hh]alf|[Tt]riple|[Nn]ot)\b)[A-Za-z][^{}]*[a-z]{2}\s*\}\s*:(?=[\s~]*[-\d$\\])(?!\s*\\text))"
    r"(?:\\[,;: ]|\s|:)*(?=\S)"
)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)")
_DOTTED = re.compile(r"\\dot\{(\d)\}(?:(\d*)\\dot\{(\d)\})?")
_WORD_BASE = re.compile(r"_\s*\{\s*\\(?:text|mathrm)\s*\{\s*([a-z]+)\s*\}\s*\}")
_TOKEN_BRACES = re.compile(r"([\^_])\{(\w)\}")
_TURNED = re.compile(r"([^=<>\\A-Za-z]+)=\s*([A-Za-z])")
_ROW = re.compile(r"-?\d+(?:\s+-?\d+)+")
_BASED = re.compile(r"([0-9A-Za-z]+)_\{?(\d{1,2})\}?")

_DECIMAL = re.compile(r"([-+]?)\s*(\d*)(?:\.(\d*))?")
_RATIO = re.compile(r"([-+]?)\s*(?:\\frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))|(\d+)\s*/\s*(\d+))")

# Longer integers are beyond what Python reads in a short time.
_LONGEST_NUMBER = 200

_WORD_COMMANDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
# A date's or a room's number may follow.
_LETTERS = re.compile(r"\(?[A-Za-z][A-Za-z' -]*(?:(?<=[A-Za-z]{3} )\d+)?\)?\.?")
_ENGLISH = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*|an? [a-z ]+")
_FUNCTION = re.compile(r"sin|cos|tan|log|ln|exp|sqrt|pi|infty")
_WORD = re.compile(r"[A-Za-z]{3}")
_LEAST_LETTERS = 4
_SMALL_WORDS = re.compile(
    r"^(?:an?|the) (?=[a-z]{3})|^due (?=north|east|south|west)|(?<=^odd) function$|(?<=^even) function$"
    r"|^(?:option|choice|answer) (?=[a-e]$)"
)


def plain(text: str) -> str:
    r"""The answer without what does not change it: dollar signs around it, a full stop, spaces in numbers.

    A decimal that repeats is a fraction, `2 1/2` a mixed number, and `3=x` is turned round.

    Example: `plain(r"$1\,234.$")` is `1234`, `plain("1e3")` is `1\times10^{3}`.
    """
    text = text.strip()
    for before, after in _WRAPPERS:
        if len(text) > len(before) + len(after) and text.startswith(before) and text.endswith(after):
            text = text[len(before) : -len(after)].strip()
    text = _OPTION.sub("", text, count=1) if _OPTION.match(text) else text
    if _DRESS.search(text):
        text = _DRESS.sub("", text).strip()
        braced = _BRACED.fullmatch(text)
        text = braced[1].strip() if braced else text
    environment = _ENVIRONMENT.fullmatch(text)
    text = (_in_a_row(environment["rows"]) or text) if environment else text
    emphasised = _EMPHASIS.fullmatch(text)
    text = emphasised[1].strip() if emphasised else text
    for written, kept in _SPELLINGS:
        text = written.sub(kept.replace("\\", r"\\"), text)
    text = _CHOOSE.sub(lambda match: rf"\binom{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}", text)
    text = _BINOMIAL_TIMES.sub(r"\1\\cdot ", _TIMES_BINOMIAL.sub(r"\\cdot ", text))
    text = _LED.sub("", text, count=1) if _LED.match(text) else text
    text = text.replace("{:}", ":")
    text = _DECIMAL_SIGN.sub(".", _THOUSANDS.sub("", _CLOSING.sub("", text)))
    if "," in text and not {"(", "[", "{"}.intersection(text):
        text = _COMMA_THOUSANDS.sub(lambda number: number[1].replace(",", ""), text)
    text = _TIMES_TEN.sub(r"\\times ", text)
    text = _WORD_BASE.sub(_base, _DOTTED.sub(r"\\overline{\1\2\3}", text))
    text = _NEARLY.sub("", text, count=1) if _NEARLY.match(text) else text
    text = _TURNED.sub(r"\2=\1", text) if _TURNED.fullmatch(text) else text
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text) if _MIXED.fullmatch(text) else text
    text = _REPEATING.sub(_fraction, text)
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    scientific = _SCIENTIFIC.fullmatch(text)
    return rf"{scientific[1]}\times10^{{{scientific[2]}}}" if scientific else _number(text)


def _in_a_row(rows: str) -> str:
    """The rows of equations as a list; a row that begins with a relation goes on with the one before it.

    Rows with other columns, as of a function in pieces, are none: `""`.
    """
    found: list[str] = []
    for row in _ALIGNED.sub("", rows).split(r"\\"):
        equation = row.strip(" ,;\n\t")
        if found and _GOES_ON.match(equation):
            found[-1] += equation
        elif equation:
            found.append(equation)
    return "" if "&" in "".join(found) else ", ".join(found)


def _number(text: str) -> str:
    """The number that English words are, in digits; other texts as they are."""
    inner = _WORD_COMMANDS.sub(r"\1", text).strip(" .") if text[:1] == "\\" or text.isascii() else ""
    number = number_in_words(inner) if _ENGLISH.fullmatch(inner) else None
    if number is None:
        return text
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _base(word: re.Match[str]) -> str:
    """An index that is a word, as a number: of `113_{\\text{six}}`."""
    number = number_in_words(word[1])
    return word[0] if number is None else f"_{{{number}}}"


def _fraction(decimal: re.Match[str]) -> str:
    """The fraction that a repeating decimal is."""
    sign, whole, once, again = decimal.groups()
    below = int("9" * len(again) + "0" * len(once))
    above = int((whole or "0") + once + again) - int((whole or "0") + once)
    return rf"{sign}\frac{{{above}}}{{{below}}}"


def fraction_of(text: str) -> Fraction | None:
    """The value of a plain integer, decimal or fraction, without the library; None for anything else."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER:
        return None
    decimal = _DECIMAL.fullmatch(text)
    if decimal and (decimal[2] or decimal[3]):
        return Fraction(f"{decimal[1]}{decimal[2] or '0'}.{decimal[3] or '0'}")
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    above, below = (int(each) for each in ratio.groups()[1:] if each)
    return Fraction(-above if ratio[1] == "-" else above, below) if below else None


def is_row(text: str) -> bool:
    """Return True for numbers in a row with only spaces between them, which are a text, and no mathematics."""
    return _ROW.fullmatch(text) is not None


def is_words(text: str) -> bool:
    """Return True for words of a language: set as text, or at least four letters and no function's name.

    `p - q` and `pq - r` are differences: of words with a hyphen one at least has three letters.
    """
    inner = _WORD_COMMANDS.sub(r"\1", text).strip()
    if not _LETTERS.fullmatch(inner):
        return False
    if inner != text:
        return True
    if "-" in inner and not _WORD.search(inner):
        return False
    return len(inner.strip("().")) >= _LEAST_LETTERS and not _FUNCTION.search(inner)


def option_of(text: str) -> str:
    r"""The label of the one option that an answer is, with its value; `""` of another answer.

    Example: of `\textbf{(C)}\ 12` it is `C`.
    """
    match = _OPTION.match(text)
    if match is None or _CAPITAL.search(text, match.end()):
        return ""
    return next(sign for sign in match[0] if sign in "ABCDE")


def label_of(text: str) -> str:
    r"""The label that an answer is, alone. Example: of `\text{(C)}` it is `C`."""
    match = _LABEL.fullmatch(_WORD_COMMANDS.sub(r"\1", text).strip())
    return match[1] if match else ""


def words(text: str) -> str:
    r"""Words in one spelling: no case, brackets or article, no "due" before "east", "function" behind "odd", "option".

    Example: `words(r"\text{ (B)}.")` is `b`.
    """
    inner = _WORD_COMMANDS.sub(r"\1", text)
    said = " ".join(inner.replace("(", " ").replace(")", " ").strip(" .").casefold().split())
    return _SMALL_WORDS.sub("", said)


def has_index(text: str) -> bool:
    """Return True for a number with a number as its index, which is a base or nonsense."""
    return re.fullmatch(r"-?\d+_\{?\d+\}?", text.replace(" ", "")) is not None


def in_base(text: str) -> tuple[str, int] | None:
    """The digits and the base of a number such as `2516_8`; None for anything else."""
    match = _BASED.fullmatch(text.replace(" ", ""))
    if match is None or not 2 <= int(match[2]) <= 36:
        return None
    digits, base = match[1], int(match[2])
    try:
        int(digits, base)
    except ValueError:
        return None
    return digits, base


def same_text(gold: str, given: str) -> bool:
    """Return True where two answers are written alike, spaces aside."""
    return without_spaces(gold) == without_spaces(given)


def without_spaces(text: str) -> str:
    r"""Remove spaces, but keep one between two digits, `1 2` is not `12`; and braces around one sign, `x^{2}`."""
    while _TOKEN_BRACES.search(text):
        text = _TOKEN_BRACES.sub(r"\1\2", text)
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))


def bracket(text: str) -> str:
    """The bracket that an answer starts with, or another sign: braces hold a set, parentheses a pair or an interval."""
    return text.replace(r"\left", "").lstrip("\\ ")[:1]
