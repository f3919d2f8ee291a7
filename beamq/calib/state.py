"""What a calibration saves so that a killed run can resume.

    identity.json                which run this is
    stats-0007.safetensors       statistics of layers 0 .. 7
    hidden-0007.safetensors      hidden states after layer 7, one tensor a batch
    stats.safetensors            statistics of all layers, for a conversion that continues

The statistics are written first. Once the hidden states have their name, both are whole, and the
older pair is deleted. Everything is exact, so a resumed run ends with the same bits. The state of
another run is refused, with what differs.

Hidden states of a real run are gigabytes, so a layer is saved only when the last save took less
than a twentieth of the time since.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from beamq.calib.statistics import CalibrationStats, load_stats, save_stats
from beamq.errors import DiskError, ResumeError
from beamq.formats.numerics import TORCH_DTYPES
from beamq.io.files import OpenFiles, read_json_object
from beamq.io.safetensors_header import read_header
from beamq.io.shard_writer import OutputTensor, Shard, ShardWriter, disk_errors, write_json
from beamq.units import show_bytes

IDENTITY = "identity.json"
FINAL = "stats.safetensors"
CUTTING = ("--samples", "--sequence-length", "--seed")  # how rows are cut from the text
COST_SHARE = 20  # saving may take a twentieth of the time
_HIDDEN = re.compile(r"hidden-(\d{4})\.safetensors")
_NAMES = {str(dtype): name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A state: `layer` is the last finished one."""

    layer: int
    stats: CalibrationStats
    hidden: list[torch.Tensor]


class RunState:
    """The state folder of one run. `begin` before anything else, `remove` at the end."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        self._identity = dict(identity)
        self._saved_at = time.monotonic()
        self._cost = 0.0

    def begin(self, *, resume: bool) -> None:
        """Make the folder, or check that the one there is of this run.

        Raises `ResumeError` for another run's state, or any state without `resume`.
        """
        path = self.folder / IDENTITY
        with disk_errors(self.folder, "creating the state folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            odd = self._differences()
            if not resume:
                raise ResumeError(
                    f"{self.folder}: an unfinished calibration; --resume continues it,"
                    " --overwrite starts again"
                )
            if odd:
                raise self._other_run(odd)
        else:
            write_json(path, self._identity)
        self._saved_at = time.monotonic()

    def check_options(self) -> None:
        """Raise `ResumeError` if a state exists that was started with other options."""
        odd = self._differences(only_options=True)
        if odd:
            raise self._other_run(odd)

    def _differences(self, *, only_options: bool = False) -> list[str]:
        """How an existing state differs from this run; options with both values."""
        path = self.folder / IDENTITY
        if not path.exists():
            return []
        recorded, wanted = read_json_object(path, ResumeError), self._identity
        odd = []
        for key in [key for key, now in wanted.items() if recorded.get(key) != now]:
            if key == "--data":
                if all(recorded.get(each) == wanted.get(each) for each in CUTTING):
                    odd.append("other text (--data)")
            elif key.startswith("--") and key in recorded:
                odd.append(f"{key} {recorded[key]}, not {wanted[key]}")
            elif key.startswith("--") or not only_options:
                odd.append(f"another {key}")
        return odd

    def _other_run(self, odd: Sequence[str]) -> ResumeError:
        return ResumeError(
            f"{self.folder}: started with {', '.join(odd)}; use the same options, or start again"
            " with --overwrite"
        )

    def check_space(self, nbytes: int) -> None:
        """Raise `DiskError` if a state of `nbytes` does not fit the disk. Creates nothing."""
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if self.folder.exists():
            free += sum(path.stat().st_size for path in self.folder.iterdir())
        if nbytes > free:
            raise DiskError(
                f"{self.folder}: the state of the calibration needs"
                f" {show_bytes(nbytes)}, the disk has {show_bytes(free)} free; free"
                " space, or use fewer samples"
            )

    def load(self) -> Saved | None:
        """The latest whole state, if any."""
        layers = [int(found[1]) for found in map(_HIDDEN.fullmatch, self._files()) if found]
        if not layers:
            return None
        layer = max(layers)
        return Saved(
            layer=layer,
            stats=load_stats(self.folder / f"stats-{layer:04d}.safetensors"),
            hidden=_read_hidden(self.folder, f"hidden-{layer:04d}.safetensors"),
        )

    @property
    def due(self) -> bool:
        """Whether saving now keeps its share of the time small."""
        return time.monotonic() - self._saved_at >= COST_SHARE * self._cost

    def save(self, layer: int, stats: CalibrationStats, hidden: Sequence[torch.Tensor]) -> None:
        """Save everything up to `layer`; durable on return."""
        begun = time.monotonic()
        save_stats(stats, self.folder / f"stats-{layer:04d}.safetensors")
        _write_hidden(self.folder, f"hidden-{layer:04d}.safetensors", hidden)
        for name in self._files():
            if f"-{layer:04d}." not in name and name != IDENTITY:
                (self.folder / name).unlink()
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - begun

    def save_final(self, stats: CalibrationStats) -> None:
        """Save the statistics of the whole run, for a caller that continues with them."""
        save_stats(stats, self.folder / FINAL)

    def load_final(self) -> CalibrationStats | None:
        """The statistics of the whole run, if it was finished."""
        path = self.folder / FINAL
        return load_stats(path) if path.exists() else None

    def remove(self) -> None:
        """Delete the folder: the run is complete."""
        with disk_errors(self.folder, "removing"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def clear(self) -> None:
        """Delete what an earlier run saved, the identity first; the lock stays."""
        with disk_errors(self.folder, "removing the old state"):
            for name in sorted(self._files(), key=lambda name: name != IDENTITY):
                (self.folder / name).unlink()

    def _files(self) -> list[str]:
        """Names of saved files, without the lock, which is hidden."""
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if path.is_file() and not path.name.startswith(".")
        )


def _write_hidden(folder: Path, name: str, hidden: Sequence[torch.Tensor]) -> None:
    header: dict[str, object] = {}
    begin = 0
    for number, h_TK in enumerate(hidden):
        end = begin + h_TK.nbytes
        header[f"h.{number:06d}"] = {
            "dtype": _NAMES[str(h_TK.dtype)],
            "shape": list(h_TK.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    tensors: tuple[OutputTensor, ...] = ()
    writer = ShardWriter(
        folder, Shard(name=name, header=raw, tensors=tensors, nbytes=len(raw) + begin)
    )
    offset = len(raw)
    for h_TK in hidden:
        flat = h_TK.cpu().contiguous().view(-1).view(torch.uint8)
        writer.write(offset, memoryview(flat.numpy()))  # type: ignore[arg-type]
        offset += h_TK.nbytes
    writer.sync()
    writer.publish()


def _read_hidden(folder: Path, name: str) -> list[torch.Tensor]:
    specs, _ = read_header(folder / name, name)
    files = OpenFiles(folder)
    hidden = []
    for spec in sorted(specs, key=lambda spec: spec.name):
        h_TK = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        flat = h_TK.view(-1).view(torch.uint8)
        files.read(spec.file, spec.offset, memoryview(flat.numpy()), spec.name)  # type: ignore[arg-type]
        hidden.append(h_TK)
    files.close()
    return hidden
