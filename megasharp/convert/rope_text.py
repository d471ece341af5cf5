"""The rotary settings of a config.json's text: transformers only warns of a value that gives no frequencies.

They stand in `rope_parameters`, in files of older versions in `rope_scaling`. What must be so is transformers' own
(modeling_rope_utils): its rules make the frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megasharp.convert.expected import SIZE, Expected, is_above, is_at_least, is_size, or_null

_TABLES = ("rope_parameters", "rope_scaling")


def _is_above_0(value: object) -> bool:
    return is_above(value, 0)


# Of 1, every dimension would have one wavelength.
_THETA = Expected(("rope_theta",), lambda value: is_above(value, 1), "a number above 1, such as 10000.0")
_EXPECTED = (
    _THETA,
    Expected(("factor",), lambda value: is_at_least(value, 1), "a number of at least 1"),
    Expected(("low_freq_factor", "high_freq_factor"), _is_above_0, "a positive number"),
    Expected(("original_max_position_embeddings",), is_size, SIZE),
    Expected(("attention_factor", "beta_fast", "beta_slow"), or_null(_is_above_0), "a positive number, or null"),
    Expected(
        ("mscale", "mscale_all_dim"), or_null(lambda value: is_at_least(value, 0)), "a number of at least 0, or null"
    ),
    Expected(("truncate",), lambda value: isinstance(value, bool), "either true or false"),
    Expected(("partial_rotary_factor",), _is_above_0, "a positive number"),
)
_NAMED = {"rope_type", "type"} | {key for expected in _EXPECTED for key in expected.keys}


def rope_faults(raw: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with the rotary settings, a message each; the tables must be tables or null."""
    for name in _TABLES:
        settings = raw.get(name) or {}
        assert isinstance(settings, dict)
        yield from _table_faults(settings, f"{name}.")
    # Null where a table has it.
    if raw.get("rope_theta") is not None:
        yield from _THETA.faults(raw)


def _table_faults(settings: Mapping[str, object], table: str) -> Iterator[str]:
    for expected in _EXPECTED:
        yield from expected.faults(settings, table)
    for key, value in settings.items():
        # Other versions' settings: the rules that are built do not read them.
        if key not in _NAMED and isinstance(value, str | dict):
            yield f"{table}{key}={value!r} must be a number"
    high, low = settings.get("high_freq_factor"), settings.get("low_freq_factor")
    if isinstance(high, int | float) and isinstance(low, int | float) and high <= low:
        yield f"{table}high_freq_factor={high!r} must be greater than low_freq_factor={low!r}"
