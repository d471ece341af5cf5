"""DLC by SGLang's custom logit processor, from the client's side."""

from __future__ import annotations

import json
import pickle

from dlc_ways.processor import MemoryProcessor
from dlc_ways.work import Responses, Way, Work, post
from megasharp.rollout.sglang.client.api import EngineApi


def logit_processor(api: EngineApi) -> Way:
    """The way through a server of `processor_server.py`."""
    # The class by its name: the server can import it.
    processor = json.dumps({"callable": pickle.dumps(MemoryProcessor).hex()})

    def sample(work: Work) -> Responses:
        # SGLang gives a processor the request itself only where the request has parameters of its own.
        common = {"max_new_tokens": work.new_tokens, "temperature": 1.0, "custom_params": {"begun": 0}}
        body = {
            "input_ids": [list(prompt) for prompt in work.prompts],
            "sampling_params": [{**common, "sampling_seed": seed} for seed in work.seeds],
            "custom_logit_processor": processor,
            "return_logprob": True,
        }
        return [answer["output_ids"] for answer in post(api, body)]

    return sample
