"""Answers that a response takes back: "that is wrong, I give up" after a box.

Three things take an answer back: giving up, calling *that* answer wrong, and naming another one instead. Only talk may
stand between an answer and the sentence that calls it wrong ("Wait, let me check. That is wrong."): behind another
value, claim or option, "that is wrong" speaks of it, but for a last sentence that concludes ("So that is wrong"). The
last word counts: "wait, is that wrong? No, it is right" takes nothing back. Few phrases, so that few right answers are
lost: mere doubt ("I am not sure") is no retraction, nor is a sentence with a condition, or one that asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megasharp.tasks.extraction import boxes, ending, statements

# So much of the end is read: a retraction is one of the last things said.
_LONGEST = 2_000
_TAG_ENDS = "</answer>"

_IS = (
    r"(?:'s| is| was| must be| has to be| seems(?: to be)?| looks)(?: (?:actually|clearly|definitely|completely|also))?"
)
_WRONG = r"(?:wrong|incorrect|mistaken|false|invalid|an error|a mistake|not (?:right|correct|it|valid))\b"
_OWN = r"(?:my|the (?:above|boxed|final)|this|that) (?:\w+ )?(?:answer|result|value|box|solution|conclusion)(?: above)?"
_THAT = rf"(?:that|this|it|the (?:answer|result|value|box)|{_OWN})"
# "It is wrong to assume ..." and "this is not correct for odd n" speak of something else.
_OF_IT = r"(?!\s+(?:to|for|that|if|when|in|of|unless|under|with|only|because|since|as)\b)"
_CALLED_WRONG = re.compile(
    rf"\b{_THAT}{_IS} {_WRONG}{_OF_IT}|\b{_THAT} (?:cannot|can't|can not) be (?:right|correct|true)\b{_OF_IT}"
    r"|\b(?:this|that|it) (?:does not|doesn't) work\b|\bI (?:no longer|don't|do not) believe (?:that|this|it)\b"
    r"|\b(?:right|correct)\?\s+no\b|\u8fd9(?:\u662f)?\u4e0d\u5bf9|\u7b54\u6848(?:\u662f)?\u9519",
    re.IGNORECASE,
)
_UNABLE = r"(?:cannot|can't|could not|couldn't|am unable to|am not able to|do not know how to|don't know how to)"
_GIVEN_UP = re.compile(
    r"\bI(?:'m| am)? (?:(?:will |must |have to )?give|giving) up\b(?! on\b)|\bI'll give up\b(?! on\b)"
    r"|\b(?:strike|scratch|forget) that\b|\bnever mind\b|\bactually,? no\b(?=[.,;!]|\s*$)"
    r"|(?:^|[.!?;,:\n]\s*|\bplease )(?:disregard|ignore) (?:that|this|it|my \w+|the (?:box|above|(?:above )?answer))\b"
    r"(?! (?:choice|option|key))"
    r"|\bI (?:take|have to take|must take) (?:that|this|it) back\b|\bI (?:withdraw|retract)\b"
    r"|\bI (?:have|can give|can offer) no (?:final )?answer\b(?! key)|\bI was (?:wrong|mistaken)\b"
    r"|\bI (?:change|must change|have to correct|must correct) my (?:answer|mind|result)\b"
    rf"|\bI {_UNABLE} (?:\w+ )?(?:determine|solve|answer|decide|finish|fix)\b"
    # "I cannot solve this in fewer steps, but ..." speaks of another way.
    r"(?![^.!?\n]*\b(?:fewer|faster|simpler|without|by|but)\b)"
    rf"|\bI {_UNABLE} (?:\w+ )?(?:give|find) (?:an?|any|the) (?:(?:final|correct|right|definite) )?"
    r"(?:answer|solution)\b"
    r"(?=\W*$|[.,;!\n])"
    r"|\bI (?:do not|don't) know(?: the answer)?(?=\W*$)|\bI have no idea(?=\W*$)"
    r"|\bI (?:have )?made (?:a|an|some)(?: \w+)? (?:mistake|error)"
    r"|\bthere must be (?:an error|a mistake)(?: (?:here|somewhere))?(?=\W*$|[.,;!\n])"
    r"|\u6211\u653e\u5f03",
    re.IGNORECASE,
)
_VALUE = r"[\s$*(\[\\]*(?P<{}>-?\d[\d.,/]*(?<![.,])|[A-Za-z](?=[)\]])|[A-HJ-Z]\b)[\s$*)\]]*(?=[.,;!]|$)"
_INSTEAD = re.compile(
    r"\b(?:it|that|this|the (?:\w+ )?(?:answer|value|result|option))"
    r"(?:(?:'s| is) (?:actually|really|rather|in fact)| should (?:be|have been)"
    r"| (?:could|may|might) (?:also|as well) be)" + _VALUE.format("is") + r"|\b(?:actually|sorry|oops|correction|no),? "
    r"(?:it(?:'s| is)|that(?:'s| is)|the (?:\w+ )?(?:answer|value|result) is)"
    + _VALUE.format("no")
    + r"|\bI meant(?: to (?:say|write))?"
    + _VALUE.format("meant")
    + r"|^[\s$*)\]}\\.,;?]*(?:or|alternatively|maybe|perhaps|possibly)\b"
    r"(?:[\s,]|\b(?:maybe|perhaps|possibly|else|even)\b)*" + _VALUE.format("or"),
    re.IGNORECASE | re.MULTILINE,
)
_KEPT = re.compile(
    r"\b(?:indeed|verified|confirmed)\b"
    rf"|\b{_THAT}(?:'s| is| was)(?: \w+)? (?:right|correct|fine|consistent|ok|okay|valid)\b"
    r"|\b(?:is|are|was) (?:indeed|in fact) (?!not\b)|\bchecks out\b"
    r"|\b(?:it|this|that|answer|result|box) (?:still )?(?:stands|holds|works)\b"
    r"|\u6ca1\u9519|(?<!\u4e0d)\u6b63\u786e"
    r"|\bnothing (?:is|was) wrong\b|\b(?:no|not an?) (?:error|mistake)\b|\bis (?:not|n't) wrong\b",
    re.IGNORECASE,
)
_YES = re.compile(r"\byes\b", re.IGNORECASE)
_NOT_MEANT = re.compile(
    r"\?$|\b(?:if|unless|whether|would|might|could be|common|often|(?:some|many) (?:people|students)|instead of"
    r"|initially|at first|earlier|previous(?:ly)?|before|attempt|corrected|fixed|scratch)\b",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(r"\W*(?:so|hence|thus|therefore|wait|hmm|no|oh)\b", re.IGNORECASE)
# Another value, option, formula or claim.
_OTHER = re.compile(r"\d|[$\\=\"]|\([A-Za-z]\)|\b(?:option|choice|claim|statement)\b", re.IGNORECASE)
_TALK_WORDS = 8

TAKEN_BACK = "the answer is taken back"


def withdrawn(text: str) -> bool:
    """Return True where a response takes its answer back behind its last box and tags, or else its last statement.

    Example: `withdrawn(r"\\boxed{C}. Wait, that is not right. I give up.")` is True.
    """
    text = ending(text)
    tagged = text.rfind(_TAG_ENDS)
    ends = [box.end for box in boxes(text)[-1:]] + [tagged + len(_TAG_ENDS)] * (tagged >= 0)
    ends = ends or [start for _, start in statements(text)[-1:]]
    return bool(ends) and taken_back(text[max(ends) :])


def taken_back(after: str, answer: str = "") -> bool:
    """Return True where the text after an answer takes it back, and does not confirm it afterwards.

    With the answer itself, "Or 6" and "No, it should be 6" take back what is not 6.

    Example: `taken_back(". Wait, that is wrong, I give up.")` is True, `taken_back(". Let me verify: yes.")` is not.
    """
    after = after[-_LONGEST:].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    taken = False
    for _, what in sorted(_said(after, answer)):
        taken = what == "taken" or (taken and what != "kept")
    return taken


def _said(after: str, answer: str) -> Iterator[tuple[int, str]]:
    """Where something takes an answer back or keeps it, and which of these it does."""
    for match in _GIVEN_UP.finditer(after):
        if not _NOT_MEANT.search(_sentence(after, match)):
            yield match.start(), "taken"
    for match in _CALLED_WRONG.finditer(after):
        sentence = _sentence(after, match)
        concludes = _CONCLUDES.match(sentence) and not after[match.end() :].strip(" .!\n")
        if (concludes or _is_talk(after[: match.start()])) and not _NOT_MEANT.search(sentence):
            yield match.start(), "taken"
            yield from ((match.end() + yes.start(), "kept") for yes in _YES.finditer(after[match.end() :]))
    for match in _INSTEAD.finditer(after):
        value = next(filter(None, match.groups()))
        if answer and value not in answer and _is_talk(after[: match.start()]):
            yield match.start(), "taken"
    yield from ((match.start(), "kept") for match in _KEPT.finditer(after))


def _sentence(text: str, match: re.Match[str]) -> str:
    """The sentence in which a match begins, to the end of the one in which it ends."""
    start = max(text.rfind(mark, 0, match.start()) for mark in ".!?\n") + 1
    end = re.compile(r"[.!?\n]|$").search(text, match.end())
    return text[start : end.end() if end else None].strip()


def _is_talk(between: str) -> bool:
    """Return whether nothing but talk lies between an answer and what is said of it."""
    return len(between.split()) <= _TALK_WORDS and not _OTHER.search(between.lstrip(" \n$*.,;:)]}\\"))
