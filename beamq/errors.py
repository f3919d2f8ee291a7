"""Every error beamq raises on purpose, in one tree.

    BeamqError                     exit
    ├── CheckFailed                 1   a verification found something wrong
    ├── UsageError                  2   options contradict each other or are incomplete
    ├── InputError                  3   something that the user gave is at fault
    │   ├── CheckpointError             a checkpoint's files, headers or index
    │   ├── ConfigError                 config.json is not that of a Beam
    │   ├── TensorError                 a tensor is missing, or its shape, dtype or values are wrong
    │   ├── AlreadyQuantizedError       the source is not a high-precision checkpoint
    │   ├── RecipeError                 a recipe or pattern
    │   ├── AdapterError                an adapter is damaged, unknown or of another model
    │   ├── CalibrationError            calibration data or a statistics file
    │   ├── HubError                    a repository is missing, gated, or refuses access
    │   └── ResumeError                 the output belongs to another run
    └── EnvironmentFault            4   the machine: disk, memory, devices, packages
        ├── DiskError
        ├── MemoryBudgetError
        ├── DeviceError
        ├── OutputBusyError
        ├── HubUnreachableError         offline, no token, or the Hub does not answer
        └── MissingDependencyError
    KeyboardInterrupt
    └── Interrupted               130   Ctrl-C or SIGTERM; the run can be resumed

A message says what is wrong, where, what was expected and what to do, in one or two lines. The
command line catches these once and exits with their `exit_code`; any other exception that escapes
is a defect of beamq. `Interrupted` is no `Exception`: a loop over models that logs every
`Exception` and goes on must stop at Ctrl-C.
"""

from __future__ import annotations

from typing import ClassVar


def printable(text: str, limit: int = 300) -> str:
    """`text` on one line of about `limit` characters at most; what is not printable is escaped."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def shown_value(value: object, limit: int = 80) -> str:
    """A config's value for a message, at most `limit` characters; only text is in quotes."""
    return repr(value[:limit]) if isinstance(value, str) else str(value)[:limit]


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 tensor`, `1,152 tensors`; `things` is the plural, where it is not `thing` and an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


MAX_MESSAGE = 2000


class BeamqError(Exception):
    """Base of every error raised on purpose. `str(error)` is ready to be shown.

    Messages contain names from untrusted files. What is not printable is escaped and the length is
    bounded, so that no message can control a terminal or forge a second line.
    """

    exit_code: ClassVar[int] = 1
    remedy: ClassVar[str] = "Run with `--debug` and report it."
    reported_by_rank_0: bool = False  # so that other ranks stay silent

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, MAX_MESSAGE))


class CheckFailed(BeamqError):
    """A verification ran to its end and found at least one fault."""

    remedy = "See which checks failed and where; convert again, or restore the damaged file."


class UsageError(BeamqError):
    """Options contradict each other, or lack something that the command needs."""

    exit_code = 2
    remedy = "Change the options as the message says; `beamq COMMAND --help` lists them."


class InputError(BeamqError):
    """The user's input is at fault."""

    exit_code = 3
    remedy = "See the message. The source was not changed."


class CheckpointError(InputError):
    """A checkpoint's files, safetensors headers or index are missing or damaged."""

    remedy = "Finish or repeat the download, or repair the file that is named."


class ConfigError(InputError):
    """`config.json` is unreadable, is not that of a Beam, or contradicts itself."""

    remedy = "Correct the named key, or restore config.json from the model's own repository."


class TensorError(InputError):
    """A tensor is missing or unexpected, or its shape, dtype or values are wrong."""

    remedy = "Repair the named tensor, or make config.json agree with the tensors."


class AlreadyQuantizedError(InputError):
    """The source is already quantized; quantizing it again would lose precision unnoticed."""

    remedy = "Use the high-precision original, or `beamq dequantize` the folder first."


class RecipeError(InputError):
    """A recipe is unknown, has unknown keys, or a pattern matches nothing."""

    remedy = "Correct the named key or pattern; `beamq plan` shows what a pattern matches."


class AdapterError(InputError):
    """An adapter is damaged, of an unknown kind, or does not fit the model."""

    remedy = "Use an adapter of this model, saved whole; `beamq inspect ADAPTER` shows what it is."


class CalibrationError(InputError):
    """Calibration data or a statistics file does not fit the model."""

    remedy = "Give other data, or statistics of this model; the message says what is expected."


class HubError(InputError):
    """A Hub repository or revision does not exist, is gated, or the server refuses access."""

    remedy = "Check the id and revision, request access, or log in with `hf auth login`."


class ResumeError(InputError):
    """An output folder holds something that this run did not make."""

    remedy = "Use the options of the first run, another output, or `--overwrite`."


class EnvironmentFault(BeamqError):
    """The machine is at fault, not the input."""

    exit_code = 4
    remedy = "See the message: a disk, a device, or another rank of the same run."


class DiskError(EnvironmentFault):
    """The disk is full, fails or is read-only, or a file-size limit is reached."""

    remedy = (
        "Free space or check the disk and permissions; run again, with `--resume` if available."
    )


class MemoryBudgetError(EnvironmentFault):
    """The smallest unit of work does not fit the allowed memory."""

    remedy = "Raise `--max-host-memory`, use fewer `--workers`, or use a larger machine."


class DeviceError(EnvironmentFault):
    """A requested device does not exist or failed."""

    remedy = "Choose another `--device`; `beamq doctor` lists the devices."


class OutputBusyError(EnvironmentFault):
    """Another process is writing the same output."""

    remedy = "Wait until the other run ends, or choose another output."


class HubUnreachableError(EnvironmentFault):
    """The Hub cannot be reached: offline mode, no token, no network, or repeated failures."""

    remedy = "Check the network, `HF_ENDPOINT` and `HF_HUB_OFFLINE`; run again with `--resume`."


class MissingDependencyError(EnvironmentFault):
    """The command needs an optional package that is not installed."""

    remedy = "Install the named package; `beamq doctor` lists all packages."


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; finished shards are kept."""

    exit_code: ClassVar[int] = 130
    remedy: ClassVar[str] = "Run the same command with `--resume`."
    reported_by_rank_0: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, MAX_MESSAGE))


OURS = (BeamqError, Interrupted)
"""What beamq raises on purpose."""
