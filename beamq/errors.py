"""Every error beamq raises on purpose, in one tree.

    BeamqError                     exit
    ├── CheckFailed                 1   a verification found something wrong
    ├── UsageError                  2   the request itself makes no sense
    ├── InputError                  3   something the user gave us is bad
    │   ├── CheckpointError             a checkpoint's files, headers or index
    │   ├── ConfigError                 config.json says something Beam cannot be
    │   ├── TensorError                 a tensor is missing, mis-shaped, mis-typed or not finite
    │   ├── AlreadyQuantizedError       the source is not a high-precision checkpoint
    │   ├── RecipeError                 a recipe or pattern
    │   ├── CalibrationError            calibration data or a statistics file
    │   ├── HubError                    a repository is missing, gated, or refuses us
    │   └── ResumeError                 the output belongs to another run
    ├── EnvironmentFault            4   the machine: disk, memory, devices, packages
    │   ├── DiskError
    │   ├── MemoryBudgetError
    │   ├── DeviceError
    │   ├── OutputBusyError
    │   ├── HubUnreachableError         offline, no token, or the Hub does not answer
    │   └── MissingDependencyError
    └── Interrupted               130   Ctrl-C or SIGTERM; the run can be resumed

A message says what is wrong, where, what was expected and what to do, in one or two lines.
The command line catches `BeamqError` once and turns `exit_code` into the process's status;
anything else that escapes is a defect of beamq's.
"""

from __future__ import annotations

from typing import ClassVar


def printable(text: str, limit: int = 300) -> str:
    """`text` on one line, at most about `limit` characters, with escapes for what is no print."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def shown_value(value: object, limit: int = 80) -> str:
    """A value of a config for a message, at most `limit` characters: text in quotes, numbers and
    all else bare."""
    return repr(value[:limit]) if isinstance(value, str) else str(value)[:limit]


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 tensor`, `1,152 tensors`; `things` is a plural that is more than an s, or goes on."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


MAX_MESSAGE = 2000


class BeamqError(Exception):
    """Base of every error raised on purpose. `str(error)` is ready to be shown.

    Names in messages come from files of strangers: what is not printable is escaped, so that no
    message can steer a terminal, forge a second line or run on for ever.
    """

    exit_code: ClassVar[int] = 1
    remedy: ClassVar[str] = "Run with `--debug` and report it."
    reported_by_rank_0: bool = False  # of several ranks, the first one tells this as well

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, MAX_MESSAGE))


class CheckFailed(BeamqError):
    """A verification ran to its end and found at least one fault."""

    remedy = "Read which checks failed and where; convert again, or restore the damaged file."


class UsageError(BeamqError):
    """Options that contradict each other, or lack something a command needs."""

    exit_code = 2
    remedy = "Change the options as the message says; `beamq COMMAND --help` lists them."


class InputError(BeamqError):
    """The user's input is at fault; nothing was changed."""

    exit_code = 3
    remedy = "See the message; nothing of the source was changed."


class CheckpointError(InputError):
    """A checkpoint's files, safetensors headers or index are missing, broken or hostile."""

    remedy = "Finish or repeat the download, or repair the file that is named."


class ConfigError(InputError):
    """`config.json` is unreadable, not Beam's, or contradicts itself."""

    remedy = (
        "Correct the key that is named, or restore config.json from the model's own repository."
    )


class TensorError(InputError):
    """A tensor is missing, unexpected, mis-shaped, mis-typed or holds non-finite values."""

    remedy = (
        "Repair the source, or make config.json and tensors fit each other; the tensor is named."
    )


class AlreadyQuantizedError(InputError):
    """The source is quantized already; quantizing twice would lose precision unseen."""

    remedy = "Use the high-precision original, or `beamq dequantize` the folder first."


class RecipeError(InputError):
    """A recipe is unknown, has unknown keys, or a pattern matches nothing."""

    remedy = "Correct the key or pattern that is named; `beamq plan` shows what a pattern matches."


class CalibrationError(InputError):
    """Calibration data or a statistics file does not fit the model."""

    remedy = "Give other data or statistics of this very model; see what the message expects."


class HubError(InputError):
    """A Hub repository or revision does not exist, is gated, or its server refuses the request."""

    remedy = "Check the id and revision, ask for access, or log in with `hf auth login`."


class ResumeError(InputError):
    """An output folder holds something that this run did not make."""

    remedy = "Run it as it was begun, choose another output, or start again with `--overwrite`."


class EnvironmentFault(BeamqError):
    """The machine, not the input, is at fault."""

    exit_code = 4
    remedy = "See the message: a disk, a device, or another rank of the same run."


class DiskError(EnvironmentFault):
    """No space, a failing device, a read-only folder, a file-size limit."""

    remedy = (
        "Free space, check the device or its permissions, then run again, with `--resume` where the"
        " command has it."
    )


class MemoryBudgetError(EnvironmentFault):
    """The smallest unit of work does not fit the memory allowed."""

    remedy = "Allow more with `--max-host-memory`, use fewer `--workers`, or a larger machine."


class DeviceError(EnvironmentFault):
    """A requested device is absent or failed."""

    remedy = "Choose another `--device`; `beamq doctor` tells what there is."


class OutputBusyError(EnvironmentFault):
    """Another process is writing the same output."""

    remedy = "Wait for the other run, or choose another output."


class HubUnreachableError(EnvironmentFault):
    """The Hub cannot be asked: offline mode, no token, no network, or it keeps failing."""

    remedy = (
        "Check the network, `HF_ENDPOINT` and `HF_HUB_OFFLINE`; then run again with `--resume`."
    )


class MissingDependencyError(EnvironmentFault):
    """An optional package is needed for this command and is not installed."""

    remedy = "Install the package that is named; `beamq doctor` lists them all."


class Interrupted(BeamqError):
    """The user stopped the run; what is durable is kept."""

    exit_code = 130
    remedy = "Run the same command with `--resume`."
