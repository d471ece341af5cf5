"""The prompts of a run: how its suites are asked, one that is shown, and the refusal of another model's markers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.terminal import visible
from megasharp.config.core import Tree
from megasharp.config.data import AUTO, DataSource, MixedSource
from megasharp.config.run_config import RunConfig
from megasharp.evals.suites import OWN, Asking, Suite
from megasharp.tasks.final_answer import opens_thinking
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.own_reward import is_own
from megasharp.tasks.problems import is_worded, prompt_of, published_prompt, task_of
from megasharp.tasks.prompts import by_chat, markers_in, template_named
from megasharp.tasks.stream import TokenizedPrompts
from megasharp.tasks.tokenizer import TextTokenizer

# Of a prompt that is shown: characters of its beginning and of its end.
_HEAD, _TAIL = 280, 120
# In the place of a template's name.
_WORDS = "the rows' own words"
# Templates that sets had, by name, when prompts without `eval.prompt` were stored; they have others since.
_WAS_ASKED_BY = {"dapo_math_17k": "boxed_verl"}


def checked_name(prompt: str) -> str:
    """Return the name of a template, or `suite`. Raises UserError for another one."""
    if prompt != OWN:
        template_named(prompt)
    return prompt


def trained_by(config: RunConfig, prompts: TokenizedPrompts) -> dict[str, str]:
    """Return training's tasks, each with its prompts' template, which is empty for words or messages of own rows.

    Of several sources of a task in a mixture, the first counts.
    """
    found: dict[str, str] = {}
    for source in config.data.sources:
        found.setdefault(task_of(source), _template(source, prompts))
    return found


def _template(source: DataSource, prompts: TokenizedPrompts) -> str:
    return prompt_of(source) if is_worded(source, (item for item, _ in _prompts(source, prompts))) else ""


def _prompts(source: DataSource, prompts: TokenizedPrompts) -> Iterator[tuple[TaskItem, tuple[int, ...]]]:
    """The problems of one source, with their tokens."""
    name = source.own_name if isinstance(source, MixedSource) else None
    return ((item, tokens) for item, tokens in prompts.prompts if name in (None, item.source))


def asking_of(config: RunConfig) -> Asking:
    """Return how a run asks suites whose files name no template. Raises UserError for an unknown one."""
    name = config.eval.prompt and checked_name(config.eval.prompt)
    # The first source of a task counts.
    sources = {task_of(source): source for source in reversed(config.data.sources)}
    words = {task: (each.system, each.template) for task, each in sources.items() if each.system or each.template}
    return Asking(name, {task: prompt_of(source) for task, source in sources.items()}, words)


def prompts_meant(stored: Tree) -> Tree:
    """Return a stored configuration with the prompts that one without `eval.prompt` (before 2026-11-25) means.

    Sets and tasks were asked by their published templates, suites by their own, and no token began a plain prompt.
    """
    data: Any = stored.get("data")
    evaluation: Any = stored.get("eval") or {}
    if "prompt" in evaluation or not isinstance(data, dict):
        return stored
    own = published_prompt(data.get("set"), data.get("task"))
    prompt = data.get("prompt") or _WAS_ASKED_BY.get(str(data.get("set"))) or (own if by_chat(own) != own else None)
    return {**stored, "data": {**data, "prompt": prompt, "bos": False}, "eval": {**evaluation, "prompt": OWN}}


def check_words(data: DataSource, tokenizer: TextTokenizer, where: str) -> None:
    """Raise UserError for special tokens in the words around own prompts, which are text of messages."""
    for key, text in (("data.system", data.system), ("data.template", data.template)):
        found = markers_in(text or "")
        if found and (tokenizer.backend.chat_template or tokenizer.missing(found)):
            raise UserError(
                f"{where}: {key} has {found[0]} in it: it is the text of a message, and the model's own chat template "
                "writes special tokens; leave them out"
            )


def check_mark(mark: str, tokenizer: TextTokenizer, key: str) -> None:
    """Raise UserError for a mark of final answers that no response's text has: special tokens are left out of it."""
    if mark != AUTO and mark not in tokenizer.decode(tokenizer.encode(mark)):
        raise UserError(
            f"{key}: {mark!r} is a special token of {tokenizer.backend.name_or_path}, which the texts of responses are "
            "without, so every response would be wrong; name a mark that is text"
        )


def check_markers(
    training: Iterable[str], suites: Sequence[Suite], tokenizer: TextTokenizer, where: str, key: str = "eval.prompt"
) -> None:
    """Raise UserError for a template whose own words name special tokens that this tokenizer does not have.

    `training` are the templates of training, empty for none, and `key` sets that of the suites. Such names in a
    problem's text are the problem's.
    """
    trained = [("it", name, "data.prompt") for name in training]
    asked = [*trained, *((f"suite {each.name}", each.prompt, key) for each in suites)]
    for who, name, its_key in asked:
        template = template_named(name) if name else None
        missing = tokenizer.missing(template.markers) if template else []
        if template and missing:
            raise UserError(
                f"{where}: {who} asks by {name}, whose {missing[0]} is no token of {tokenizer.backend.name_or_path}; "
                f"set {its_key}={template.in_chat or 'chat'}, which the model's own chat template writes"
            )


def shown_prompts(config: RunConfig, prompts: TokenizedPrompts, tokenizer: TextTokenizer) -> list[str]:
    """Return each source's first prompt in one line, special tokens and control characters written out, and its making.

    A mixture's begin with the source's name.
    """
    if not config.data.mix:
        return [_shown(config.data, prompts, tokenizer)]
    return [f"{source.own_name}: {_shown(source, prompts, tokenizer)}" for source in config.data.mix]


def _shown(source: DataSource, prompts: TokenizedPrompts, tokenizer: TextTokenizer) -> str:
    item, tokens = next(_prompts(source, prompts))
    by = _template(source, prompts) or (_WORDS if item.turns else f"{task_of(source)}'s own")
    if item.turns:
        written = tokenizer.chat(item.turns) is not None
        by += " in the model's chat template" if written else " as plain text, for the model has no chat template"
    else:
        by += ", plain text"
    written_out = tokenizer.written_out(tokens)
    by += "; responses begin inside of thinking" if opens_thinking(written_out) else ""
    text = visible(written_out).replace("\n", "⏎").replace("\t", "⇥")
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} [...] {text[-_TAIL:]}"
    return f"{text} ({len(tokens)} tokens; {by})"


def left_out_note(prompts: TokenizedPrompts, tokenizer: TextTokenizer) -> list[str]:
    """Return the line that says which messages of the first prompt the chat template does not write, if any.

    Those of an assistant are not looked at: templates leave a former answer's reasoning out on purpose.
    """
    turns = next((item.turns for item, _ in prompts.prompts), ())
    text = tokenizer.chat(turns) if turns else None
    lost = [role for role, said in turns if text is not None and role != "assistant" and said.strip() not in text]
    if not lost:
        return []
    return [
        f"the model's chat template leaves out or changes the {' and the '.join(lost)} message of the first prompt, "
        "which is shown above as the model reads it"
    ]


def turn_end_note(prompts: TokenizedPrompts, tokenizer: TextTokenizer) -> list[str]:
    """Return the line that says that responses do not stop where the chat template ends an answer, if they do not."""
    end = tokenizer.turn_end() if any(item.turns for item, _ in prompts.prompts) else None
    if end is None or end in tokenizer.stop_token_ids:
        return []
    name, stops = tokenizer.written_out([end]), tokenizer.written_out(tokenizer.stop_token_ids)
    return [
        f"the model's chat template ends an answer with {name} (token {end}), at which responses do not stop (they do "
        f"at {stops}); where the model writes it, add {end} to eos_token_id in generation_config.json"
    ]


def prompt_differences(training: Mapping[str, str], suites: Sequence[Suite]) -> list[str]:
    """Return lines that say which suites of a task of training's are asked otherwise than training, if any are.

    Where a function of the user's judges, any suite of no other task of training's is compared.
    """
    own = next((template for task, template in training.items() if is_own(task)), None)
    other: dict[str, list[str]] = {}
    for each in suites:
        template = training.get(each.task, own)
        if template is not None and each.prompt != template:
            other.setdefault(template, []).append(f"{each.name} asks by {each.prompt or _WORDS}")
    return [
        f"eval prompts differ from training's: suite {', '.join(names)}, training by {template or _WORDS}; set "
        "eval.prompt"
        for template, names in other.items()
    ]
