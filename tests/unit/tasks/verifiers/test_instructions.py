"""IFEval's instructions: for each a response that follows it and one that does not, counted by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks.instructions import RULES, load_items, read_answer, verify

# As in a table of the hub: every argument that any instruction has, null where this one has none.
KEYS = sorted({key for rule in RULES.values() for key in rule.needs.split()})
ENGLISH = "The weather is nice today and we are going to walk in the park with our friends."

CASES: dict[str, list[tuple[dict[str, object], str, str]]] = {
    "keywords:existence": [({"keywords": ["C++", "long"]}, "A LONG book on c++", "A long book on C")],
    "keywords:frequency": [
        ({"keyword": "no", "frequency": 2, "relation": "at least"}, "No, nobody", "No."),
        ({"keyword": "no", "frequency": 2, "relation": "less than"}, "No.", "No, nobody"),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["cat", "dog"]}, "A catalogue", "Not a Cat!")],
    "keywords:letter_frequency": [
        ({"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "Eee", "ee"),
        ({"letter": "!", "let_frequency": 1, "let_relation": "less than"}, "so", "so!"),
    ],
    "language:response_language": [
        ({"language": "de"}, "Das Wetter ist heute schön, und wir gehen im Park spazieren.", ENGLISH),
        ({"language": "de"}, "1 2 3", ENGLISH),
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 3, "relation": "at least"},
            'Dr. Lee paid 3.50 in the U.S. today. "Why?" Because!',
            "Dr. Lee paid 3.50. Why",
        ),
        ({"num_sentences": 2, "relation": "less than"}, "One... without an end", "One. Two."),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "a\n***\nb\n***\n", "a\n***\n***\nb"),
        ({"num_paragraphs": 2.0}, "a *** b", "a\n\nb"),
    ],
    "length_constraints:number_words": [
        ({"num_words": 4, "relation": "at least"}, "well-known two words", "three little words"),
        ({"num_words": 4, "relation": "less than"}, "three little words", "now four little words"),
    ],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, 'a\n\n"then, b', "then\n\na"),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"}, "A.", "a\n\nb"),
    ],
    "detectable_content:number_placeholders": [({"num_placeholders": 2}, "[name] of [place]", "[name] of [place")],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "So.\nP. S. more", "So. PS more"),
        ({"postscript_marker": "P.P.S"}, "p.p.s. more", "P.S. more"),
    ],
    "detectable_format:number_bullet_lists": [({"num_bullets": 2}, "* a\n  - b\n** c", "* a\n* b\n* c")],
    "detectable_format:constrained_response": [({}, "So: My answer is no.", "my answer is no")],
    "detectable_format:number_highlighted_sections": [({"num_highlights": 2}, "*a* and *b c*", "*a* and * *")],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "Day", "num_sections": 2}, "Day 1\na\nDay2\nb", "Day 1\na\nday 2\nb")
    ],
    "detectable_format:json_format": [({}, '```json\n{"a": [1]}\n```', "{'a': 1}")],
    "detectable_format:title": [({}, "<<a poem>>\nso", "<< >>\nso")],
    "combination:two_responses": [({}, "a\n******\nb", "a\n******\na")],
    "combination:repeat_prompt": [({"prompt_to_repeat": "Why so?"}, " why so? Because.", "Because. Why so?")],
    "startend:end_checker": [({"end_phrase": "Any questions?"}, 'So. any questions?"', "Any questions? No.")],
    "startend:quotation": [({}, ' "so" ', '"so')],
    "change_case:english_capital": [({}, ENGLISH.upper(), ENGLISH)],
    "change_case:english_lowercase": [({}, ENGLISH.lower(), ENGLISH)],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "The UN and COVID-19", "The UN and Covid-19"),
        ({"capital_frequency": 1, "capital_relation": "less than"}, "The end", "THE end"),
    ],
    "punctuation:no_comma": [({}, "a; b", "a, b")],
}


def test_all_25_instructions_are_here() -> None:
    assert CASES.keys() == RULES.keys() and len(RULES) == 25


@each_case("name", CASES)
def test_an_instruction(name: str) -> None:
    for arguments, right, wrong in CASES[name]:
        row = {"instruction_id_list": [name], "kwargs": [dict.fromkeys(KEYS) | arguments]}
        answer = read_answer(row, "here")
        assert verify(right, answer).outcome is Outcome.CORRECT, right
        assert verify(f"<think>{wrong}</think>{right}", answer).reward == 1.0
        assert verify(wrong, answer).outcome is Outcome.WRONG, wrong
        assert verify(" \n", answer).outcome is Outcome.WRONG


def test_every_instruction_must_be_followed() -> None:
    row = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [None, {}]}
    answer = read_answer(row, "here")
    assert verify('"a b"', answer).reward == 1.0
    verdict = verify('"a, b"', answer)
    assert (verdict.reward, verdict.detail) == (0.0, "not followed: punctuation:no_comma")


@each_case("sign", ["\n", "[", "*", "<<", "Day ", "no", "- ", '"', "a.", "p. "])
def test_a_long_response_of_one_sign_is_judged(sign: str) -> None:
    """Rules that needed the square of its length would need minutes here."""
    values = {"keywords": ["no"], "forbidden_words": ["no"], "relation": "at least", "let_relation": "at least"}
    values |= {"capital_relation": "at least", "language": "en", "section_spliter": "Day", "letter": "n"}
    kwargs = {key: values.get(key, 1 if key.startswith("n") or "freq" in key else "no") for key in KEYS}
    answer = read_answer({"instruction_id_list": [*RULES], "kwargs": [kwargs] * len(RULES)}, "here")
    assert verify(sign * 100_000, answer).outcome is Outcome.WRONG


@each_case(
    ("row", "message"),
    [
        (
            {"instruction_id_list": ["keywords:exist"], "kwargs": [{}]},
            "unknown instruction 'keywords:exist'; known: key",
        ),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "needs 'keywords' in its kwargs, got None"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, "one object for each instruction"),
        ({"instruction_id_list": ["startend:quotation"]}, "there is no field 'kwargs' here"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "more than"}],
            },
            "needs 'relation' in its kwargs, got 'more than'",
        ),
    ],
)
def test_a_wrong_row_is_one_line(row: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", **row}))
    with pytest.raises(UserError, match=f"rows.jsonl:1: .*{message}"):
        load_items(path)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megasharp.tasks.table import make_verifiers

    monkeypatch.setitem(sys.modules, "langdetect", None)
    assert "instructions" not in make_verifiers()
    with pytest.raises(UserError, match=r"pip install 'megasharp\[instructions\]'"):
        make_verifiers({"instructions"})
