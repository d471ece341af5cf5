r"""The label of an option that a response chooses: `(B)`, `B. a comet`, `a comet (B)`, "option B is correct".

A label may be followed by its own option's text, or by a reason, but by no other option's text, and by no other label
that it leaves open: "B or C", "B. or maybe C", "B, unless the largest is meant, then A" choose nothing. A label that is
ruled out ("B, not A") is no choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megasharp.tasks.choice_sentences import ANSWERS, chosen, concluded, instead
from megasharp.tasks.extraction import CUT, boxes, displayed, joined_boxes, last_tag, own_part, statements
from megasharp.tasks.retraction import taken_back
from megasharp.tasks.wording import undressed

_MOST = 2_000
# In mathematics the text of an option is set so, behind a letter that needs no sign: `B \text{ comet}`.
_LETTER_AND_TEXT = re.compile(r"^(\s*[A-Za-z])\s*(?=\\(?:text|textrm|mbox|mathrm)\s*\{[^{}]*\}\s*$)")
_BEFORE = r"(?i:(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:)[\s:]*)?(?i:option|choice)?\s*"
_LABEL = re.compile(
    rf"\s*{_BEFORE}(?:[(\[\"']\s*([A-Za-z0-9]{{1,2}})\s*[)\]\"']|([A-Za-z0-9]{{1,2}})(?![A-Za-z0-9]|(?<=\d)[.,]\d))(.*)",
    re.DOTALL,
)
_BEHIND = re.compile(r"(.*\S)\s*[(\[]\s*([A-Za-z0-9]{1,2})\s*[)\]]\s*\.?\s*", re.DOTALL)
# A label without brackets may be followed by its option's text, as in "B. a comet", or by a reason, but not by more of
# a sentence, as in "A comet".
# "As well as B" is no reason, nor is "as is B".
_AS = r"as(?!\s+(?:well|is|are|good|much)\b)"
_END = re.compile(
    rf"\s*(?:[.:)\],;(].*|(?i:because|since|{_AS})\b.*|(?i:rather than|instead of|and not)\b[^?]*|-\s.*|[!\"]\W*)?",
    re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z0-9]+")
_BETWEEN = ("and", "or")
_OPEN = r"(?:or|and|but|maybe|perhaps|possibly|probably|likely|unless|alternatively|also|either|if)\b"
_HEDGE = re.compile(rf"[/&|?]|as\s+(?:well|is|are|good|much)\b|{_OPEN}", re.IGNORECASE)
_ONE = r"(?:(?:option|choice|answer)\s+)?[(\[]?[A-Z0-9]{1,2}\b[)\]]?"
_RULED_OUT = re.compile(
    rf"(?:\band\s+)?\b(?:not|than|instead of|neither|nor)\s+(?:either\s+)?{_ONE}"
    # The whole list where a sentence ends with it.
    rf"(?:(?:(?:,\s*{_ONE})+,?)?\s+(?:or|nor|and)\s+{_ONE}(?=\W*$|[)\]]?[.;!]\s))?"
    rf"|\b(?:both\s+)?{_ONE}(?:,\s*{_ONE})*,?\s+and\s+{_ONE}\s+(?:are|can be)\s+(?:both |all |clearly )?"
    r"(?:wrong|incorrect|false|invalid|nonsense|not|ruled|excluded|eliminated)\b",
    re.IGNORECASE,
)
# "It could be B", "B might also be right", "both B and C are acceptable".
_RIGHT = (
    r"(?:also |equally |just as )?(?:correct|right|valid|acceptable|possible|plausible|true|it|the (?:\w+ )?answer)\b"
)
_MAY = r"(?:could|may|might)"
_ALSO = re.compile(
    rf"\b{_MAY}(?: (?:also|as well|equally|well))* be (?:option |choice |answer )?[(\[]?([A-Z0-9]{{1,2}})\b"
    rf"|(?<![\w'])([A-Z0-9]{{1,2}})\b[)\]]? (?:{_MAY}(?! not)(?: \w+){{0,2}}? be {_RIGHT}|is also {_RIGHT})"
    rf"|\b[Bb]oth [(\[]?([A-Z0-9]{{1,2}})\b[)\]]? and [(\[]?([A-Z0-9]{{1,2}})\b[)\]]? (?:are|could be|may be) {_RIGHT}"
    r"|(?<![\w'])([A-Z0-9]{1,2})\b[)\]]?,? (?:too|as well)(?=[\s.!]*$)"
)
# No article ("A comet"), and no degree's C.
_OTHER = re.compile(
    r"(?<![\w'}°])([B-Z]|A(?!\s+(?!too|also|as|and|or)[a-z])|\d{1,2})(?![\w'])|[(\[]([A-Za-z0-9]{1,2})[)\]]"
)
_HEDGE_BEFORE = re.compile(rf"\b{_OPEN}(?:\W|\b(?:even|it|is|s|option|choice)\b)*$", re.IGNORECASE)
_OR_BEHIND = re.compile(r"[)\]]?,? or\b", re.IGNORECASE)
_REASON = re.compile(rf"(?:because|since|{_AS})\b", re.IGNORECASE)
# The same text in other LaTeX: fractions, and braces around one sign.
_FRACTION = re.compile(r"\\[dt]?frac(?:\{(\w+)\}|(\w))(?:\{(\w+)\}|(\w))")
_BRACED = re.compile(r"\{(\w)\}")


def chosen_label(text: str, options: Mapping[str, str]) -> str | None:
    """Return the label that a response chooses of `options`, labels and their texts (`""` where a text is not known).

    It is looked for in the last box, and in a label stated after that ("... so the answer is C"); without a box, after
    the last "answer is"; else in answer tags, in another sentence that chooses (`choice_sentences.py`), or in a
    response that is nothing else. One that is named instead right behind it ("No wait, C.") replaces it. None where it
    is in none of them, where several boxes are offered together, or where it is taken back.
    """
    text = displayed(own_part(text, ANSWERS))
    found = boxes(text)
    end = found[-1].end if found else 0
    stated = statements(text[end:])
    said, start = stated[-1] if stated else ("", 0)
    label = label_in(said.strip(), options) if stated else None
    if stated and (label is not None or not found):
        first = rf"\W*\b{re.escape(label) if label else '[A-Z0-9]{1,2}'}\b[)\]}}$*\"']*"
        behind = re.sub(first, "", text[end + start :], count=1, flags=re.IGNORECASE)
        # The option's own text is no word about it.
        text_of = options[label].strip() if label else ""
        behind = re.sub(rf"(?i)^\W*{re.escape(text_of)}", "", behind, count=1) if text_of else behind
        return _kept(label, behind, options)
    if found:
        labels = {label_in(each, options, boxed=True) for each in joined_boxes(text)[0]}
        label = labels.pop() if len(labels) == 1 else None
        after = chosen(text[end:][-_MOST:], only=True)
        return (label_in(after, options) if after else None) or _kept(label, text[end:], options)
    tag = last_tag(text)
    if tag is not None:
        return label_in(tag, options)
    sentence = chosen(text[-_MOST:])
    return label_in(text[: _MOST + 1] if sentence is None else sentence, options) or (
        _known_in(concluded(text), options) if sentence is None else None
    )


def _kept(label: str | None, behind: str, options: Mapping[str, str]) -> str | None:
    """Return the label that stands after what is behind it: another one, or none where it is taken back."""
    other = _known_in(instead(behind), options)
    return other or (None if label is None or taken_back(behind, label) else label)


def _known_in(text: str | None, options: Mapping[str, str]) -> str | None:
    return label_in(text, options) if text else None


def label_in(text: str, options: Mapping[str, str], boxed: bool = False) -> str | None:
    """Return the label that an answer consists of; None where it has none or several. Letters may be small.

    In a box another option must not even be named, but for a reason, or as ruled out.
    """
    if len(text) > _MOST:
        return None
    text = undressed(_LETTER_AND_TEXT.sub(r"\1: ", text)).replace("*", "").replace("`", "").lstrip("# ")
    match = _LABEL.match(text)
    label = _known(match[1] or match[2], options) if match else None
    if match and label and (match[1] or _END.fullmatch(match[3]) or _is_text(match[3], options[label])):
        return label if _stands(label, match[3], options, boxed) else None
    behind = _BEHIND.fullmatch(text)
    label = _known(behind[2], options) if behind else None
    return label if behind and label and _is_text(behind[1], options[label]) else None


def _known(label: str, options: Mapping[str, str]) -> str | None:
    return label if label in options else label.upper() if label.upper() in options else None


def _stands(label: str, rest: str, options: Mapping[str, str], boxed: bool) -> bool:
    """Return whether what follows a label leaves it the only choice."""
    if rest.lstrip().startswith(CUT):
        return False
    core = rest.strip(" .:)](,;-\"'")
    if not core or _is_text(core, options[label]):
        return True
    others = [each for each in options if each != label]
    if any(_is_text(core, options[each]) for each in others):
        return False
    # Nothing but labels; another single letter is taken for one.
    words = [word for word in _WORD.findall(core) if word.lower() not in _BETWEEN]
    if any(word.upper() in others for word in words) and all(
        len(word) == 1 or word.upper() in options for word in words
    ):
        return False
    return not _leaves_open(core, {each: options[each] for each in others}, boxed)


def _leaves_open(core: str, others: Mapping[str, str], boxed: bool) -> bool:
    """Return whether a text begins with a hedge and names another option, or has a hedge right before a label.

    In a reason ("because A or C would be red") only what ends it is a hedge; elsewhere in a box each other option is.
    """
    core = _RULED_OUT.sub(" ", core)
    if not _REASON.match(core) and any(each in others for match in _ALSO.finditer(core) for each in match.groups()):
        return True
    named = [match for match in _OTHER.finditer(core) if (match[1] or match[2].upper()) in others]
    told = any(text and " ".join(text.casefold().split()) in core.casefold() for text in others.values())
    if not _REASON.match(core) and (named or told) and (boxed or _HEDGE.match(core)):
        return True
    if not named:
        return False
    if _REASON.match(core):
        last = named[-1]
        return not core[last.end() :].strip(" .)!?\"'") and bool(_HEDGE_BEFORE.search(core[: last.start()]))
    return bool(_HEDGE.match(core)) or any(
        _HEDGE_BEFORE.search(core[: each.start()]) or _OR_BEHIND.match(core, each.end()) for each in named
    )


def _is_text(given: str, option: str) -> bool:
    """Return whether these are the words of an option whose text is known."""
    wanted, found = _plain(option), _plain(given)
    return bool(wanted) and found == wanted


def _plain(text: str) -> str:
    """A text in one spelling: without dress, case, spaces, and what LaTeX needs only now and then."""
    text = "".join(undressed(text).casefold().split()).strip(".\"'")
    text = _FRACTION.sub(lambda match: "/".join(filter(None, match.groups())), text)
    return _BRACED.sub(r"\1", text).replace("\\", "")
