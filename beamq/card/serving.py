"""A card's section on serving: command lines, and the GPUs they are for.

In: a plan. Out: Markdown. What the engines demand of each format is the table `ENGINES`; it was
read out of the versions named there and is marked as such. How many GPUs hold the model is
arithmetic on config.json (`beamq.memory`). Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from beamq.card.front import is_servable
from beamq.machines import GPUS, fit
from beamq.memory import KV_ITEMSIZE, model_weights
from beamq.plan import Plan

DEFAULT_CONTEXT = 131_072
COUNTS = (1, 2, 4, 8)
READ_VERSIONS = "vLLM 0.33.0, SGLang 0.5.23, transformers 5.24.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How an engine takes a format. `gpus` are names in `machines.GPUS`; `notes` are its limits."""

    name: str
    command: str
    gpus: tuple[str, ...]
    notes: tuple[str, ...]


_BLACKWELL = ("b200", "b300")
_FP8_GPUS = ("h100", "h200", "b200", "b300")
ENGINES: dict[str, tuple[Engine, ...]] = {
    "nvfp4": (
        Engine(
            name="vLLM",
            command="vllm serve $MODEL --tensor-parallel-size {count}",
            gpus=_BLACKWELL,
            notes=(
                "its NVFP4 expert kernels are for Blackwell data-centre GPUs; on others it chooses"
                " among further kernels, which was not tried",
            ),
        ),
        Engine(
            name="SGLang",
            command="python -m sglang.launch_server --model-path $MODEL --tp {count}"
            " --moe-runner-backend flashinfer_trtllm",
            gpus=_BLACKWELL,
            notes=(
                "needs Blackwell: for an NVFP4 Beam it accepts the flashinfer_trtllm runner only,"
                " and refuses that on H100 and H200",
            ),
        ),
    ),
    "fp8": (
        Engine(
            name="vLLM",
            command="vllm serve $MODEL --tensor-parallel-size {count}",
            gpus=_FP8_GPUS,
            notes=(),
        ),
        Engine(
            name="SGLang",
            command="python -m sglang.launch_server --model-path $MODEL --tp {count}",
            gpus=_FP8_GPUS,
            notes=("for an FP8 Beam its expert runner must be auto (as here) or triton",),
        ),
    ),
}
_TRANSFORMERS = {
    "nvfp4": "transformers has no loader for this layout.",
    "fp8": "transformers loads it too, but decodes the experts to BF16 in memory.",
}
_KV_FP8 = (
    "The configs declare an FP8 KV cache: vLLM's `--kv-cache-dtype auto` takes it, SGLang's Beam"
    " ignores it."
)


def serving_section(plan: Plan) -> str:
    """The section, heading included."""
    if not is_servable(plan):
        return (
            "## Serving\n\nThe source holds tensors that are not Beam's, and they were kept. vLLM"
            " and SGLang stop at names they do not know, so this folder is not served as it is.\n"
        )
    fmt = plan.recipe.format
    lines = ["## Serving", "", "`MODEL` is this repository's id, or a folder with its files.", ""]
    for engine in ENGINES[fmt]:
        lines += [f"**{engine.name}**", "", "```", *_commands(plan, engine), "```", ""]
        lines += [f"{note[0].upper()}{note[1:]}." for note in engine.notes]
        lines += [""] if engine.notes else []
    lines += [_TRANSFORMERS[fmt]]
    if plan.recipe.kv_cache == "fp8":
        lines += [_KV_FP8]
    lines += [
        "",
        f"What the engines demand was read in {READ_VERSIONS}; these commands were not run on the"
        f" GPUs named. GPU counts are computed from config.json for {_context(plan):,} tokens of"
        " context.",
    ]
    return "\n".join(lines) + "\n"


def _context(plan: Plan) -> int:
    return min(DEFAULT_CONTEXT, plan.config.max_position_embeddings)


def _commands(plan: Plan, engine: Engine) -> list[str]:
    """One line for each number of GPUs, with the GPUs of which that many are needed."""
    wanted: dict[int, list[str]] = {}
    for gpu in GPUS:
        if gpu.name in engine.gpus and (count := smallest_tensor_parallel(plan, gpu.name)):
            wanted.setdefault(count, []).append(gpu.label)
    if not wanted:
        return [engine.command.format(count="N"), f"# more than {COUNTS[-1]} GPUs of any kind"]
    lines = []
    for count, labels in sorted(wanted.items()):
        lines += [f"# {count} x {' or '.join(labels)}", engine.command.format(count=count)]
    return lines


def smallest_tensor_parallel(plan: Plan, name: str) -> int | None:
    """The fewest GPUs of a kind that hold the model and one context, tensor parallel."""
    weights = model_weights(plan.config, plan.recipe.format, plan.units)
    gpu = next(gpu for gpu in GPUS if gpu.name == name)
    itemsize = KV_ITEMSIZE["fp8" if plan.recipe.kv_cache == "fp8" else "bf16"]
    for count in COUNTS:
        found = fit(weights, gpu, count, "tensor", context=_context(plan), kv_itemsize=itemsize)
        if found is not None and found.fits:
            return count
    return None
