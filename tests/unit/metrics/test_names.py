"""Names of metrics in words: fixed keys, keys with a part of the run's own, and keys that no table has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from cases import each_case

import megasharp
from megasharp.metrics.names import NAMES, PATTERNS, in_words

PACKAGE = Path(megasharp.__file__).parent
# A method's own metrics are named by the method, which stands in the key.
GROUPS = {key.partition("/")[0] for key in NAMES} - {"method"}


@each_case(
    ("key", "words"),
    [
        ("policy/clip_high", "share of tokens clipped above"),
        ("eval/countdown_test/pass@64", "pass@64 on countdown_test"),
        ("eval/a/b+memory/maj@4", "maj@4 on a/b+memory"),
        ("eval/dev/token_entropy_sampled", "token entropy from samples on dev (nats)"),
        ("eval/dev/lambda_sample", "log-prob of the sampled token on dev, \u039b(sample)"),
        ("group/hardness_0.0_0.2", "correct responses in groups with 0.0 to 0.2 wrong"),
        ("group/algebra/pass@4", "pass@4 on training prompts: algebra"),
        ("reward/function/length/mean", "reward of function length/mean"),
        ("responses/trained_length_p90", "90th percentile of trained responses' lengths (tokens)"),
        ("candidates/lambda_2", "log-prob of candidate 2, \u039b(2)"),
        ("time/replica_check", "seconds per step: replica_check"),
        ("method/iac/weight_0.2_0.4", "iac: weight 0.2 0.4"),
        ("something/of_its_own", "something: of its own"),
        ("{odd}", "{odd}"),
    ],
)
def test_a_metric_in_words(key: str, words: str) -> None:
    assert in_words(key) == words


def unnamed(text: str) -> set[str]:
    """Return the metrics that a program's text writes out and that no table names; a key's beginning ends with _."""
    nodes = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    keys = {key for key in nodes if isinstance(key, str) and re.fullmatch(r"[a-z]+(/\w+)+(?<!_)", key)}
    known = {key for key in keys if key in NAMES or any(re.fullmatch(pattern, key) for pattern in PATTERNS)}
    return {key for key in keys - known if key.partition("/")[0] in GROUPS}


def test_a_metric_that_the_package_writes_out_has_a_name_in_words() -> None:
    found = {path.relative_to(PACKAGE): unnamed(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: keys for path, keys in found.items() if keys} == {}, "name them in megasharp/metrics/names.py"
    assert unnamed('{"policy/loss": 1, "policy/of_a_new_kind": 2, "group/dropped_": 3}') == {"policy/of_a_new_kind"}
