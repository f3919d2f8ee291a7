"""Which files of a checkpoint hold its weights: those that the index names, or the single one.

In: `SourceFiles` that nothing was read of yet. Out: names of shards, and the index's map of tensors
to files. The index may be a stranger's: what it names must be a plain name in the same folder, must
be there, and must hold what the index says. Pickle files are never opened.
"""

from __future__ import annotations

from collections.abc import Mapping

from beamq.config import read_json_object
from beamq.errors import CheckpointError, counted
from beamq.header import TensorSpec, few
from beamq.source_files import SourceFiles

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 1 << 30


def weight_files(source: SourceFiles) -> tuple[list[str], dict[str, str] | None]:
    """The safetensors files to read, and the index's map where there is one.

    Raises `CheckpointError` for an index that is broken or incomplete, or no weights at all.
    """
    if source.has(INDEX_NAME):
        return _indexed_files(source)
    if source.has(SINGLE_NAME):
        return [SINGLE_NAME], None
    found = [name for name in source.names() if name.endswith(".safetensors")]
    if found:
        raise CheckpointError(
            f"{source.name}: {len(found)} safetensors files but no {INDEX_NAME} and no"
            f" {SINGLE_NAME}; restore the index"
        )
    pickles = [name for name in source.names() if name.endswith(".bin")]
    if pickles:
        raise CheckpointError(
            f"{source.name}: only pickle files ({few(pickles)}); beamq never unpickles."
            " Save the model as safetensors first"
        )
    raise CheckpointError(f"{source.name}: no {SINGLE_NAME} and no {INDEX_NAME}; not a checkpoint")


def _indexed_files(source: SourceFiles) -> tuple[list[str], dict[str, str]]:
    where = f"{source.name}/{INDEX_NAME}"
    index = read_json_object(source.path(INDEX_NAME), CheckpointError, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: no weight_map; expected tensor name -> file")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not safe_file_name(file):
            raise CheckpointError(
                f"{where}: {name} points to {str(file)[:80]!r}; expected the name of a"
                " .safetensors file in the same folder"
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not source.has(file)]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {counted(len(files), 'shard is', 'shards are')} missing:"
            f" {few(missing)}; finish the download"
        )
    return files, weight_map


def safe_file_name(name: str) -> bool:
    """Whether a name from an index is a plain safetensors file name that stays in its folder."""
    return (
        name.endswith(".safetensors")
        and "/" not in name
        and "\\" not in name
        and "\0" not in name
        and not name.startswith(".")
        and len(name) < 256
    )


def check_index(
    where: str, weight_map: Mapping[str, str], tensors: Mapping[str, TensorSpec]
) -> None:
    """Raise `CheckpointError` where index and shards disagree."""
    problems = [
        f"{name} (index says {file}, "
        f"{'found in ' + tensors[name].file if name in tensors else 'not there'})"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].file != file
    ]
    problems += [f"{name} (in {tensors[name].file}, not in the index)"
                 for name in tensors if name not in weight_map]  # fmt: skip
    if problems:
        raise CheckpointError(
            f"{where}: {counted(len(problems), 'entry disagrees', 'entries disagree')} with the"
            f" shards: {few(problems)}"
        )
