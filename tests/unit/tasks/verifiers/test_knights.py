"""Knights and Knaves: verdicts by hand, and the same as reasoning-gym's on its own puzzles."""

from __future__ import annotations

from random import Random

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.knights import KnightsAnswer, Statement, solutions, verify
from megasharp.tasks.table import make_verifiers

ANSWER = KnightsAnswer((("Zoey", True), ("Oliver", False), ("Grace", True)))


@each_case(
    ("given", "outcome"),
    [
        ("Zoey is a knight, Oliver is a knave, and Grace is a knight.", Outcome.CORRECT),
        ("grace is a KNIGHT; oliver is a knave; zoey is a knight", Outcome.CORRECT),
        ("(1) Zoey is a knight\n(2) Oliver is a knave\n(3) Grace is a knight", Outcome.CORRECT),
        ("- Zoey: knight\n- Oliver: knave\n- Grace: knight", Outcome.CORRECT),
        ("Zoey is a knight and Oliver is not a knight and Grace is a knight", Outcome.CORRECT),
        ("Zoey is a knight, Zoey is a knight, Oliver is a knave, Grace is a knight", Outcome.CORRECT),
        (r"\text{Zoey is a knight, Oliver is a knave, Grace is a knight}", Outcome.CORRECT),
        ("Zoey is a knave, Oliver is a knave, Grace is a knight", Outcome.WRONG),
        ("Zoey is a knave, Oliver is a knight, Grace is a knave", Outcome.WRONG),
        ("Zoey is not a knight, Oliver is a knave, Grace is a knight", Outcome.WRONG),
        ("Zoey is a knight, Zoey is a knave, Oliver is a knave, Grace is a knight", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave, Grace is a knight, Emma is a knight", Outcome.FORMAT),
        ("Zoey is a knight/knave, Oliver is a knight/knave, Grace is a knight/knave", Outcome.FORMAT),
        ("If Zoey is a knight, Oliver is a knave, Grace is a knight", Outcome.FORMAT),
        ("Zoey is a saint, Oliver is a sinner, Grace is a saint", Outcome.FORMAT),
        ("knight, knave, knight", Outcome.FORMAT),
        ("", Outcome.FORMAT),
        ("Zoey is a knight, " * 1_000_000, Outcome.FORMAT),
    ],
    ids=range(19),
)
def test_verdicts(given: str, outcome: Outcome) -> None:
    for text in (f"If Oliver is a knight, then ... <answer>{given}</answer>", rf"Zoey is a knave? \boxed{{{given}}}"):
        verdict = verify(text, ANSWER)
        assert (verdict.outcome, verdict.reward) == (outcome, float(outcome is Outcome.CORRECT))
        assert bool(verdict.canonical_answer) == (outcome is not Outcome.FORMAT)


@each_case(
    ("given", "outcome"),
    [
        ("Zoey (knight), Oliver (a knave), Grace (knight)", Outcome.CORRECT),
        ("Zoey is a knight. Oliver is a knave. Grace is a knight.", Outcome.CORRECT),
        ("Zoey is the knight, Grace is the knight and Oliver the knave", Outcome.CORRECT),
        ("Zoey and Grace are knights, but Oliver must be a knave", Outcome.CORRECT),
        ("Knights: Zoey, Grace; Knaves: Oliver", Outcome.CORRECT),
        ("Knaves: Oliver, Zoey\nKnights: Grace", Outcome.WRONG),
        ("Therefore, Zoey isn't a knave, Oliver isn't a knight, Grace isn't a knave", Outcome.CORRECT),
        (
            "It is not true that Zoey is a knave. It is false that Oliver is a knight. "
            "It is false that Grace is a knave.",
            Outcome.CORRECT,
        ),
        ("It is not true that Zoey and Oliver are knaves, Grace is a knight", Outcome.FORMAT),
        ("It is not true that Zoey is a knave and Oliver is a knave, Grace is a knight", Outcome.FORMAT),
        ("Zoey and Oliver are not both knights, Grace is a knight", Outcome.FORMAT),
        ("Neither Zoey nor Grace is a knave, Oliver is a knave", Outcome.CORRECT),
        ("Zoey is a knight because Oliver lies, Oliver is a knave since he lies, Grace is a knight", Outcome.CORRECT),
        ('{"Zoey": "knight", "Oliver": "knave", "Grace": "knight"}', Outcome.CORRECT),
        ("| name | role |\n|---|---|\n| Zoey | knight |\n| Oliver | knave |\n| Grace | knight |", Outcome.CORRECT),
        (
            r"\begin{aligned}\text{Zoey}&: \text{knight}\\\\ \text{Oliver}&: knave\\\\ Grace&: knight\end{aligned}",
            Outcome.CORRECT,
        ),
        ("(1) Zoey is a knight (2) Oliver is a knave (3) Grace is a knight", Outcome.CORRECT),
        ("Zoey is a knight; Oliver is a knave; Grace is also a knight.", Outcome.CORRECT),
        ("Zoey is a knight. Oliver is definitely a knave. Grace is a knight too.", Outcome.CORRECT),
        (
            "Zoey is a knight (truth-teller), Oliver is a knave (liar), Grace is a knight (truth-teller)",
            Outcome.CORRECT,
        ),
        (
            "Zoey is a truth-teller (knight), Oliver is a liar (knave), Grace is a truth-teller (knight)",
            Outcome.CORRECT,
        ),
        ("Zoey is a knight (liar), Oliver is a knave (liar), Grace is a knight", Outcome.FORMAT),
        ("Zoey is a liar (knight), Oliver is a knave (liar), Grace is a knight", Outcome.FORMAT),
        ("The knights are Zoey and Grace, and the knave is Oliver.", Outcome.CORRECT),
        ("The knights are Zoey and Grace. The only knave is Oliver.", Outcome.CORRECT),
        ("The knaves are Zoey and Grace, and the knight is Oliver.", Outcome.WRONG),
        ("The knights are Zoey or Grace, and the knave is Oliver.", Outcome.FORMAT),
        ("The knights are not Zoey and Grace, and the knave is Oliver.", Outcome.FORMAT),
        ("The knights are probably Zoey and Grace, and the knave is Oliver.", Outcome.FORMAT),
        ("Only Oliver is a knave; Zoey and Grace are knights.", Outcome.CORRECT),
        ("Only Zoey and Grace are knights. Oliver is a knave.", Outcome.CORRECT),
        ("Only Zoey is a knight, Grace is a knight, Oliver is a knave", Outcome.FORMAT),
        ("Only if Oliver is a knave, Zoey and Grace are knights", Outcome.FORMAT),
        ("Only Oliver is a knave", Outcome.FORMAT),
        ("It is not true that the knights are Zoey and Grace, it is false that the knaves are Oliver", Outcome.FORMAT),
        ("It is false that only Oliver is a knight, it is false that Zoey and Grace are knaves", Outcome.FORMAT),
        ("Zoey's a knight, Oliver's a knave, Grace\u2019s a knight", Outcome.CORRECT),
        ("Zoey's a knight, Oliver's not a knave, Grace's a knight", Outcome.WRONG),
        ("Zoey's claim is a knight, Oliver's a knave, Grace's a knight", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave, Grace is also probably a knight", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave, Grace is probably a knight", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave, Grace is a knight or a knave", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave, maybe Grace is a knight", Outcome.FORMAT),
        ("Zoey is a knight if Oliver is a knave, Grace is a knight", Outcome.FORMAT),
        ("Zoey, Grace is a knight, Oliver is a knave", Outcome.FORMAT),
        ("Zoey and Grace are knights", Outcome.FORMAT),
        ("Zoey (knight), Oliver (knave), Grace (knave), Grace (knight)", Outcome.FORMAT),
        ("Knights: Zoey, Grace, Oliver; Knaves: Oliver", Outcome.FORMAT),
        ("Zoey is a knight, Oliver is a knave, Grace", Outcome.FORMAT),
        ("Is Zoey a knight? Oliver is a knave, Grace is a knight", Outcome.FORMAT),
        ("| " * 900, Outcome.FORMAT),
    ],
)
def test_ways_to_say_who_is_what(given: str, outcome: Outcome) -> None:
    assert verify(f"<answer>{given}</answer>", ANSWER).outcome is outcome


@each_case(
    ("text", "outcome"),
    [
        (r"\boxed{Zoey is a knight}, \boxed{Oliver: knave}, \boxed{Grace: knight}", Outcome.CORRECT),
        (r"\boxed{Zoey is a knight}, \boxed{Zoey: knave, Oliver: knave}, \boxed{Grace: knight}", Outcome.FORMAT),
        (r"\boxed{Zoey: knave} \boxed{Zoey: knight, Oliver: knave, Grace: knight}", Outcome.CORRECT),
        ("<answer>Zoey: knight, Oliver: knave, Grace: knight</answer> That is wrong, I give up.", Outcome.WRONG),
    ],
)
def test_several_boxes_and_answers_taken_back(text: str, outcome: Outcome) -> None:
    assert verify(text, ANSWER).outcome is outcome


def test_accents_may_be_composed_or_not() -> None:
    answer = KnightsAnswer((("Zo\u00eb", True), ("Jos\u00e9", False)))
    assert verify("<answer>Zoe\u0308 is a knight, Jose\u0301: knave</answer>", answer).outcome is Outcome.CORRECT


def test_without_tags_and_box_nothing_is_an_answer() -> None:
    verdict = verify("Zoey is a knight, Oliver is a knave, Grace is a knight", ANSWER)
    assert (verdict.outcome, verdict.detail) == (
        Outcome.FORMAT,
        "no answer tags and no box, or too long a text in them",
    )


def test_one_canonical_answer_whatever_the_order() -> None:
    orders = ("Zoey is a knight, Oliver is a knave, Grace is a knight", "Oliver: knave, Grace: knight, Zoey: knight")
    found = {verify(f"<answer>{order}</answer>", ANSWER).canonical_answer for order in orders}
    assert found == {"grace=knight oliver=knave zoey=knight"}


def translated(statement: tuple) -> Statement:
    """A statement of reasoning-gym's as ours."""
    kind, *parts = statement
    if kind in ("telling-truth", "lying"):
        return ("knight" if kind == "telling-truth" else "knave"), parts[0]
    return {"->": "if", "<=>": "iff"}.get(kind, kind), *(translated(part) for part in parts)


@each_case(("people", "depth"), [(2, 2), (3, 2), (4, 3), (5, 3)])
def test_solutions_and_verdicts_are_reasoning_gyms(people: int, depth: int) -> None:
    from reasoning_gym.logic.knights_knaves import KnightsKnavesConfig, KnightsKnavesDataset

    theirs = KnightsKnavesDataset(
        KnightsKnavesConfig(n_people=people, depth_constraint=depth, width_constraint=2, size=100, seed=people)
    )
    rng = Random(people)
    seen: set[bool] = set()
    for puzzle in theirs:
        made = puzzle["metadata"]
        terms = made["knight_knave_terms"]
        assert solutions([translated(each) for each in made["statements"]]) == [tuple(made["solution"])]
        names = [str(name) for name in made["names"]]
        answer = KnightsAnswer(
            tuple(zip(names, map(bool, made["solution"]), strict=True)), terms["knight"], terms["knave"]
        )
        for text in (puzzle["answer"], *(perturbed(rng, answer, terms) for _ in range(6))):
            right = verify(f"<answer>{text}</answer>", answer).outcome is Outcome.CORRECT
            assert right == (theirs.score_answer(text, puzzle) == 1.0), text
            seen.add(right)
    assert seen == {True, False}


def perturbed(rng: Random, answer: KnightsAnswer, terms: dict[str, str]) -> str:
    """The solution in another order, with some roles turned round, or a person left out."""
    people = [(name, knight != (rng.random() < 0.15)) for name, knight in answer.knights]
    rng.shuffle(people)
    if rng.random() < 0.2:
        people.pop()
    return ", ".join(f"{name} is {terms['a_knight'] if knight else terms['a_knave']}" for name, knight in people) + "."


def test_the_table_names_the_task() -> None:
    text = "<answer>Zoey is a knight, Oliver is a knave, Grace is a knight</answer>"
    assert make_verifiers()["knights"](text, ANSWER).outcome is Outcome.CORRECT
