"""Are the bytes that a comparison reads those that were written? Checked as they pass.

In: a candidate's beamq.json, and every stored tensor as its loader reads it. Out: names of those
whose checksum is another one. Nothing is read for it; scalars that stand beside weights, which the
loader looks up by themselves, are not seen.
"""

from __future__ import annotations

import threading

import torch

from beamq.errors import BeamqError
from beamq.eval.verify.folder import HF_QUANT_NAME
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import Manifest, file_checksum, new_checksum
from beamq.io.safetensors_header import TensorSpec
from beamq.io.source import INDEX_NAME

FILES = ("config.json", HF_QUANT_NAME, INDEX_NAME)


class ReadSums:
    """Its `tap` is a loader's (`model.fill.Tap`); `damaged` is complete when all was read."""

    def __init__(self, manifest: Manifest | None) -> None:
        """Without a manifest, or with one whose algorithm is unknown, nothing is checked."""
        self._algorithm = "" if manifest is None else manifest.algorithm
        self._recorded = {} if manifest is None else manifest.tensors
        self._damaged: set[str] = set()
        self._lock = threading.Lock()
        self.fault: str | None = None
        try:
            if self._recorded:
                new_checksum(self._algorithm)
        except BeamqError as fault:
            self.fault, self._recorded = str(fault), {}

    def tap(self, spec: TensorSpec, first: int, tensor: torch.Tensor) -> None:
        """Whole tensors are checked; rows of packed ones have no checksum."""
        recorded = self._recorded.get(spec.name)
        if recorded is None or first or tensor.nbytes != spec.nbytes:
            return
        checksum = new_checksum(self._algorithm)
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy())
        if checksum.hexdigest() != recorded:
            with self._lock:
                self._damaged.add(spec.name)

    @property
    def damaged(self) -> tuple[str, ...]:
        """Names of tensors that are not what was written, sorted."""
        return tuple(sorted(self._damaged))


def changed_files(checkpoint: Checkpoint, manifest: Manifest | None) -> list[str]:
    """Configs and index that are not those beamq.json has the checksum of."""
    if manifest is None or manifest.files is None:
        return []
    listed, found = manifest.files, []
    for name in FILES:
        if name not in listed or not checkpoint.source.has(name):
            continue
        try:
            same = file_checksum(checkpoint.source.path(name), manifest.algorithm) == listed[name]
        except BeamqError:  # an algorithm that is not here: `ReadSums.fault` says so
            continue
        if not same:
            found.append(name)
    return found
