"""beamq: NVFP4 and FP8 checkpoints of Reflection's Beam, converted, calibrated and verified.

Everything the command line does is one call here:

    make_plan, quantize, dequantize     from headers to a plan, from a plan to a folder
    calibrate, merge_statistics         what a model's linears see on text, for input scales
    verify, inspect_checkpoint          is a folder what the engines will load? what is it?
    compare, write_report               what did quantization cost, and what did it save?
    sensitivity                         what does each part cost alone, which to leave precise?
    push                                publish a folder on the Hub
    logits                              Beam's own forward pass over any of its formats
    open_checkpoint, load_recipe        what the calls above open themselves, given a path or name

with the errors they raise and the records they return. Names are imported when first used, so
that `import beamq` costs nothing; only what runs the model brings torch (a conversion that
calibrates, too).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from beamq.version import __version__

if TYPE_CHECKING:
    from beamq.beam.config import BeamConfig
    from beamq.calib.calibrate import calibrate, merge_statistics
    from beamq.calib.statistics import CalibrationStats
    from beamq.convert.dequantize import DequantizeResult, dequantize
    from beamq.convert.quantize import QuantizeResult, quantize
    from beamq.convert.run import Progress
    from beamq.errors import (
        AlreadyQuantizedError,
        BeamqError,
        CalibrationError,
        CheckFailed,
        CheckpointError,
        ConfigError,
        DeviceError,
        DiskError,
        EnvironmentFault,
        HubError,
        HubUnreachableError,
        InputError,
        Interrupted,
        MemoryBudgetError,
        MissingDependencyError,
        OutputBusyError,
        RecipeError,
        ResumeError,
        TensorError,
        UsageError,
    )
    from beamq.eval.compare.compare import compare
    from beamq.eval.compare.records import Comparison
    from beamq.eval.compare.sensitivity import Sensitivity, sensitivity
    from beamq.eval.verify.checks import VerifyReport
    from beamq.eval.verify.inspect import Inspection, inspect_checkpoint
    from beamq.eval.verify.verify import verify
    from beamq.io.checkpoint import Checkpoint, open_checkpoint
    from beamq.io.safetensors_header import TensorSpec
    from beamq.model.logits import logits
    from beamq.plan.plan import Plan, make_plan
    from beamq.plan.recipe import Recipe, load_recipe
    from beamq.publish import PushResult, push
    from beamq.report.files import write_report

__all__ = [
    "AlreadyQuantizedError",
    "BeamConfig",
    "BeamqError",
    "CalibrationError",
    "CalibrationStats",
    "CheckFailed",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "DequantizeResult",
    "DeviceError",
    "DiskError",
    "EnvironmentFault",
    "HubError",
    "HubUnreachableError",
    "InputError",
    "Inspection",
    "Interrupted",
    "MemoryBudgetError",
    "MissingDependencyError",
    "OutputBusyError",
    "Plan",
    "Progress",
    "PushResult",
    "QuantizeResult",
    "Recipe",
    "RecipeError",
    "ResumeError",
    "Sensitivity",
    "TensorError",
    "TensorSpec",
    "UsageError",
    "VerifyReport",
    "__version__",
    "calibrate",
    "compare",
    "dequantize",
    "inspect_checkpoint",
    "load_recipe",
    "logits",
    "make_plan",
    "merge_statistics",
    "open_checkpoint",
    "push",
    "quantize",
    "sensitivity",
    "verify",
    "write_report",
]

_HOMES = {
    "beamq.calib.calibrate": ("calibrate", "merge_statistics"),
    "beamq.calib.statistics": ("CalibrationStats",),
    "beamq.io.checkpoint": ("Checkpoint", "open_checkpoint"),
    "beamq.beam.config": ("BeamConfig",),
    "beamq.convert.quantize": ("QuantizeResult", "quantize"),
    "beamq.convert.dequantize": ("DequantizeResult", "dequantize"),
    "beamq.eval.verify.checks": ("VerifyReport",),
    "beamq.eval.compare.compare": ("compare",),
    "beamq.eval.compare.records": ("Comparison",),
    "beamq.report.files": ("write_report",),
    "beamq.eval.verify.inspect": ("Inspection", "inspect_checkpoint"),
    "beamq.eval.compare.sensitivity": ("Sensitivity", "sensitivity"),
    "beamq.eval.verify.verify": ("verify",),
    "beamq.io.safetensors_header": ("TensorSpec",),
    "beamq.publish": ("PushResult", "push"),
    "beamq.model.logits": ("logits",),
    "beamq.plan.plan": ("Plan", "make_plan"),
    "beamq.plan.recipe": ("Recipe", "load_recipe"),
    "beamq.convert.run": ("Progress",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'beamq' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "beamq.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
