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
    from beamq.calib.layerwise import calibrate, merge_statistics
    from beamq.calib.stats import CalibrationStats
    from beamq.checkpoint import Checkpoint, open_checkpoint
    from beamq.config import BeamConfig
    from beamq.conversion.dequantize import DequantizeResult, dequantize
    from beamq.conversion.quantize import QuantizeResult, quantize
    from beamq.conversion.runner import Progress
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
    from beamq.eval.checks import VerifyReport
    from beamq.eval.compare import compare
    from beamq.eval.comparison import Comparison
    from beamq.eval.inspect import Inspection, inspect_checkpoint
    from beamq.eval.parts import Sensitivity
    from beamq.eval.report import write_report
    from beamq.eval.sensitivity import sensitivity
    from beamq.eval.verify import verify
    from beamq.header import TensorSpec
    from beamq.hub.push import PushResult, push
    from beamq.model.logits import logits
    from beamq.plan import Plan, make_plan
    from beamq.recipe import Recipe, load_recipe

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
    "beamq.calib.layerwise": ("calibrate", "merge_statistics"),
    "beamq.calib.stats": ("CalibrationStats",),
    "beamq.checkpoint": ("Checkpoint", "open_checkpoint"),
    "beamq.config": ("BeamConfig",),
    "beamq.conversion.quantize": ("QuantizeResult", "quantize"),
    "beamq.conversion.dequantize": ("DequantizeResult", "dequantize"),
    "beamq.eval.checks": ("VerifyReport",),
    "beamq.eval.compare": ("compare",),
    "beamq.eval.comparison": ("Comparison",),
    "beamq.eval.report": ("write_report",),
    "beamq.eval.inspect": ("Inspection", "inspect_checkpoint"),
    "beamq.eval.parts": ("Sensitivity",),
    "beamq.eval.sensitivity": ("sensitivity",),
    "beamq.eval.verify": ("verify",),
    "beamq.header": ("TensorSpec",),
    "beamq.hub.push": ("PushResult", "push"),
    "beamq.model.logits": ("logits",),
    "beamq.plan": ("Plan", "make_plan"),
    "beamq.recipe": ("Recipe", "load_recipe"),
    "beamq.conversion.runner": ("Progress",),
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
