"""The split of a model over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The split of the policy over ranks. `world` = dp * tp * pp * cp.

    Of a mixture of experts, the dp * tp * cp ranks of a pipeline stage hold the experts in `ep` parts, each expert cut
    over `etp` ranks, and each part as often as there are ranks left. Each pipeline rank holds `vpp` chunks of layers;
    above 1 the stages interleave, so that fewer of them stand idle.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def splits_tensors(self) -> bool:
        """True where ranks exchange activations inside a layer."""
        return self.tp > 1 or self.cp > 1

    @property
    def shards(self) -> int:
        """Number of ranks that share the optimizer's state."""
        return self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """Number of ranks that hold the same experts, and share their optimizer's state."""
        return self.dp * self.tp * self.cp // (self.ep * self.etp)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel place of this rank of the world, in Megatron's order: tp, cp, dp, pp."""
        return rank // (self.tp * self.cp) % self.dp

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of a rank's number of micro-batches: interleaved stages take `pp` of them in turn."""
        return self.pp if self.vpp > 1 else 1
