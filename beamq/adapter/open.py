"""An adapter's files: opened, read once, and refused where they cannot be merged.

In: a folder or a repository on the Hub. Out: an `Adapter`, whose digest is over all of its content;
what its tensors do to a Beam is `adapter.read`'s matter. No pickle is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from beamq.adapter.config import CONFIG_NAME, AdapterConfig, read_adapter_config
from beamq.adapter.read import WEIGHTS_NAME
from beamq.errors import AdapterError
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, open_files
from beamq.io.safetensors_header import TensorSpec, few
from beamq.io.source import SourceFiles
from beamq.limits import usable_cores

PIECE_BYTES = 1 << 22
MAX_READERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter's files, its config and tensors, and a SHA-256 over all of its content.

    `zeros` names the tensors in which every value is zero.
    """

    files: SourceFiles
    config: AdapterConfig
    tensors: tuple[TensorSpec, ...]
    digest: str
    zeros: frozenset[str]

    @property
    def label(self) -> str:
        """What records may show: the folder's own name, or `org/name`; never a path."""
        return self.files.label


def open_adapter(adapter: str | Path) -> Adapter:
    """Open a folder or `org/name[@revision]` on the Hub, and read all of it once.

    Raises `AdapterError` for a config that cannot be merged, for weights that are only a pickle,
    and for a value that is NaN or infinite.
    """
    files = open_files(adapter, cache_bytes=1 << 62)
    try:
        if not files.has(CONFIG_NAME):
            why = "; it holds a model: are SOURCE and ADAPTER swapped?"
            raise AdapterError(
                f"{files.name}: no {CONFIG_NAME}; expected the folder of an adapter"
                + (why if files.has("config.json") else "")
            )
        config = read_adapter_config(files.path(CONFIG_NAME))
        if not files.has(WEIGHTS_NAME):
            pickles = [name for name in files.names() if name.endswith((".bin", ".pt"))]
            raise AdapterError(
                f"{files.name}: no {WEIGHTS_NAME}"
                + (
                    f", only pickle files ({few(pickles)}), which beamq never opens; load the"
                    " adapter with PEFT where you trust it, and save it again as safetensors"
                    if pickles
                    else "; is the adapter whole?"
                )
            )
        tensors, _ = files.header(WEIGHTS_NAME)
        digest, zeros = _read_all(files, files.path(CONFIG_NAME).read_bytes(), tensors)
        return Adapter(
            files=files,
            config=config,
            tensors=tuple(tensors),
            digest=digest,
            zeros=zeros,
        )
    except BaseException:
        files.close()
        raise


def _read_all(
    files: SourceFiles, config: bytes, tensors: Sequence[TensorSpec]
) -> tuple[str, frozenset[str]]:
    """A digest, and the names of tensors that hold only zeros.

    The digest is a SHA-256 over the config, and over those of all tensors' pieces. Several threads
    read them: an adapter of all experts has 2% of the model's bytes or more. Raises `AdapterError`
    for a value that is not finite.
    """
    changing: set[str] = set()

    def of_piece(spec: TensorSpec, start: int) -> bytes:
        piece = bytearray(min(PIECE_BYTES, spec.nbytes - start))
        files.read(spec.file, spec.offset + start, memoryview(piece), spec.name)
        if spec.dtype in FLOAT_SOURCES:
            found = cpu.amax(piece, spec.dtype)
            if found.nonfinite:
                raise AdapterError(
                    f"{spec.file}: {spec.name} holds NaN or infinite values; has training diverged?"
                )
            if found.amax:
                changing.add(spec.name)
        return hashlib.sha256(piece).digest()

    digest = hashlib.sha256(config)
    for spec in tensors:
        digest.update(f"\n{spec.name}\t{spec.dtype}\t{spec.shape}\n".encode())
    pieces = [(spec, at) for spec in tensors for at in range(0, spec.nbytes, PIECE_BYTES)]
    with ThreadPoolExecutor(min(usable_cores(), MAX_READERS)) as pool:
        for each in pool.map(of_piece, *zip(*pieces, strict=True)) if pieces else ():
            digest.update(each)
    return digest.hexdigest(), frozenset(spec.name for spec in tensors) - changing
