"""The parameters of a mixture of experts: a router for each layer, and a gated MLP for each expert.

Megatron numbers the experts of a rank from 0 on; names here have their numbers in the whole model. `local_name` of the
layer spec gives the names of Transformer Engine's grouped experts in this form, too.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Dimension, Experts
from megasharp.convert.families.dense_decoder import HF_LAYER, LAYER, refuse
from megasharp.convert.mapping import ColumnSplit, GatedMLP, Replicated, Rule

_EXPERT = LAYER + "mlp.experts.local_experts.{expert}."


def rules(router: str, experts: str, maps: tuple[str, str, str], width: Dimension) -> tuple[Rule, ...]:
    """Return the rules for a Hugging Face layer's `router` and `experts`, with the names of gate, up and down."""
    gate, up, down = (f"{HF_LAYER}{experts}.{{expert}}.{name}.weight" for name in maps)
    return (
        Replicated(LAYER + "mlp.router.weight", (f"{HF_LAYER}{router}.weight",), (("experts", "hidden"),)),
        GatedMLP(_EXPERT + "linear_fc1.weight", (gate, up), ((width, "hidden"), (width, "hidden"))),
        ColumnSplit(_EXPERT + "linear_fc2.weight", (down,), (("hidden", width),)),
    )


def check(config: PretrainedConfig, experts: Experts) -> None:
    """Refuse a router that chooses more experts than there are, or only one, and experts without width.

    Raises:
        UserError: the config's number of experts by token is not at least 2 and at most all, or there are fewer than 2.
    """
    if experts.count < 2:
        raise refuse(config, "num_experts", experts.count, "at least 2")
    if experts.ffn < 1:
        raise refuse(config, "moe_intermediate_size", experts.ffn, "at least 1")
    if not 2 <= experts.per_token <= experts.count:
        # With one expert a softmax over the chosen ones is 1 and has no gradient.
        supported = f"2 to {experts.count}, the number of experts"
        raise refuse(config, "num_experts_per_tok", experts.per_token, supported)
