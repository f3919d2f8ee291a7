"""The peer: llm-compressor's `model_free_ptq` on the same folder, in a process of its own.

In: source, output, scheme. Prints one line of JSON: seconds of the imports and of the conversion.
It is given every advantage that costs us nothing: weights only (NVFP4A16 needs no calibration),
shards small enough for its whole-shard loads, as many torch threads as there are cores. The
ignore list is what a careful user gives: without it router and embeddings are quantized too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

IGNORE = ["lm_head", "re:.*embed_tokens$", r"re:.*mlp\.gate$"]


def main(arguments: Sequence[str] | None = None) -> int:
    source, output, scheme = sys.argv[1:] if arguments is None else arguments
    begun = time.monotonic()
    from llmcompressor import model_free_ptq  # timed

    imported = time.monotonic()
    model_free_ptq(
        model_stub=source, save_directory=output, scheme=scheme, ignore=IGNORE, device="cpu"
    )
    done = time.monotonic()
    print(json.dumps({"import_s": imported - begun, "convert_s": done - imported}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
