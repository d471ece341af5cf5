r"""The label of an option that a response chooses: `(B)`, `B. a comet`, `a comet (B)`, "option B is correct".

A label may be followed by its own option's text, or by a reason, but by no other option's text, and by no other label
that it leaves open: "B or C", "B. or maybe C", "B, unless the largest is meant, then A" choose nothing. A label that is
ruled out ("B, not A") is no choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
_END = re.compile(r"\s*(?:[.:)\],;(].*|(?i:because|since)\b.*|-\s.*)?", re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9]+")
_BETWEEN = ("and", "or")
_OPEN = r"(?:or|and|but|maybe|perhaps|possibly|probably|likely|unless|alternatively|also|either|if)\b"
_HEDGE = re.compile(rf"[/&|?]|{_OPEN}", re.IGNORECASE)
_RULED_OUT = re.compile(
    r"\b(?:not|than|instead of|neither|nor)\s+(?:(?:option|choice|answer)\s+)?[(\[]?[A-Z0-9]{1,2}\b", re.IGNORECASE
)
# No article ("A comet"), and no degree's C.
_OTHER = re.compile(
    r"(?<![\w'}°])([B-Z]|A(?!\s+(?!too|also|as|and|or)[a-z])|\d{1,2})(?![\w'])|[(\[]([A-Za-z0-9]{1,2})[)\]]"
)
_HEDGE_BEFORE = re.compile(rf"\b{_OPEN}(?:\W|\b(?:even|it|is|s|option|choice)\b)*$", re.IGNORECASE)
_REASON = re.compile(r"(?:because|since|as)\b", re.IGNORECASE)
# Statements of a choice beside "the answer is".
_CHOSEN = re.compile(
    r"\b(?:correct|right|best) (?:option|choice) is[\s:*]+(?P<named>[^\n]+)"
    r"|\bI(?: would|'d)? (?:choose|pick|select)[\s:*]+(?P<picked>[^\n]+)"
    r"|\b(?:option|choice|answer)\s+(?P<called>\W{0,4}[A-Za-z0-9]{1,2}\b\W{0,4}?)\**\s+is (?:the )?(?:correct|right)\b"
    r'|"answer"\s*:\s*(?P<field>[^\n,}]+)',
    re.IGNORECASE,
)


def chosen_label(text: str, options: Mapping[str, str]) -> str | None:
    """Return the label that a response chooses of `options`, labels and their texts (`""` where a text is not known).

    It is looked for in the last box, and in a label stated after that ("... so the answer is C"); without a box, after
    the last "answer is"; else in another statement of a choice, in answer tags, or in a response that is nothing else.
    None where it is in none of them, where several boxes are offered together, or where it is taken back.
    """
    text = displayed(own_part(text))
    found = boxes(text)
    end = found[-1].end if found else 0
    stated = statements(text[end:])
    said, start = stated[-1] if stated else ("", 0)
    label = label_in(said.strip(), options) if stated else None
    if stated and (label is not None or not found):
        if label is None:
            return None
        behind = re.sub(rf"\W*{re.escape(label)}\b\W?", "", text[end + start :], count=1, flags=re.IGNORECASE)
        return None if taken_back(behind, label) else label
    if found:
        labels = {label_in(each, options, boxed=True) for each in joined_boxes(text)[0]}
        label = labels.pop() if len(labels) == 1 else None
        return None if label is None or taken_back(text[end:], label) else label
    chosen = [next(filter(None, match.groups())) for match in _CHOSEN.finditer(text[-_MOST:])]
    tag = last_tag(text)
    return label_in(chosen[-1] if chosen else tag if tag is not None else text[: _MOST + 1], options)


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
    named = [match for match in _OTHER.finditer(core) if (match[1] or match[2].upper()) in others]
    told = any(text and " ".join(text.casefold().split()) in core.casefold() for text in others.values())
    if not _REASON.match(core) and (named or told) and (boxed or _HEDGE.match(core)):
        return True
    if not named:
        return False
    if _REASON.match(core):
        last = named[-1]
        return not core[last.end() :].strip(" .)!?\"'") and bool(_HEDGE_BEFORE.search(core[: last.start()]))
    return bool(_HEDGE.match(core)) or any(_HEDGE_BEFORE.search(core[: each.start()]) for each in named)


def _is_text(given: str, option: str) -> bool:
    """Return whether these are the words of an option whose text is known."""
    wanted, found = (
        "".join(undressed(text).casefold().split()).strip(".\"'").replace("\\", "") for text in (option, given)
    )
    return bool(wanted) and found == wanted
