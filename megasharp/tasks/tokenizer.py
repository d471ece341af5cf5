"""Tokenizers from a Hugging Face folder on disk: text to ids and back, and the ids that end a response."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megasharp.common.errors import UserError, one_line, reason_at
from megasharp.common.lean_transformers import AutoTokenizer

# The day that chat templates take for today: the one in Llama 3.1's own template.
_DAY = datetime(2024, 7, 26)
# A text that no chat template has words of its own like.
ANSWER = "7f3a9c41"


@dataclass(frozen=True, slots=True, eq=False)
class TextTokenizer:
    """A model's tokenizer.

    `stop_token_ids` ends a response: the tokenizer's own end token and those of generation_config.json,
    ascending. `vocabulary_size` is one more than the largest id, so a model needs at least that many rows. `bos` is the
    token with which `plain` begins a text: at first the one that the tokenizer itself adds, if any. `special_ids` are
    those of special tokens but the unknown one.
    """

    backend: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    vocabulary_size: int
    bos: int | None
    special_ids: frozenset[int]

    def with_bos(self, wanted: bool | None) -> TextTokenizer:
        """Return a tokenizer that begins plain texts with its begin-of-text token, or not; as it is for None.

        Raises UserError where it has no such token.
        """
        if wanted is None:
            return self
        if wanted and self.backend.bos_token_id is None:
            raise UserError(f"data.bos: the tokenizer of {self.backend.name_or_path} has no begin-of-text token")
        return replace(self, bos=self.backend.bos_token_id if wanted else None)

    def digest(self) -> str:
        """Return the SHA-256 of its rules between text and tokens, its chat template and its stop tokens."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        rules = sorted(self.backend.get_vocab().items()) if fast is None else fast.to_str()
        return hashlib.sha256(repr((rules, self.backend.chat_template, self.stop_token_ids)).encode()).hexdigest()

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as it stands: no special tokens, no chat template.

        Halves of surrogate pairs, which JSON can hold and Unicode text cannot, are read as U+FFFD.
        """
        readable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # Not verbose: limits on lengths are checked elsewhere, by the model's own number.
        return tuple(self.backend.encode(readable, add_special_tokens=False, verbose=False))

    def plain(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole text, begun with `bos` unless it begins with a special token of its own."""
        tokens = self.encode(text)
        if self.bos is None or not tokens or tokens[0] in self.special_ids:
            return tokens
        return (self.bos, *tokens)

    def chat(self, turns: Sequence[tuple[str, str]], tools: str = "") -> str | None:
        """The text that the model's chat template makes of messages (role, text), up to where the answer begins.

        `tools` is a JSON list of schemas that it writes too; empty for none. None where the tokenizer has no chat
        template. Raises UserError where it has one that cannot write these, and for tools where it has none.
        """
        schemas = json.loads(tools) if tools else None
        if not self.backend.chat_template:
            if schemas:
                raise UserError(
                    f"{self.backend.name_or_path}: without a chat template no prompt says which tools there are"
                )
            return None
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            text = self.backend.apply_chat_template(
                messages,
                tools=schemas,
                chat_template=_on_one_day(self.backend.get_chat_template()),
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates are programs, and raise what they like
            roles = ", ".join(role for role, _ in turns)
            raise UserError(
                f"{self.backend.name_or_path}: its chat template cannot write messages of {roles} "
                f"({one_line(error)[:200]}); set data.prompt (for an evaluation eval.prompt) to a template that has "
                "other messages, or to plain"
            ) from error
        if lost := [each["function"]["name"] for each in schemas or () if each["function"]["name"] not in str(text)]:
            raise UserError(f"{self.backend.name_or_path}: its chat template leaves out the tools {', '.join(lost)}")
        return str(text)

    def turn_end(self) -> int | None:
        """The special token with which the chat template ends an answer; None where there is no such token."""
        try:
            written = self.chat((("user", "?"), ("assistant", ANSWER), ("user", "?")))
        except UserError:  # a template for one message alone
            return None
        rest = self.encode((written or "").partition(ANSWER)[2])
        return rest[0] if rest and rest[0] in self.special_ids else None

    def missing(self, markers: Sequence[str]) -> list[str]:
        """Those of the special tokens' names that are no single tokens here."""
        known = self.backend.get_vocab() if markers else {}
        return [marker for marker in markers if marker not in known]

    def written_out(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special ones by their names."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, the end, padding and other special tokens left out."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=True))

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of several token lists, as `decode` gives them one by one, in one call."""
        lists = [list(tokens) for tokens in sequences]
        return list(self.backend.batch_decode(lists, skip_special_tokens=True)) if lists else []

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token's own text, special ones by their names; joined they read as the text does.

        A token that holds a part of a character only is U+FFFD, so there the join differs.
        """
        return [self._token_text(token) for token in tokens]

    @lru_cache(maxsize=1 << 18)  # noqa: B019  (a tokenizer lives as long as its process)
    def _token_text(self, token: int) -> str:
        # Some decoders leave out the space that begins a text: so it is decoded after another token.
        before = self.stop_token_ids[0]
        text, pair = (
            str(self.backend.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for ids in ([before], [before, token])
        )
        return pair.removeprefix(text)


def _on_one_day(template: str) -> str:
    """Return a chat template whose `strftime_now`, transformers' name for the clock, always says `_DAY`.

    By the clock, a run resumed tomorrow would have other prompts. transformers hands templates no functions, so this
    one is a macro: it replaces each of strftime's codes in a format.
    """
    if "strftime_now" not in template:
        return template
    codes = "".join(f" | replace('%{code}', '{_DAY.strftime(f'%{code}')}')" for code in "aAbBcdHIjmMpSUwWxXyYZ")
    # The line break, which Jinja drops after a block, lets the template begin at the start of a line as before.
    return f"{{% macro strftime_now(format) %}}{{{{ format{codes} }}}}{{% endmacro %}}\n{template}"


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer of a Hugging Face folder, from local files only.

    Padding falls back to the first stop token, as models without a padding token expect.
    Raises UserError if the folder or the tokenizer is missing or broken, or if nothing names an end token.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; model.path must be a Hugging Face checkpoint folder")
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds here, and all mean the same to the user
        raise UserError(
            f"{folder}: cannot load its tokenizer ({one_line(error)}); "
            "the folder needs tokenizer.json and tokenizer_config.json"
        ) from error
    named = set(_generation_stops(folder / "generation_config.json"))
    if backend.eos_token_id is not None:
        named.add(backend.eos_token_id)
    if not named:
        raise UserError(
            f"{folder}: no end token; set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
        )
    stops, pad = tuple(sorted(named)), backend.pad_token_id
    largest = max(backend.get_vocab().values())
    bos = backend.bos_token_id
    adds_bos = bos is not None and backend.encode("", add_special_tokens=True)[:1] == [bos]
    special = {number for number, token in backend.added_tokens_decoder.items() if token.special}
    return TextTokenizer(
        backend,
        stops,
        stops[0] if pad is None else pad,
        largest + 1,
        bos if adds_bos else None,
        frozenset(special - {backend.unk_token_id}),
    )


def _generation_stops(path: Path) -> list[int]:
    """The `eos_token_id` of a generation config, one id or a list; none if the file or key is missing."""
    if not path.exists():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object ({reason_at(error, path)}); repair or remove it") from error
    stops = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(stop, int) and not isinstance(stop, bool) and stop >= 0 for stop in stops):
        raise UserError(f"{path}: 'eos_token_id' must be a token id or a list of them, got {value!r}")
    return stops
