"""Keeping an evaluation's samples: how much of each, up to a bound of bytes, and how many bytes to expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megasharp.common.formats import Keep
from megasharp.evals.result import EvalSetting
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import FOLDER, SamplesInfo, parts

# Bytes of a sample in a part without its text, of a token of text and of a token id (tools/measure_eval_memory.py).
_ROW = 100
_OF_TEXT, _OF_ID = 1.5, 2.5
_MB = 1 << 20


def expected_bytes(samples: int, max_tokens: int, keep: Keep) -> int:
    """Return the bytes that samples take where each has all its tokens: lengths are not known before."""
    each = {"none": 0.0, "answers": 0.0, "texts": _OF_TEXT, "tokens": _OF_TEXT + _OF_ID}[keep]
    return 0 if keep == "none" else round(samples * (_ROW + each * max_tokens))


@dataclass(frozen=True, slots=True)
class Keeping:
    """The part of samples that is kept, with texts up to `mb` for all evaluations below `root` together."""

    root: Path
    keep: Keep
    mb: int

    def open(self, folder: Path, setting: EvalSetting, say: Callable[[str], None] = lambda _: None) -> SampleStore:
        """Open the store of an evaluation in `folder`; `say` gets a line where the bound is reached.

        Raises UserError as `SampleStore` does.
        """
        fields = asdict(setting)
        identity, suite = fields.pop("identity"), fields.pop("suite")

        def full() -> None:
            say(
                f"{suite}: samples below {self.root} have no more room within {self.mb:,} MiB (--keep-mb, "
                "eval.keep_mb): answers alone are kept from here on"
            )

        own = sum(path.stat().st_size for path in parts(folder, suite))
        return SampleStore(
            folder, SamplesInfo(suite, fields, identity, self.keep), self.mb * _MB - self.others(own), full
        )

    def others(self, own: int) -> int:
        """Return the bytes of parts below `root` without `own`."""
        return sum(path.stat().st_size for path in self.root.rglob(f"{FOLDER}/*.parquet")) - own

    def line(self, name: str, samples: int, max_tokens: int) -> str:
        """Say what will be kept of so many samples, and its size."""
        if self.keep == "none":
            return f"{name}: samples are kept until the result is there (--keep none)"
        most = expected_bytes(samples, max_tokens, self.keep)
        what = {"answers": "answers without texts", "texts": "texts", "tokens": "texts and token ids"}[self.keep]
        size = f"{most / 1e6:,.1f} MB" if most >= 1e6 else f"{most / 1e3:,.0f} kB"
        line = f"{name}: {what} of {samples:,} samples are kept, at most about {size}"
        if self.keep == "answers":
            return line
        return (
            f"{line} (if all have {max_tokens:,} tokens); above {self.mb:,} MiB (--keep-mb, eval.keep_mb) answers alone"
        )
