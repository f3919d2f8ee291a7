"""What a calibration needs and can have before its first layer: data, device, memory, model.

In: an opened source and `CalibrationOptions`. Out: `Prepared`. Faults of the data, the device or
the options end the run here, before any work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from beamq.calib.data import load_calibration_data
from beamq.calib.options import CalibrationOptions
from beamq.checkpoint import Checkpoint
from beamq.ranks import Ranks
from beamq.version import __version__

if TYPE_CHECKING:
    import torch


class Prepared:
    """Raises `CalibrationError`, `UsageError`, `DeviceError` or `MemoryBudgetError` when made."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: CalibrationOptions,
        ranks: Ranks,
        *,
        visited: bool = False,
        waiting_nbytes: int = 0,
        taken_nbytes: int = 0,
    ) -> None:
        """What a conversion on the way adds to memory: `visited`, that it rounds experts by their
        inputs; `waiting_nbytes`, of members that wait for their partners; `taken_nbytes` of the
        device, besides the forward pass."""
        from beamq.calib.device import choose_device, plan_device  # torch, only where a model runs

        self.checkpoint = checkpoint
        self.options = options
        self.ranks = ranks
        self.device: torch.device = choose_device(options.device, ranks)
        samples, length = options.size(self.device.type, checkpoint.config)
        self.data = load_calibration_data(
            options.data,
            checkpoint.root,
            samples=samples,
            sequence_length=length,
            seed=options.seed,
        )
        plan = plan_device(
            checkpoint,
            options,
            ranks,
            self.device,
            samples=self.data.samples,
            length=self.data.sequence_length,
            visited=visited,
            taken_nbytes=taken_nbytes,
        )
        self.plan = replace(plan, host_nbytes=plan.host_nbytes + waiting_nbytes)
        self.fingerprint = checkpoint.content_digest()

    @property
    def state_nbytes(self) -> int:
        """Bytes on disk of a run's state: two sets of hidden states, the old one until the new one
        is whole."""
        itemsize = 4 if self.options.dtype == "float32" else 2
        return 2 * self.data.tokens * int(self.checkpoint.config["hidden_size"]) * itemsize

    def data_record(self) -> dict[str, Any]:
        """What the statistics say of the data, and of how it was run."""
        return {**self.data.to_dict(), "activations": self.options.dtype}

    def identity(self) -> dict[str, str]:
        """What must be equal for a run to continue another; options under their names."""
        import torch

        return {
            "version of beamq": __version__,
            "version of torch": torch.__version__,
            "source": self.checkpoint.fingerprint(),
            "device": self.device.type,
            "--samples": str(self.data.samples_asked),
            "--sequence-length": str(self.data.sequence_length),
            "--seed": str(self.data.seed),
            "--data": self.data.digest,
            **self.options.recorded(),
        }
