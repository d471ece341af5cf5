"""Parse turns with SGLang's own parsers; run with the engines' Python.

Reads a JSON list of texts from standard input, and writes for each text the calls that each parser finds.
"""

from __future__ import annotations

import json
import sys

from megasharp.rollout.sglang.engine.torchvision_ops import define_missing_ops


def main() -> None:
    """Parse all texts."""
    # Before SGLang's first import.
    define_missing_ops()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.hermes_detector import HermesDetector
    from sglang.srt.function_call.llama32_detector import Llama32Detector
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector

    parsers = {"hermes": HermesDetector, "qwen25": Qwen25Detector, "llama3": Llama32Detector}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
        for name in ("f", "g")
    ]
    found = []
    for text in json.load(sys.stdin):
        answers = {name: parser().detect_and_parse(text, tools).calls for name, parser in parsers.items()}
        found.append(
            {name: [(call.name, json.loads(call.parameters)) for call in some] for name, some in answers.items()}
        )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
