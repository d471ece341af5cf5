r"""A response's text without the typography that does not change a value: full-width signs, LaTeX's commands of fonts.

`\text{8,\uff11\uff12}` says `8,12`. `verify` reads every response so; references that are texts are read so, too.
"""

from __future__ import annotations

import re

from megasharp.tasks.wording import FULL_WIDTH

# With the full-width space and the minus sign; dashes and quotes may be parts of an answer here.
_WIDE = FULL_WIDTH | {0x3000: " ", 0x2212: "-"}
_FONT = r"\\(?:(?:text|math)(?:it|bf|rm|sf|tt|up|normal|sc)?|mbox|operatorname|emph)\s*\{"
_TOKEN = re.compile(rf"(?P<font>{_FONT})|(?P<open>\{{)|(?P<close>\}})|(?P<word>\\[^\W\d_]+|[^\W\d_]+)|\\.", re.DOTALL)


def narrow(text: str) -> str:
    """The text with full-width signs as ASCII has them. Example: `narrow("\uff17\uff0c8")` is `7,8`."""
    return text.translate(_WIDE)


def without_fonts(text: str, *, words: bool = True) -> str:
    r"""The text without LaTeX's commands of fonts and their braces; `words` is False for those around no letter alone.

    Example: `without_fonts(r"\text{8,12} \text{ or } 9", words=False)` is `8,12 \text{ or } 9`.
    """
    open_braces: list[re.Match[str]] = []
    gone: list[tuple[int, int]] = []
    last_letter = -1
    for token in _TOKEN.finditer(text) if "\\" in text else ():
        if token["word"]:
            last_letter = token.start()
        elif token["font"] or token["open"]:
            open_braces.append(token)
        elif token["close"] and open_braces:
            opened = open_braces.pop()
            if opened["font"] and (words or last_letter < opened.start()):
                gone += [opened.span(), token.span()]
    kept: list[str] = []
    begin = 0
    for start, end in sorted(gone):
        kept.append(text[begin:start])
        begin = end
    return "".join([*kept, text[begin:]])
