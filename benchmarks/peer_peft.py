"""The peer: PEFT's `merge_and_unload` on the same folders, in a process of its own.

In: source, adapter, output. Prints one line of JSON: seconds of the imports, of loading, of the
merge and of saving. The base is loaded in BF16 as PEFT's documentation does it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise


def main(arguments: Sequence[str] | None = None) -> int:
    source, adapter, output = sys.argv[1:] if arguments is None else arguments
    moments = [time.monotonic()]

    def mark() -> None:
        moments.append(time.monotonic())

    import torch  # timed
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    mark()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(model, adapter)
    mark()
    merged = adapted.merge_and_unload()
    mark()
    merged.save_pretrained(output)
    mark()
    names = ("import_s", "load_s", "merge_s", "save_s")
    spans = pairwise(moments)
    print(json.dumps(dict(zip(names, (b - a for a, b in spans), strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
