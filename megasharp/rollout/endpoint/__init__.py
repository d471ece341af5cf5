"""An engine over a server of OpenAI's API: `http_calls.py`, `dialect.py` (sent and read), `endpoint_engine.py`."""

from typing import Literal

# Prompts as messages to /chat/completions, or as a text or as tokens to /completions.
Style = Literal["chat", "text", "tokens"]
