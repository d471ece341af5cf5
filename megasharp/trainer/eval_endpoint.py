"""A server of OpenAI's API as what an evaluation measures: no weights, no tokenizer, results by its address and model.

Prompts are the problems' messages, which the server's chat template writes, their text, or with a model's folder the
tokens that an evaluation of that folder would read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.evals.suites import Suite
from megasharp.rollout.endpoint import Style
from megasharp.rollout.endpoint.endpoint_engine import EndpointEngine, EndpointSettings, Patience, model_of
from megasharp.rollout.endpoint.http_calls import KEY_VARIABLE, Address, Server
from megasharp.rollout.step_request import Engine
from megasharp.tasks.prompts import template_named


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The options of the command line about an endpoint."""

    url: str
    model: str | None = None
    style: Style = "chat"
    concurrency: int = 32
    samples_per_call: int = 1
    limit_s: float = 1800.0


class Endpoint:
    """A server that was asked for its model, and how to sample from it."""

    def __init__(self, options: EndpointOptions, note: Say) -> None:
        """Raises UserError where the server cannot be reached, refuses the key, or has no such model to choose."""
        address = Address.parse(options.url)
        self._server = Server(address)
        if self._server.has_key and address.scheme == "http" and not address.is_local:
            note(f"{address}: the key in {KEY_VARIABLE} goes there unencrypted")
        self._settings = EndpointSettings(
            address,
            model_of(self._server, options.model),
            options.style,
            options.concurrency,
            options.samples_per_call,
            Patience(limit_s=options.limit_s),
        )
        self._note = note

    @property
    def model(self) -> str:
        """The model's name."""
        return self._settings.model

    @property
    def place(self) -> Path:
        """The folder of its results, below evals/."""
        return Path(self.model.strip("/").replace("/", "--") or "model")

    @property
    def identity(self) -> dict[str, str]:
        """All that samples depend on; the weights behind a name may change, which nothing here can see."""
        several = (
            {"samples_per_call": str(self._settings.samples_per_call)} if self._settings.samples_per_call > 1 else {}
        )
        return {
            "weights": f"{self.model} at {self._settings.address}",
            "engine": f"endpoint, {self._settings.style}",
            **several,
        }

    def check(self, suites: Sequence[Suite]) -> None:
        """Raise UserError for a prompt that writes a chat template's markers into a message."""
        for suite in suites if self._settings.style == "chat" else ():
            template = template_named(suite.prompt) if suite.prompt else None
            if template and template.markers:
                raise UserError(
                    f"eval: suite {suite.name} asks by {suite.prompt}, which writes {template.markers[0]} itself; set "
                    f"--prompt={template.in_chat or 'chat'}, or --endpoint-api text"
                )

    @contextmanager
    def engine(self, _: Path) -> Iterator[Engine]:
        """The engine; at its end lines say what the server did not take or cut."""
        with closing(EndpointEngine(self._server, self._settings)) as engine:
            try:
                yield engine
            finally:
                for line in engine.remarks():
                    self._note(line)
