"""`megasharp toy`: what it refuses, in one line that names what the user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasharp.cli.toy import run_study
from megasharp.common.errors import UserError
from megasharp.studies import STUDIES
from megasharp.studies.study import Options


def refusal(name: str, options: Options, out: Path) -> str:
    with pytest.raises(UserError) as refused:
        run_study(name, options, out)
    assert not list(out.iterdir()) and "\n" not in str(refused.value)
    return str(refused.value)


def test_an_unknown_study_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = refusal("dogs", Options(), tmp_path)
    assert "'dogs'" in message and all(name in message for name in STUDIES)


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if not study.takes_model])
def test_a_model_is_refused_where_none_is_measured(name: str, tmp_path: Path) -> None:
    message = refusal(name, Options(model=Path("x")), tmp_path)
    assert message.startswith("--model x: ") and name in message and "bounds" in message


def test_a_missing_model_is_named_as_the_option_that_gave_it(tmp_path: Path) -> None:
    message = refusal("bounds", Options(model=Path("/nonexistent/model")), tmp_path)
    assert message.startswith("--model /nonexistent/model: ") and "model.path" not in message
