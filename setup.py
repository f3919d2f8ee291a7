"""The CPU kernels' build; everything else is in pyproject.toml.

The extension is optional: where no C compiler is found the install goes on, and
`beamq.formats.kernels.cpu` computes the same bytes with torch, slowly. It uses Python's stable
ABI, so one wheel per platform serves Python 3.11 and later.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "beamq.formats.kernels._cpu",
            sources=["beamq/formats/kernels/_cpu.c"],
            depends=[
                f"beamq/formats/kernels/_{part}.h"
                for part in (
                    "core",
                    "encode",
                    "quantize",
                    "compare",
                    "sweep",
                    "sweep_table",
                    "lowrank",
                )
            ],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            # Contraction or reassociation would change the last bit of a scale, and with it codes.
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
            ],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
