"""Train a LoRA adapter for the small Beam with PEFT, a few optimizer steps on a little text.

    python examples/train_adapter.py OUTPUT [STEPS]

The adapter changes q, k, v and o of the attention, its gate, the dense MLPs and the experts. PEFT
reaches the last three through `target_parameters` on a Beam; see docs/adapters.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

BEAM = Path(__file__).resolve().parent / "beam-nano"
TEXT = "def greet(name):\n    return f'Ahoy, {name}!'\n\n\nprint(greet('sailor'))\n"


def main(arguments: Sequence[str] | None = None) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, *more = sys.argv[1:] if arguments is None else arguments
    steps = int(more[0]) if more else 10
    torch.manual_seed(0)
    ids = AutoTokenizer.from_pretrained(BEAM)(TEXT, return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(BEAM, dtype=torch.bfloat16)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=[
            "self_attn.gate_proj.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        ],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(output)
    print(f"{steps} steps: loss from {losses[0]:.3f} to {losses[-1]:.3f}; saved to {output}")


if __name__ == "__main__":
    main()
