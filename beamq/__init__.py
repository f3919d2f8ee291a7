"""beamq converts Reflection's Beam to NVFP4 and FP8 checkpoints, calibrates and verifies them.

Each command of the command line is one call here:

    make_plan, quantize, dequantize     plan a conversion from headers; convert a folder
    quantize_tensors                    the same for tensors in memory, as a trainer has them
    output_metadata                     names, dtypes and shapes of what comes out of it
    quantization_config                 what an engine's config.json has to say of them
    calibrate, merge_statistics         record the inputs of a model's linears, for input scales
    verify, inspect_checkpoint          check that engines will load a folder; describe it
    repair                              write a sound copy of a published folder that they refuse
    compare, write_report               measure what quantization cost and what it saved
    sensitivity                         measure the cost of each part, to choose high precision
    push                                publish a folder on the Hub
    logits                              run Beam's forward pass on any of its formats
    open_checkpoint, load_recipe        open a checkpoint or recipe; the calls above do so too

The errors that these calls raise and the records that they return are here as well. Names are
imported when they are first used, so `import beamq` is fast. Only calls that run the model import
torch, including a conversion that calibrates.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from beamq.version import __version__

# OpenMP's threads spin while they wait. On a machine that others use too, a calibration of the
# small Beam took 188 s where it takes 27 s when they sleep; on a quiet one both are as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from beamq.adapter.inspect import AdapterInspection, inspect_adapter
    from beamq.beam.config import BeamConfig
    from beamq.calib.calibrate import calibrate, merge_statistics
    from beamq.calib.statistics import CalibrationStats
    from beamq.convert.dequantize import DequantizeResult, dequantize
    from beamq.convert.merge import MergeResult, merge
    from beamq.convert.quantize import QuantizeResult, quantize
    from beamq.convert.repair import RepairResult, repair
    from beamq.convert.run import Progress
    from beamq.convert.tensors import TensorStream, quantize_tensors
    from beamq.errors import (
        AdapterError,
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
    from beamq.plan.targets import output_metadata, quantization_config
    from beamq.publish import PushResult, push
    from beamq.report.files import write_report

__all__ = [
    "AdapterError",
    "AdapterInspection",
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
    "MergeResult",
    "MissingDependencyError",
    "OutputBusyError",
    "Plan",
    "Progress",
    "PushResult",
    "QuantizeResult",
    "Recipe",
    "RecipeError",
    "RepairResult",
    "ResumeError",
    "Sensitivity",
    "TensorError",
    "TensorSpec",
    "TensorStream",
    "UsageError",
    "VerifyReport",
    "__version__",
    "calibrate",
    "compare",
    "dequantize",
    "inspect_adapter",
    "inspect_checkpoint",
    "load_recipe",
    "logits",
    "make_plan",
    "merge",
    "merge_statistics",
    "open_checkpoint",
    "output_metadata",
    "push",
    "quantization_config",
    "quantize",
    "quantize_tensors",
    "repair",
    "sensitivity",
    "verify",
    "write_report",
]

_HOMES = {
    "beamq.calib.calibrate": ("calibrate", "merge_statistics"),
    "beamq.calib.statistics": ("CalibrationStats",),
    "beamq.io.checkpoint": ("Checkpoint", "open_checkpoint"),
    "beamq.adapter.inspect": ("AdapterInspection", "inspect_adapter"),
    "beamq.beam.config": ("BeamConfig",),
    "beamq.convert.quantize": ("QuantizeResult", "quantize"),
    "beamq.convert.dequantize": ("DequantizeResult", "dequantize"),
    "beamq.convert.merge": ("MergeResult", "merge"),
    "beamq.convert.repair": ("RepairResult", "repair"),
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
    "beamq.convert.tensors": ("TensorStream", "quantize_tensors"),
    "beamq.plan.targets": ("output_metadata", "quantization_config"),
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
