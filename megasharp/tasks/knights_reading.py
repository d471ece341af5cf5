"""Statements of who is a knight and who a knave, as a response writes them.

A text is cut into statements at full stops, commas, semicolons, lines, numbers of a list, and at words that join
without a condition ("and", "but", "while"). A statement is one of

    Alice is [not] a knight        Alice (knight)        Alice: knight, Alice = knight, Alice - knight
    Alice and Boris are [both] knaves                    Neither Alice nor Boris is a knight
    Knights: Alice, Boris          Knights: none         The knights are Alice and Boris
    Only Alice is a knave

with "the" for "a", "must be" or "is also" for "is", and a reason behind it ("because ..."). What a role means may stand
beside it: "a knight (truth-teller)", "a liar (knave)". A verb may be left out after a statement that has one ("Alice is
a knight, Boris a knave"). Anything else, such as "if", "or" and "probably", is no statement, and makes the whole text
unreadable.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection

from megasharp.tasks.wording import undressed


class UnreadableError(ValueError):
    """The text gives no assignment; the error says why."""


# Lines of LaTeX and Markdown part statements: `\\`, the rows of a table, what begins and ends an environment.
_LATEX_BREAK = re.compile(r"\\\\(?:\[[^\]]*\])?|\\q?quad\b|\\(?:begin|end)\s*\{[a-z*]+\}(?:\{[lcr|]*\})?|\\item\b")
_TABLE_ROW = re.compile(r"^\s*\|\s*([^|\n]*?)\s*\|\s*([^|\n]*?)\s*\|\s*$", re.MULTILINE)
_RULE = re.compile(r"^[\s|:-]*-{3}[\s|:-]*$|^\s*`{3}\w*\s*$", re.MULTILINE)
_HEADER = re.compile(r"(?:name|person|people|islander|role|type|kind|identity)s?", re.IGNORECASE)
_PARTS = re.compile(
    r"[,;\n]|[.!](?=\s|$)|(?:^|(?<=\s))\(?\d{1,2}[.)](?=\s)|\b(?:and|but|while|whereas)\b", re.IGNORECASE
)
_INTRODUCTION = re.compile(
    r"(?:(?:so|then|thus|hence|therefore|in conclusion|finally)\b[,:]?\s*"
    r"|(?:the|my|our)?\s*(?:final\s+)?(?:answer|solution)\s*(?:is|:)\s*:?\s*)+",
    re.IGNORECASE,
)
_REASON = re.compile(r"\s(?:because|since|as|for)\s.*", re.IGNORECASE | re.DOTALL)
_DENIED = re.compile(r"(?:it is not true that|it is false that|it is not the case that)\s+", re.IGNORECASE)
_IS = r"(?:is|are|must be|has to be|have to be)"
# Words between a verb and its role that leave what is said as it is.
_ADVERB = r"(?:indeed|clearly|also|therefore|thus|definitely|certainly)"
_ONLY = re.compile(r"only\s+", re.IGNORECASE)
_SHORT_IS = re.compile(r"(?<=\w)'s\s+(?=(?:an?|the|not)\s)")
_TELLS_TRUTH = r"(?:an?\s+)?truth[- ]?tellers?|tells? the truth|truthful"
_LIES = r"(?:an?\s+)?liars?|lies|lie|lying"
_STATEMENT = re.compile(
    rf"(?P<name>\w+)\s*(?:\b{_IS}\b|[:=]|-+>?|→|=>)\s*(?:(?:{_ADVERB}\s+)?(?P<not>not)\s+|(?:{_ADVERB}|both|all)\s+)?"
    r"(?:an?\s+|(?:the|our)\s+(?:only\s+)?)?(?P<role>\w+)(?:\s+(?:too|also))?"
    r"|(?P<named>\w+)\s*[(\[]\s*(?:an?\s+|the\s+)?(?P<bracketed>\w+)\s*[)\]]"
    r"|(?P<short>\w+)\s+(?:an?|the)\s+(?P<same>\w+)",
    re.IGNORECASE,
)
_TURNED = re.compile(r"(?:the|our)\s+(?:only\s+)?(?P<role>\w+)\s+(?:is|must be)\s+(?P<name>\w+)", re.IGNORECASE)
_LIST = re.compile(
    r"(?:the\s+)?(?:only\s+)?(?P<role>\w+)\s*(?:(?:are\b|is\b)?\s*:|(?P<are>\bare\b))\s*(?P<first>.*)",
    re.IGNORECASE | re.DOTALL,
)
_NEITHER = re.compile(
    rf"neither\s+(?P<one>\w+)\s+nor\s+(?P<other>\w+)\s+{_IS}\s+(?:an?\s+)?(?P<role>\w+)", re.IGNORECASE
)
_NOBODY = ("none", "nobody", "no one", "-")


def key(name: str) -> str:
    """Return a name as it is compared: composed accents, small letters."""
    return unicodedata.normalize("NFC", name).casefold()


def assignment(text: str, names: Collection[str], truthful: str, lying: str) -> dict[str, bool]:
    """Read a text: for each name by its `key`, if it is said to be a knight's, by the words for knights and knaves.

    Raises UnreadableError for a part that is no statement, a name that is not one of `names` or that is left out, and
    for two statements of one name that conflict.
    """
    reader = _Reader({key(name) for name in names}, truthful.casefold(), lying.casefold())
    glossed = _glosses(truthful, _TELLS_TRUTH), _glosses(lying, _LIES)
    for part in _parts(text):
        plain = part
        for gloss in glossed:
            plain = gloss.sub(lambda match: match["before"] or match["behind"], plain)
        reader.read(plain)
    return reader.end()


def _glosses(role: str, meaning: str) -> re.Pattern[str]:
    """Return the pattern of a role with what it means in brackets, or the other way round."""
    return re.compile(
        rf"\b(?P<before>{re.escape(role)}s?)\s*\(\s*(?:{meaning})\s*\)"
        rf"|\b(?:{meaning})\s*\(\s*(?:an?\s+)?(?P<behind>{re.escape(role)}s?)\s*\)",
        re.IGNORECASE,
    )


def _parts(text: str) -> list[str]:
    """Cut a text into statements, without marks of LaTeX, Markdown and JSON."""
    text = unicodedata.normalize("NFC", text)
    text = _RULE.sub("\n", _LATEX_BREAK.sub("\n", text.replace("\\{", "").replace("\\}", "")))
    text = _TABLE_ROW.sub(lambda row: "" if _HEADER.fullmatch(row[2]) else f"{row[1]}: {row[2]}", text)
    found: list[str] = []
    for line in text.splitlines():
        plain = undressed(line.replace("&", " ")).replace("*", "").replace("\\", "").replace("n't ", " not ")
        plain = _SHORT_IS.sub(" is ", plain)
        for part in _PARTS.split(plain.translate(_MARKS)):
            statement = part.strip().removeprefix("- ").strip(" `")
            if statement:
                found.append(statement)
    return found


_MARKS = str.maketrans("", "", "\"{}'`")


class _Reader:
    """The roles said so far; `listed` is the role of a list that goes on, `waiting` are names before "are knights".

    `only` has who alone is said to be of a kind, `sole` is True in such a statement.

    A denial ("it is not true that ...") may reach over what follows it, so all that follows must be denied too.
    """

    def __init__(self, names: set[str], truthful: str, lying: str) -> None:
        self._names = names
        self._roles = {truthful: True, lying: False}
        self._plural = {f"{truthful}s": True, f"{lying}s": False}
        self._said: dict[str, bool] = {}
        self._listed: bool | None = None
        self._waiting: list[str] = []
        self._denies = False
        self._sole = False
        self._only: list[tuple[bool, set[str]]] = []

    def read(self, part: str) -> None:
        """Take one part of the text. Raises UnreadableError where it is no statement."""
        part = _INTRODUCTION.sub("", part, count=1) if _INTRODUCTION.match(part) else part
        part = _REASON.sub("", part).strip()
        denied = _DENIED.match(part)
        part = part[denied.end() :] if denied else part
        if not part:
            return
        header = None if denied or self._denies else _LIST.fullmatch(part)
        if header is not None and header["role"].casefold() in (
            self._plural if header["are"] else self._plural | self._roles
        ):
            self._settle(part)
            self._listed = (self._plural | self._roles)[header["role"].casefold()]
            part = header["first"].strip()
        if self._listed is not None and (key(part) in self._names or not part or part.casefold() in _NOBODY):
            if key(part) in self._names:
                self._say(part, self._listed)
            return
        self._listed = None
        self._statement(part, bool(denied))

    def _statement(self, part: str, denied: bool) -> None:
        neither = _NEITHER.fullmatch(part)
        if neither is not None and neither["role"].casefold() in self._roles:
            for name in (neither["one"], neither["other"]):
                self._say(name, not self._roles[neither["role"].casefold()])
            return
        self._denies, before = denied, self._denies
        if before and not denied:
            raise UnreadableError(f"{part[:80]!r} may be denied or not")
        part = self._without_only(part, denied)
        bare = part.removeprefix("both ").removeprefix("Both ")
        if key(bare) in self._names and not denied:
            self._waiting.append(bare)
            return
        turned = _TURNED.fullmatch(part)
        # "The knight is Alice."
        if turned is not None and turned["role"].casefold() in self._roles:
            part = _TURNED.sub(r"\g<name> is a \g<role>", part)
        match = _STATEMENT.fullmatch(part)
        name = match and (match["name"] or match["named"] or match["short"])
        role = match and (match["role"] or match["bracketed"] or match["same"]).casefold()
        several = role in self._plural
        if match is None or not name or role not in self._roles | self._plural or (self._waiting and not several):
            raise UnreadableError(f"{part[:80]!r} does not say who is what")
        if match["short"] and not self._said:
            raise UnreadableError(f"{part[:80]!r} has no verb")
        knight = (self._roles | self._plural)[role] != (bool(match["not"]) != denied)
        for each in (*self._waiting, name):
            self._say(each, knight)
        self._only += [(knight, {key(each) for each in (*self._waiting, name)})] * self._sole
        self._waiting, self._sole = [], False

    def _without_only(self, part: str, denied: bool) -> str:
        """Take "only" from a statement, and note that nobody else may be of its kind."""
        only = _ONLY.match(part)
        if only is None:
            return part
        self._settle(part)
        if denied:
            raise UnreadableError(f"{part[:80]!r} is denied")
        self._sole = True
        return part[only.end() :]

    def _say(self, name: str, knight: bool) -> None:
        if key(name) not in self._names:
            raise UnreadableError(f"{name} is not in the puzzle")
        if self._said.setdefault(key(name), knight) != knight:
            raise UnreadableError(f"{name} is said to be both")

    def _settle(self, part: str) -> None:
        if self._waiting:
            raise UnreadableError(f"nothing is said of {self._waiting[0]} before {part[:80]!r}")

    def end(self) -> dict[str, bool]:
        """Return what was said of all names. Raises UnreadableError where nothing was of some."""
        self._settle("the end")
        if missing := self._names - self._said.keys():
            raise UnreadableError(f"nothing is said of {', '.join(sorted(missing))}")
        for kind, names in self._only:
            if names != {name for name, knight in self._said.items() if knight == kind}:
                raise UnreadableError(f"not only {', '.join(sorted(names))}")
        return self._said
