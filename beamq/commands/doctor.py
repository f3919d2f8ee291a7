"""`beamq doctor`: what this machine offers, what is missing, and what that rules out.

It installs, downloads and writes nothing. A machine without GPUs is not a fault, nor is a missing
package until a command needs it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib import util
from typing import TYPE_CHECKING, Any

from beamq import limits
from beamq.commands.options import command
from beamq.units import show_bytes
from beamq.version import __version__

if TYPE_CHECKING:
    from beamq.report.console import Block, Screen


@command(quiet=False)
def doctor(screen: Screen) -> None:
    """Show what this machine offers and what is missing."""
    data = doctor_data()
    screen.show(lambda: data, lambda: doctor_blocks(data))


PACKAGES = (
    ("torch", "forward pass, calibration, kernels where the compiled ones are missing"),
    ("numpy", "conversion"),
    ("transformers", "the tokenizer, for calibration text"),
    ("nvidia-modelopt", "second opinion on NVFP4 in `verify`"),
    ("compressed-tensors", "schema check and second opinion on FP8 in `verify`"),
    ("llmcompressor", "reference for calibrated recipes"),
    ("huggingface_hub", "models from and to the Hub"),
    ("safetensors", "reading models through transformers"),
    ("xxhash", "fast checksums (SHA-256 without it)"),
    ("matplotlib", "charts of --report"),
    ("triton", "GPU kernels"),
    ("quack-kernels", "optional: NVFP4 on sm_120; its nvidia-cutlass-dsl is proprietary"),
)


def doctor_data() -> dict[str, Any]:
    """The JSON of `beamq doctor`: a value that cannot be found out is null, and GPUs are a list."""
    from beamq.convert.resources import default_workers

    backend, fault, lack = _cpu_kernels()
    gpus, gpu_note = _gpus()
    cores = os.cpu_count()
    memory = limits.memory()
    gemm = None
    if util.find_spec("torch") is not None:
        from beamq.model.gemm.check import probe  # torch

        gemm = probe()
    data: dict[str, Any] = {
        "command": "doctor",
        "beamq": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": {"cores": cores, "usable": limits.usable_cores(), "workers": default_workers()},
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        "kernels": {"cpu": backend, "fault": fault},
        "packages": {name: _version(name) for name, _ in PACKAGES},
        "gpus": gpus,
        "gpu_note": gpu_note,
        "gemm": gemm,
        "disks": [
            {"folder": folder, "free_bytes": shutil.disk_usage(folder).free}
            for folder in dict.fromkeys((os.getcwd(), tempfile.gettempdir()))
        ],
    }
    data["hints"] = [*([lack] if lack else []), *_hints(data)]
    return data


def doctor_blocks(data: dict[str, Any]) -> list[Block]:
    """The same as tables, hints last."""
    from beamq.report.tables import Table

    memory = [
        f"{show_bytes(size)} {key.removesuffix('_bytes')}"
        for key, size in data["memory"].items()
        if size is not None
    ]
    rows = [
        ("beamq", f"{data['beamq']}, Python {data['python']}, {data['platform']}"),
        ("cores", f"{data['cpu']['usable']} usable of {data['cpu']['cores']}"),
        ("memory", ", ".join(memory) or "unknown"),
        ("CPU kernels", data["kernels"]["cpu"] or f"none: {data['kernels']['fault']}"),
    ]
    for gpu in data["gpus"]:
        units = " and ".join(name.upper() for name in ("fp8", "fp4") if gpu[name])
        units = f"{units} units" if units else "no FP8 or FP4 units"
        rows.append(("GPU", f"{gpu['name']}, {show_bytes(gpu['bytes'])}, {units}"))
    if not data["gpus"]:
        rows.append(("GPU", data["gpu_note"]))
    for disk in data["disks"]:
        rows.append(("disk", f"{show_bytes(disk['free_bytes'])} free in {disk['folder']}"))
    found = data["packages"]
    packages = [(name, found[name] or "not installed", purpose) for name, purpose in PACKAGES]
    table = Table(head=("package", "version", "for"), rows=packages)
    blocks: list[Block] = [Table(rows=rows), "", table, "", *_gemm_blocks(data["gemm"])]
    blocks += [f"Hint: {hint}." for hint in data["hints"]] or ["Nothing is missing."]
    return blocks


def _version(package: str) -> str | None:
    from importlib import metadata  # takes 7 ms, which `--help` need not pay

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_kernels() -> tuple[str | None, str | None, str | None]:
    """Which kernels conversion would use, or why there are none; what to do about slow ones."""
    try:
        from beamq.formats.kernels import cpu
    except Exception as fault:  # whatever it is, the user asked for it
        return None, f"{type(fault).__name__}: {str(fault)[:400]}", None
    return cpu.BACKEND, None, cpu.LACK


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """NVIDIA GPUs as torch sees them; a broken driver is a finding, not a failure."""
    if util.find_spec("torch") is None:
        return [], "unknown: torch is not installed"
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = [torch.cuda.get_device_properties(index) for index in range(count)]
    except Exception as fault:
        return [], f"unknown: {type(fault).__name__}: {str(fault)[:200]}"
    gpus = [
        {
            "name": gpu.name,
            "bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
            "fp8": (gpu.major, gpu.minor) >= (8, 9),
            "fp4": gpu.major >= 10,
        }
        for gpu in found
    ]
    built = getattr(torch.version, "cuda", None)
    return gpus, f"none (torch built for {f'CUDA {built}' if built else 'CPU only'})"


def _gemm_blocks(gemm: dict[str, Any] | None) -> list[Block]:
    """A table for each kind of device; devices of one name share it."""
    from beamq.report.tables import Table

    if gemm is None:
        return []
    blocks: list[Block] = []
    for name, device in {device["name"]: device for device in gemm["devices"]}.items():
        rows = [
            (
                op["op"] if number == 0 else "",
                entry["backend"] + (" *" if entry["backend"] == op["choice"] else ""),
                "" if entry["ms"] is None else f"{entry['ms']:.2f}",
                "" if entry["error"] is None else f"{entry['error']:.1e}",
                "usable" if entry["usable"] else entry["reason"],
            )
            for op in device["ops"]
            for number, entry in enumerate(op["backends"])
        ]
        head = ("GEMM", "back end", "ms", "error", "")
        blocks += [f"On {name} (* is what runs)", Table(head=head, rows=rows), ""]
    return [*blocks, f"{gemm['note']}.", ""]


def _hints(data: dict[str, Any]) -> list[str]:
    hints = []
    kernels, gpus = data["kernels"]["cpu"], data["gpus"]
    if kernels is None:
        hints.append("no CPU kernels: install a C compiler and reinstall beamq, or install torch")
    sm_120 = any(gpu["capability"] in ("12.0", "12.1") for gpu in gpus)
    wanted = {"triton": bool(gpus), "quack-kernels": sm_120}
    packages = data["packages"].items()
    missing = [name for name, version in packages if not version and wanted.get(name, True)]
    if missing:
        hints.append(f"not installed: {', '.join(missing)}; see the table for what needs them")
    if gpus and not any(gpu["fp8"] for gpu in gpus):
        hints.append("these GPUs convert and calibrate, but cannot serve FP8 or NVFP4 natively")
    if sys.platform != "linux":
        hints.append("only Linux is tested")
    return hints
