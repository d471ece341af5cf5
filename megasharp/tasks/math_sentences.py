r"""A number or formula that a sentence states in words of its own: "Thus, there are 5 such integers."

Its verb must stand right before it, so that "at least 5", "half of 5" and "the first 5" state nothing, and the sentence
may hold no other number behind it, no condition, doubt or negation, and nothing that announces more ("5 cases to
consider").
"""

from __future__ import annotations

import re

_LONGEST = 400
_VERB = (
    r"(?:is|are|was|were|equals|will (?:be|have|need|cost|make|earn|get|pay)|has|have|had|makes?|made|earns?|earned"
    r"|gets?|got|gains?|gives?|gave|needs?|needed|takes?(?: (?:him|her|them|us|me|it|(?-i:[A-Z][a-z]+)))?|took|costs?"
    r"|spends?|spent|pays?|paid|sells?|sold|buys?|bought|owes?|owns?|runs?|ran|walks?|walked|drives?|drove|travels?"
    r"|travell?ed|eats?|ate|drinks?|drank|uses?|used|saves?|saved|weighs?|receives?|received|reads?|writes?|wrote"
    r"|contains?|holds?|lasts?|requires?|leaves?|collects?|collected|bakes?|baked|plants?|planted|picks?|picked|works?"
    r"|worked|scores?|scored|finds?|found|charges?|charged)"
)
# A formula between signs, and no words between two sums of dollars.
_INLINE = r"\$(?![^$\n]*(?<![\\A-Za-z])[A-Za-z]{2,}\s)[^$\n\d][^$\n]{0,80}\$|\\\((?:(?!\\\))[^\n]){1,80}\\\)"
_STATES = re.compile(
    rf"(?:there (?:is|are|were|will be)|(?:{_INLINE}|[^$.?!;:\\\d\n])+?\s{_VERB})\s+"
    r"(?:(?:only|exactly|precisely|equal to|a total of|in total|then|also|therefore|thus)\s+)*"
    r"(?=[*_$\\(-]{0,6}\d|\$|\\\(|-)",
    re.IGNORECASE,
)
# The last sentence of a response, behind a word that concludes.
_CONCLUSION = (
    r"(?:therefore|thus|hence|so|consequently|in conclusion|in total|as a result|finally)\b,?\s+"
    r"(?:we (?:find|get|have|see|conclude) (?:that )?|it follows that )?"
)
_LAST = re.compile(rf"(?:^|(?<=[.!])\s)[\s*_#>-]*{_CONCLUSION}(?P<said>(?:(?![.!?]\s)[^\n])+)$", re.IGNORECASE)
_DOUBTFUL = re.compile(
    r"\b(?:not|never|no|nor|cannot|if|unless|when|either|or|may|might|could|would|should|suppose|assum\w+|claims?"
    r"|thinks?|guess|perhaps|maybe|probably|possibly|likely|about|approximately|around|roughly|nearly|almost|least|most"
    r"|less|more|fewer|greater|confiden\w+|times|cases?|possibilities|candidates|steps?|whether|how many|what|which|why"
    r"|until|so far|now|next|first|second|remaining|twice|double|half|squared|cubed|dozen"
    r"|to (?:consider|check|try|find|solve|examine|compute|calculate|determine|go)"
    r"|(?:we|let) (?:need|must|us|have to))\b|n't\b|\?|\u2026",
    re.IGNORECASE,
)
_SOME_NUMBER = re.compile(r"\d|[,;:=<>\\]|\band\b")
# A conclusion with a number in it, behind which a problem is another one.
ANSWERS = re.compile(
    rf"^[ \t*_#>-]*{_CONCLUSION}[^\n?]{{0,300}}\d[^\n?:]{{0,100}}[.!][*$ \t]*$", re.IGNORECASE | re.MULTILINE
)


def last_sentence(text: str) -> str | None:
    """Return the last sentence of a response, behind the word that concludes; None where it has none."""
    line = text.rstrip().rpartition("\n")[2]
    match = _LAST.search(line) if len(line) <= 4 * _LONGEST else None
    return match["said"].strip() if match else None


def value_start(sentence: str) -> int | None:
    """Return where the number or formula that a sentence states begins; None where it states none.

    Example: `value_start("there are 5 such integers.")` is 10.
    """
    sentence = sentence.rstrip()
    match = _STATES.match(sentence) if len(sentence) <= _LONGEST and not _DOUBTFUL.search(sentence) else None
    return match.end() if match else None


def ends_there(behind: str) -> bool:
    """Return whether nothing but words without a number stand behind a value, up to the end of the sentence."""
    return not _SOME_NUMBER.search(behind.strip(" *_$)]}.!").removesuffix("\\"))
