"""Names of metrics in words: fixed keys, keys with a part of the run's own, and keys that no table has."""

from __future__ import annotations

from cases import each_case

from megasharp.metrics.names import in_words


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
