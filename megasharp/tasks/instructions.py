"""Verifiable instructions (IFEval, 2311.07911): prompts that say how a response must look, and the rules that judge it.

Rows as of google/IFEval and the training sets made like it: `prompt`, `instruction_id_list`, and `kwargs`, a list with
the arguments of each instruction, in which null means that there is none. A response is right where it follows every
instruction: the paper's strict accuracy by prompt. Thinking is not judged: what follows the last `</think>` is.

The rules are those of the public instructions.py, with these differences. Keywords are texts, where it reads patterns.
It counts sentences and capital words by NLTK's models, which are downloaded; here by punctuation and white space.
Every rule needs time that grows linearly with the response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import Fields, absent, check_names, name_of, read_objects, text_field, texts_field
from megasharp.tasks.judge import TaskItem

Value = str | int | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, with its arguments by name. Example: `Instruction("punctuation:no_comma", ())`."""

    id: str
    arguments: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class InstructionsAnswer(TaskAnswer):
    """The instructions of a prompt, in its order."""

    instructions: tuple[Instruction, ...]


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """CORRECT with reward 1.0 where all instructions are followed, else WRONG with 0.0 and the ids of the others.

    An empty response follows none, as in the paper's code.
    """
    assert isinstance(answer, InstructionsAnswer)
    judged = text.rpartition("</think>")[2]
    broken = [
        each.id
        for each in answer.instructions
        if not (judged.strip() and RULES[each.id].follows(judged, dict(each.arguments)))
    ]
    if broken:
        return Verdict(Outcome.WRONG, 0.0, detail=f"not followed: {', '.join(broken)}")
    return Verdict(Outcome.CORRECT, 1.0)


def load_items(path: Path) -> list[TaskItem]:
    """Prompts of a JSONL file. Raises UserError, naming file and line, for what it must not hold."""
    items: list[TaskItem] = []
    for where, fields in read_objects(path, "write lines as of IFEval"):
        prompt = text_field(fields, "prompt", where)
        name = name_of(fields, ("key", "id"), path, where)
        items.append(TaskItem(name, "instructions", prompt, read_answer(fields, where), path.name, question=prompt))
    check_names([item.id for item in items], path)
    return items


def read_answer(fields: Fields, where: str) -> InstructionsAnswer:
    """The instructions of a row. Raises UserError, naming `where`, for unknown ones and for missing arguments."""
    ids = texts_field(fields, "instruction_id_list", where)
    arguments = fields.get("kwargs")
    if not isinstance(arguments, list) or len(arguments) != len(ids):
        raise UserError(
            f"{where}: 'kwargs' must be a list with one object for each instruction{absent(fields, 'kwargs')}"
        )
    return InstructionsAnswer(tuple(_instruction(*each, where) for each in zip(ids, arguments, strict=True)))


def _instruction(name: str, given: object, where: str) -> Instruction:
    if name not in RULES:
        near = get_close_matches(name, RULES, n=1) or sorted(RULES)
        raise UserError(f"{where}: unknown instruction {name!r}; known: {', '.join(near)}")
    fields = given if isinstance(given, Mapping) else {}
    found = tuple((key, _argument(fields.get(key), key, name, where)) for key in RULES[name].needs.split())
    return Instruction(name, found)


def _argument(value: object, key: str, name: str, where: str) -> Value:
    """Return an argument as its rule takes it. Raises UserError where it is none."""
    if key in ("keywords", "forbidden_words"):
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return tuple(value)
    elif key.startswith(("num_", "nth_")) or key.endswith("frequency"):
        # A table of which some rows have null holds its whole numbers as floats.
        if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
            return int(value)
    elif key.endswith("relation"):
        if value in _RELATIONS:
            return str(value)
    elif isinstance(value, str) and value.strip():
        return value.strip()
    raise UserError(f"{where}: {name} needs '{key}' in its kwargs, got {value!r}")


_RELATIONS = ("less than", "at least")


def load_library() -> Any:
    """The library that tells languages apart, imported once. Raises UserError where it is not installed."""
    try:
        import langdetect
    except ImportError as error:
        raise UserError(
            f"task instructions needs the library langdetect ({one_line(error)}); pip install 'megasharp[instructions]'"
        ) from error
    # It draws random numbers: without a seed the same response has another language at times.
    langdetect.DetectorFactory.seed = 0
    return langdetect


def _in_language(text: str, language: str) -> bool:
    """Compare a text's language; a text without any (digits, say) counts as followed, as in the paper's code."""
    library = load_library()
    try:
        return bool(library.detect(text) == language)
    except library.LangDetectException:
        return True


def _compared(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


def _has(word: str, text: str) -> bool:
    return word.lower() in text.lower()


def _forbidden(text: str, words: tuple[str, ...]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in words)


_END = re.compile(r"[.!?\u2026]+[\"'\u201d\u2019)\]*]*$")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Inc|Ltd|Jr|Sr|Co|vs|etc)|\b[A-Za-z]|\.[A-Za-z])\.$")


def _sentences(text: str) -> int:
    """Count the sentences: what ends in a full stop, a question or an exclamation mark before no small letter."""
    words = text.split()
    ends = [
        bool(_END.search(word[-20:])) and not _ABBREVIATION.search(word[-20:]) and not after[:1].islower()
        for word, after in zip(words, [*words[1:], ""], strict=True)
    ]
    return sum(ends) + (bool(words) and not ends[-1])


def _paragraphs(text: str, wanted: int) -> bool:
    parts = [bool(each.strip()) for each in text.split("***")]
    return all(parts[1:-1]) and sum(parts) == wanted


def _first_word(text: str, wanted: int, nth: int, word: str) -> bool:
    """Check the number of paragraphs, parted by an empty line, and the first word of the nth one."""
    parts = text.split("\n\n")
    if sum(bool(each.strip()) for each in parts) != wanted or not 0 < nth <= wanted or not parts[nth - 1].strip():
        return False
    first = parts[nth - 1].split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", first)[0] == word.lower()


def _postscript(text: str, marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()))


def _bullets(text: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    return sum(line.startswith("-") or bool(re.match(r"\*[^*]", line)) for line in lines)


def _highlights(text: str) -> int:
    """Count `*highlights*`; one between two stars counts twice where the stars are closed, as in the paper's code."""
    one = [each.strip("*").strip() for each in re.findall(r"\*[^\n*]*\*", text)]
    two = [each.strip("*").strip() for each in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(map(bool, one + two))


def _json(text: str) -> bool:
    inside = re.sub(r"^```(?:json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(inside.strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    starts = [(line, line.find("<<"), line.rfind(">>")) for line in text.splitlines()]
    return any(0 <= start < end and line[start:end].strip("<>").strip() for line, start, end in starts)


def _two_responses(text: str) -> bool:
    parts = [each.strip() for each in text.split("******")]
    said = [each for each in parts if each]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def _capital_words(text: str) -> int:
    """Count the words without a small letter; a hyphenated one is one word."""
    return sum(word.isupper() for word in re.findall(r"\w+(?:[-.&]\w+)*", text))


def _quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


@dataclass(frozen=True, slots=True)
class Rule:
    """The judge of an instruction: `follows(response, arguments)`, and the names of its arguments, in one text."""

    follows: Callable[[str, Mapping[str, Any]], bool]
    needs: str = ""


_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

RULES: dict[str, Rule] = {
    "keywords:existence": Rule(lambda t, a: all(_has(word, t) for word in a["keywords"]), "keywords"),
    "keywords:frequency": Rule(
        lambda t, a: _compared(t.lower().count(a["keyword"].lower()), a["relation"], a["frequency"]),
        "keyword frequency relation",
    ),
    "keywords:forbidden_words": Rule(lambda t, a: not _forbidden(t, a["forbidden_words"]), "forbidden_words"),
    "keywords:letter_frequency": Rule(
        lambda t, a: _compared(t.lower().count(a["letter"].lower()), a["let_relation"], a["let_frequency"]),
        "letter let_frequency let_relation",
    ),
    "language:response_language": Rule(lambda t, a: _in_language(t, a["language"]), "language"),
    "length_constraints:number_sentences": Rule(
        lambda t, a: _compared(_sentences(t), a["relation"], a["num_sentences"]), "num_sentences relation"
    ),
    "length_constraints:number_paragraphs": Rule(lambda t, a: _paragraphs(t, a["num_paragraphs"]), "num_paragraphs"),
    "length_constraints:number_words": Rule(
        lambda t, a: _compared(len(re.findall(r"\w+", t)), a["relation"], a["num_words"]), "num_words relation"
    ),
    "length_constraints:nth_paragraph_first_word": Rule(
        lambda t, a: _first_word(t, a["num_paragraphs"], a["nth_paragraph"], a["first_word"]),
        "num_paragraphs nth_paragraph first_word",
    ),
    "detectable_content:number_placeholders": Rule(
        lambda t, a: len(re.findall(r"\[[^\[\]\n]*\]", t)) >= a["num_placeholders"], "num_placeholders"
    ),
    "detectable_content:postscript": Rule(lambda t, a: _postscript(t, a["postscript_marker"]), "postscript_marker"),
    "detectable_format:number_bullet_lists": Rule(lambda t, a: _bullets(t) == a["num_bullets"], "num_bullets"),
    "detectable_format:constrained_response": Rule(lambda t, a: any(each in t for each in _CHOICES)),
    "detectable_format:number_highlighted_sections": Rule(
        lambda t, a: _highlights(t) >= a["num_highlights"], "num_highlights"
    ),
    "detectable_format:multiple_sections": Rule(
        lambda t, a: len(re.findall(rf"{re.escape(a['section_spliter'])}\s?\d+", t)) >= a["num_sections"],
        "section_spliter num_sections",
    ),
    "detectable_format:json_format": Rule(lambda t, a: _json(t)),
    "detectable_format:title": Rule(lambda t, a: _title(t)),
    "combination:two_responses": Rule(lambda t, a: _two_responses(t)),
    "combination:repeat_prompt": Rule(
        lambda t, a: t.strip().lower().startswith(a["prompt_to_repeat"].lower()), "prompt_to_repeat"
    ),
    "startend:end_checker": Rule(
        lambda t, a: t.strip().strip('"').lower().endswith(a["end_phrase"].lower()), "end_phrase"
    ),
    "startend:quotation": Rule(lambda t, a: _quoted(t.strip())),
    "change_case:english_capital": Rule(lambda t, a: t.isupper() and _in_language(t, "en")),
    "change_case:english_lowercase": Rule(lambda t, a: t.islower() and _in_language(t, "en")),
    "change_case:capital_word_frequency": Rule(
        lambda t, a: _compared(_capital_words(t), a["capital_relation"], a["capital_frequency"]),
        "capital_frequency capital_relation",
    ),
    "punctuation:no_comma": Rule(lambda t, a: "," not in t),
}
