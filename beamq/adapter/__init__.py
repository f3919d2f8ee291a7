"""LoRA adapters: what one holds, and a Beam's weights with it merged in."""
