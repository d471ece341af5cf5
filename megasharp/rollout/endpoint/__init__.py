"""An engine over a server of OpenAI's API: `server.py` HTTP, `dialect.py` what is sent and read, `engine.py`."""

from typing import Literal

# Prompts as messages to /chat/completions, or as a text or as tokens to /completions.
Style = Literal["chat", "text", "tokens"]
