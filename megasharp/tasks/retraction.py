"""Answers that a response takes back: "that is wrong, I give up" after a box.

Three things take an answer back: giving up, calling *that* answer wrong, and naming another one instead. "That is
wrong" speaks of the answer where nothing but words of talk stand between ("Wait, let me check. That is wrong.").
Behind any other word it speaks of a root, a case or an option that is ruled out; "my answer is wrong" need not stand
so near. The last word counts: "wait, is that wrong? No, it is right" and "the result is unchanged" take nothing back.
Few phrases, so that few right answers are lost: mere doubt ("I am not sure") is no retraction, nor is a sentence with
a condition, or one that asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megasharp.tasks.extraction import boxes, ending, sentence_start, statements
from megasharp.tasks.math_text import fraction_of

# So much of the end is read: a retraction is one of the last things said.
_LONGEST = 2_000
_TAG_ENDS = "</answer>"

_ADVERB = r"(?: (?:actually|clearly|definitely|completely|also|simply|just))?"
_IS = rf"(?:'s| is| was| must be| has to be| seems(?: to be)?| looks){_ADVERB}"
_NOT_RIGHT = (
    r"(?:right|correct|it|valid|true|the (?:right |correct )?(?:answer|value|result|solution)|a (?:valid )?solution)"
)
_WRONG = rf"(?:wrong|incorrect|mistaken|false|invalid|an error|a mistake|the wrong (?:answer|value)|not {_NOT_RIGHT})\b"
_GIVEN = (
    r"(?:the|our|an?|any of the) (?:\w+ )?(?:assumption|condition|constraint|premise|problem|options?|choices|given)"
)
# "It is wrong to assume ..." and "this is not correct for odd n" speak of something else.
_OF_IT = r"(?!\s+(?:to|for|that|if|when|in|of|unless|under|with|only)\b)"
_NO_REASON = r"(?!\s+(?:because|since|as)\b)"
_FAILS = (
    rf"(?:(?:{_IS} {_WRONG}|(?: is| was)n't {_NOT_RIGHT}\b){_NO_REASON}| (?:cannot|can't|can not) be {_NOT_RIGHT}\b"
    r"| (?:does not|doesn't) (?:seem|look)(?: to be)? (?:right|correct)\b"
    r"| (?:does not|doesn't) (?:actually )?(?:work|satisfy|check out|add up|make sense|hold)\b"
    rf"| (?:contradicts|violates|(?:does not|doesn't) (?:match|fit|agree with)) {_GIVEN}\b){_OF_IT}"
)
_OWN = (
    r"(?:my(?: final| boxed)?|(?:the|this|that) (?:above|boxed|final))"
    r" (?:answer|result|value|box|solution|conclusion)(?: above)?|the (?:answer|result|box) above|the above"
    r"|my answer of \S+"
)
_THAT = r"(?:(?:that|this)(?: (?:answer|result|value|solution))?|it|the (?:answer|result|value|box))"
_CALLED_WRONG = re.compile(
    rf"\b{_THAT}{_FAILS}"
    r"|\bI (?:no longer|don't|do not) (?:believe|think) (?:that|this|it)\b(?:(?:'s| is) (?:right|correct))?"
    r"|\b(?:right|correct)\?\s+no\b|\u8fd9(?:\u662f)?\u4e0d\u5bf9|\u7b54\u6848(?:\u662f)?\u9519",
    re.IGNORECASE,
)
_OWN_WRONG = re.compile(rf"\b(?:{_OWN}){_FAILS}", re.IGNORECASE)
_UNABLE = r"(?:cannot|can't|could not|couldn't|am unable to|am not able to|do not know how to|don't know how to)"
_STOPS = r"(?=\s*(?:[.,;:!]|$|\n|-|\u2014))"
_GIVEN_UP = re.compile(
    r"\bI(?:'m| am)? (?:(?:will |must |have to )?give|giving) up\b(?! on\b)|\bI'll give up\b(?! on\b)"
    rf"|\b(?:(?:strike|scratch|forget) that|never mind(?: (?:that|this|it))?){_STOPS}"
    r"|\bactually,? no\b(?=[,;!]|\.(?! of\b)|\s*$)"
    r"|(?:^|[.!?;,:\n] *+|\bplease )(?:disregard|ignore) (?:that|this|it|my \w+|the (?:box|above|(?:above )?answer))\b"
    r"(?! (?:choice|option|key))"
    r"|\bI (?:take|have to take|must take) (?:that|this|it) back\b|\bI (?:withdraw|retract)\b"
    rf"|\bI (?:have|can give|can offer) no (?:final )?answer\b(?! key)|\bI was (?:wrong|mistaken)(?: here)?{_STOPS}"
    r"|\bI(?:'m| am)? (?:change|changing|must change|have to correct|must correct) my (?:answer|mind|result)\b"
    rf"|\bI {_UNABLE} (?:\w+ )?(?:determine|solve|answer|decide|finish|fix)\b"
    # "I cannot solve this in fewer steps, but ..." speaks of another way.
    r"(?![^.!?\n]*\b(?:fewer|faster|simpler|without|by|but)\b)"
    rf"|\bI {_UNABLE} (?:\w+ )?(?:give|find) (?:an?|any|the) (?:(?:final|correct|right|definite) )?"
    r"(?:answer|solution)\b"
    r"(?=\W*$|[.,;!\n])"
    r"|\bI (?:do not|don't) know(?: the answer)?(?=\W*$)|\bI have no idea(?=\W*$)"
    r"|\bI (?:have )?made (?:a|an|some)(?: \w+)? (?:mistake|error)"
    r"|\bI (?:have )?(?:misread|miscounted|miscalculated|misunderstood)\b"
    r"|\bthere must be (?:an error|a mistake)(?: (?:here|somewhere))?(?=\W*$|[.,;!\n])"
    r"|\u6211\u653e\u5f03",
    re.IGNORECASE,
)
_NUMBER = r"-?(?:(?>\d++(?:[.,/]\d++)*)|\\[dt]?frac(?:\{\d++\}\{\d++\}|\d\d))"
# With `x =` before it, in dollar signs or bold.
_VALUE = (
    r"(?:[\s$*(\[]|\\(?![dt]?frac))*+(?:[a-z]\s*+=(?:\s|\\(?![dt]?frac))*+)?(?:option\s|choice\s)?[\s(]*+"
    rf"({_NUMBER}|[A-Za-z](?=[)\]])|[A-HJ-Z]\b)[\s$*)\]\\]*"
    r"(?=[.,;!]|$|\n|(?:and |,\s*)?(?:not|rather|instead)\b|as well\b|too\b|or\b)"
)
_NOUN = r"(?:answer|value|result|option|choice|solution)"
_RIGHT = r"(?:correct|right|actual|true|final|proper)"
_MAY = r"(?:could|may|might) (?:also |as well )?be"
# What announces another value: "Correction:", "No, wait,".
_CORRECTED = (
    r"(?:correction|edit|update|actually|sorry|oops|apologies|no|wait|on second thought|upon \w+|on reflection"
    r"|I apologi[sz]e|I was (?:wrong|mistaken)|I made a mistake"
    r"|let me (?:correct|fix|revise) (?:that|this|myself|it))\b"
)
_NAMES = (
    r"(?:so |then |therefore |I (?:think|believe) )?"
    rf"(?:(?:it|that|this|[a-z]|the (?:{_RIGHT} )?{_NOUN})(?:'s| is| (?:should|must) (?:be|have been))"
    r"(?: (?:actually|really|rather|in fact))?|(?=[$\\(]*[a-z]\s*+=))"
)
# Behind talk only: "it should be 7", "or 6".
_INSTEAD = (
    r"\b(?:it|that|this|the (?:\w+ )?(?:answer|value|result|option))"
    rf"(?:(?:'s| is) (?:actually|really|rather|in fact)| (?:should|must) (?:be|have been)| {_MAY})",
    rf"\b(?>(?:{_CORRECTED}[\s*,.:;]*+)+){_NAMES}",
    r"\b(?:correction|edit)\s*+:",
    r"\b(?:I meant(?: to (?:say|write))?|I'd say)",
    r"\bthe (?:value|result) is",
    r"^[ \t$*)\]}\\.,;?]*+(?:or|alternatively|maybe|perhaps|possibly)\b"
    r"(?:[\s,]|\b(?:maybe|perhaps|possibly|else|even)\b)*+",
)
# Anywhere: another answer than the one before it.
_STATED = (
    rf"\bthe (?:{_RIGHT} )?(?:answer|option|choice) (?:(?:is|should be|must be|{_MAY})(?: actually)?|is either)",
    rf"\bthe {_RIGHT} {_NOUN} (?:is|should be|must be|{_MAY})(?: actually)?",
    rf"\b(?:alternatively|however),? (?:it|[a-z]|the {_NOUN}) {_MAY}",
    r"^[ \t*]*+(?:correction|edit)\s*+:",
)
_INSTEAD_OF_IT, _STATED_ANEW = (
    re.compile(rf"(?:{'|'.join(leads)}){_VALUE}", re.IGNORECASE | re.MULTILINE) for leads in (_INSTEAD, _STATED)
)
_END = r"(?=[.,;!\n]|$)"
_EITHER = re.compile(
    rf"\b(?:answer(?:'s| is)|it(?:'s| is) either)(?: either)?[\s$]*({_NUMBER})[\s$]*or[\s$]*({_NUMBER})[\s$]*{_END}",
    re.IGNORECASE,
)
_NOT_IT = re.compile(rf"\banswer is (?:\w+ )?not{_VALUE}", re.IGNORECASE)
_AND_NOT = re.compile(
    rf"(?<![\w.])({_NUMBER})[\s$,]*+(?:and )?(?:not|rather than|instead of)[\s$]*+"
    rf"(?:[a-z]\s*+=\s*+)?({_NUMBER})[\s$]*{_END}"
)
_LABEL = r"(?:(?:[Oo]ption|[Cc]hoice) )?\(?\b([A-J])\b\)?"
_RIGHT_LABEL = re.compile(
    rf"(?<!tatement )(?<!laim ){_LABEL} (?:is|seems(?: to be)?|appears to be|(?:could|may|might)(?: also| well)? be)"
    r"(?: (?:also|actually|really|probably|likely|indeed))*(?: the| an?)?(?: more| most| better| best)?(?: likely)?"
    r" ?(?:\b(?:correct|right|acceptable|better|best|valid)(?: (?:answer|choice|option|as well|too))?)(?=[.,;!:]|$|\n)"
    rf"|\b(?:[Bb]oth|[Ee]ither) {_LABEL} (?:and|or) {_LABEL} (?:are|(?:could|may|might)(?: also)? be)(?: \w+ly)?"
    r" (?:correct|right|acceptable|valid|true)\b"
)
_NAMED = re.compile(
    r"(?:^|[.!?,:;\n] *+|\b(?:but|wait|hmm|however|so|no|since|as|that|thus|hence|therefore) )"
    r"(?:option |choice )?[$(*]*(?:[a-z]\s*=\s*)?(?P<named>[^\s$)*]{1,40}?)"
    rf"[$)*]*(?:{_FAILS})",
    re.IGNORECASE,
)
_KEPT = re.compile(
    r"\b(?:indeed|verified|confirmed|unchanged|unaffected)\b"
    r"|(?<!n't think )(?<!not think )(?<!n't believe )(?<!not believe )(?<!longer think )"
    rf"\b(?:{_OWN}|{_THAT})(?:'s| is| was)(?: \w+)? (?:right|correct|fine|consistent|ok|okay|valid)\b"
    r"|\b(?:is|are|was) (?:indeed|in fact) (?!not\b)|\bchecks out\b"
    r"|\b(?:it|this|that|answer|result|box) (?:still )?(?:stands|holds|works|remains)\b"
    r"|\bstands\b(?! for| out)|(?:\bnot|n't) (?:\w+ )?(?:affect|change|matter|alter|influence)\w*|\bcancels? out\b"
    r"|\b(?:the )?same (?:result|answer|value)\b|\b(?:the|both) (?:answer|give|result)s? (?:is|are) the same\b"
    r"|\u6ca1\u9519|(?<!\u4e0d)\u6b63\u786e"
    r"|\bnothing (?:is|was) wrong\b|\b(?:no|not an?) (?:error|mistake)\b|\bis (?:not|n't) wrong\b",
    re.IGNORECASE,
)
_YES = re.compile(r"\byes\b", re.IGNORECASE)
_NOT_MEANT = re.compile(
    r"\?$|\b(?:if|unless|whether|would|might|could be|common|often|(?:some|many) (?:people|students)|instead of"
    r"|initially|at first|earlier|previous(?:ly)?|before|attempt|corrected|fixed|scratch work)\b",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"\?$|\b(?:if|unless|whether|would|were|while|suppos\w+|assum\w+|imagine|(?<!I )think|(?<!second )thought"
    r"|argue|some|claim\w*|says?|believe"
    r"|naive\w*"
    r"|guess|book|textbook|key|students|people|someone|initially|at first|earlier|otherwise|tempting)\b",
    re.IGNORECASE,
)
# Answers that say themselves that something is false: behind them, "that is wrong" gives the reason.
_DENIALS = re.compile(r"\b(?:false|no|invalid|impossible|none|not|incorrect|wrong)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z']+")
_TALK = frozenset(
    _WORD.findall(
        """
        a above actually afraid again ah also alternatively am an and answer apologies apologize at back be believe
        box boxed but careful check checking closer conclusion correct curious doing double either else error
        examining fact feel final for further going hang have hence hm hmm hmmm hold however i i'm i've in
        interesting is it it's just know let let's like look looking maybe me mean moment must my no not noticed now
        of oh ok okay on once oops or perhaps point problem question realise realised realize realized really
        recheck rechecking reconsider reflection rereading result review reviewing right second see seems should so
        solution sorry still stuck sure that that's the then there therefore think thinking this thought thus to
        twice uh um unfortunately upon value verify wait well work would yes yet
        """
    )
)
# Another value, formula or claim.
_OTHER = re.compile(r"\d|[$\\=\"]")
_BEGINS = re.compile(r"(?:\A|\n)[^\w\n]*+(?:wait|hmm+|hold on|hang on|oops|oh)\b", re.IGNORECASE)
_SLIP = re.compile(
    r"\bI (?:have )?(?:forgot|misread|missed|overlooked|miscounted|miscalculated|misunderstood|made)\b[^.!?,;\n]*",
    re.IGNORECASE,
)
_ASKED_NO = re.compile(r"\?\W*+no\W*+(?:(?:so|hence|thus|therefore)\W*)?$", re.IGNORECASE)
_TALK_WORDS = 24

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
    said = [*_said(after, answer)]
    if answer:
        said += ((place, "taken") for place in (*_replaced(after, answer), *_denied(after, answer)))
    taken = False
    for _, what in sorted(said):
        taken = what == "taken" or (taken and what != "kept")
    return taken


def _said(after: str, answer: str) -> Iterator[tuple[int, str]]:
    """Where something gives an answer up, calls it wrong or keeps it, and if it is "taken" or "kept" by it."""
    for match in _GIVEN_UP.finditer(after):
        if not _NOT_MEANT.search(_sentence(after, match)):
            yield match.start(), "taken"
    called = [] if _DENIALS.search(answer) else list(_CALLED_WRONG.finditer(after))
    for match in called:
        near = _is_talk(after[: match.start()]) or _ASKED_NO.search(after, max(0, match.start() - 40), match.start())
        if near and not _NOT_MEANT.search(_sentence(after, match)):
            yield match.start(), "taken"
            yield from ((match.end() + yes.start(), "kept") for yes in _YES.finditer(after[match.end() :]))
    for match in _OWN_WRONG.finditer(after):
        if not _NOT_MEANT.search(_sentence(after, match)):
            yield match.start(), "taken"
    yield from ((match.start(), "kept") for match in _KEPT.finditer(after))


def _replaced(after: str, answer: str) -> Iterator[int]:
    """Where another answer than the one given is named."""
    for match in _INSTEAD_OF_IT.finditer(after):
        if not _same(match[1], answer) and _is_talk(after[: match.start()]):
            yield match.start()
    for pattern in (_STATED_ANEW, _EITHER, *((_RIGHT_LABEL,) if _is_label(answer) else ())):
        for match in pattern.finditer(after):
            named = [each for each in match.groups() if each]
            if not all(_same(each, answer) for each in named) and not _SUPPOSED.search(_sentence(after, match)):
                yield match.start()


def _denied(after: str, answer: str) -> Iterator[int]:
    """Where the very answer given is named as a wrong one."""
    denied = [match for match in _NOT_IT.finditer(after) if _same(match[1], answer)]
    failing = [match for match in _NAMED.finditer(after) if match["named"].strip(".,") == answer.strip()]
    yield from (match.start() for match in denied + failing if not _SUPPOSED.search(_sentence(after, match)))
    for match in _AND_NOT.finditer(after):
        if _same(match[2], answer) and not _same(match[1], answer):
            yield match.start()


def _is_label(answer: str) -> bool:
    return len(answer) == 1 and answer.isupper()


def _same(value: str, answer: str) -> bool:
    """Return whether a number or label that is named is the answer, or a part of it."""
    numbers = [fraction_of(each.replace(",", "").replace("dfrac", "frac").strip(" $")) for each in (value, answer)]
    return value in answer if None in numbers else numbers[0] == numbers[1]


def _sentence(text: str, match: re.Match[str]) -> str:
    """The sentence in which a match begins, to the end of the one in which it ends."""
    start = sentence_start(text, match.start())
    end = re.compile(r"[.!?\n]|$").search(text, match.end())
    return text[start : end.end() if end else None].strip()


def _is_talk(between: str) -> bool:
    """Return whether nothing but talk lies between an answer and what is said of it.

    Where a line begins with "Wait" or the like, only what follows counts: it turns back to the answer.
    """
    begun = list(_BEGINS.finditer(between))
    between = _SLIP.sub("", between[begun[-1].start() :] if begun else between).lstrip(" \n$*.,;:)]}\\")
    words = _WORD.findall(between.lower())
    return len(words) <= _TALK_WORDS and not _OTHER.search(between) and _TALK.issuperset(words)
