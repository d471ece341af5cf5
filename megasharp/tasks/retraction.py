"""Answers that a response takes back: "that is wrong, I give up" after a box.

The last word counts: "wait, is that wrong? No, it is right" takes nothing back. A sentence takes an answer back where
it calls *that* answer wrong, or says that there is none; one with a condition ("if that is wrong"), one that asks, or
another's mistake ("a common mistake") does not. Few phrases, so that few right answers are lost: mere doubt ("I am not
sure") is no retraction.
"""

from __future__ import annotations

import re

from megasharp.tasks.extraction import boxes, ending, statements

# So much of the end is read: a retraction is one of the last things said.
_LONGEST = 2_000
_TAG_ENDS = "</answer>"

_ANSWER = r"(?:the|my|this|that) (?:\w+ )?(?:answer|result|value|box|solution|calculation|conclusion)(?: \w+){0,3}?"
_THAT = rf"(?:that|this|it|{_ANSWER})"
_TAKEN = re.compile(
    rf"\b{_THAT}(?:'s| is| was| must be| has to be| seems(?: to be)?| looks)"
    r" (?:actually |clearly |definitely |completely |also )?"
    r"(?:wrong|incorrect|mistaken|an error|a mistake|not (?:right|correct))\b"
    # "It is wrong to assume ..." and "this is not correct for odd n" speak of something else.
    r"(?!\s+(?:to|for|that|if|when|in|of|unless|under|with|only)\b)"
    rf"|\b{_THAT} (?:cannot|can't|can not) be (?:right|correct|true)\b"
    r"|\bI (?:have )?made (?:a|an|some|the)(?: \w+)? (?:mistake|error)|\bthere must be (?:an error|a mistake)\b"
    r"|\bactually,? no\b|\bI give up\b|\b(?:strike|scratch) that\b"
    r"|\b(?:disregard|ignore) (?:that|this|it|my|the (?:box|answer|above|result))"
    r"|\bI (?:take|have to take|must take) (?:that|this|it) back\b|\bI (?:withdraw|retract)\b"
    r"|\bI (?:have|can give|can offer) no (?:final )?answer\b|\bI (?:change|must change|have to correct) (?:my|the) "
    r"|\bI (?:cannot|can't|could not|couldn't|am unable to|am not able to|do not know how to|don't know how to) "
    r"(?:\w+ )?(?:determine|solve|answer|decide|finish|fix"
    r"|(?:give|find) (?:an?|any|the) (?:\w+ )?(?:answer|solution))\b"
    r"|\bI (?:do not|don't) know(?: the answer)?(?=\W*$)"
    r"|\u6211\u653e\u5f03|\u8fd9(?:\u662f)?\u4e0d\u5bf9|\u7b54\u6848(?:\u662f)?\u9519",
    re.IGNORECASE,
)
_KEPT = re.compile(
    r"\b(?:yes|indeed|verified|confirmed)\b"
    rf"|\b{_THAT}(?:'s| is| was)(?: \w+)? (?:right|correct|fine|consistent|ok|okay|valid)\b"
    r"|\b(?:is|are|was) (?:indeed|in fact) |\bchecks out\b"
    r"|\b(?:it|this|that|answer|result|box) (?:still )?(?:stands|holds)\b"
    r"|\u6ca1\u9519|(?<!\u4e0d)\u6b63\u786e"
    r"|\bnothing (?:is|was) wrong\b|\b(?:no|not an?) (?:error|mistake)\b|\bis (?:not|n't) wrong\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]?")
_NOT_MEANT = re.compile(
    r"\?$|\b(?:if|unless|whether|would|might|could be|common|often|many|some (?:people|students)|instead of)\b"
    # "A quick count gives 6, but that is wrong" speaks of the 6.
    r"|\w+ \w+ \w+,? but (?:this|that|it)\b",
    re.IGNORECASE,
)


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


def taken_back(after: str) -> bool:
    """Return True where the text after an answer takes it back, and does not confirm it afterwards.

    Example: `taken_back(". Wait, that is wrong, I give up.")` is True, `taken_back(". Let me verify: yes.")` is not.
    """
    taken = False
    for match in _SENTENCE.finditer(after[-_LONGEST:].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")):
        sentence = match[0].strip()
        found = [(each.start(), True) for each in _TAKEN.finditer(sentence) if not _NOT_MEANT.search(sentence)]
        found += [(each.start(), False) for each in _KEPT.finditer(sentence)]
        taken = max(found)[1] if found else taken
    return taken
