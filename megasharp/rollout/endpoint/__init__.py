"""An engine over a server of OpenAI's API: `server.py` HTTP, `dialect.py` what is sent and read, `engine.py`."""
