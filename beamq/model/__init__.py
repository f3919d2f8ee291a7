"""Beam's own forward pass: any checkpoint format, one layer at a time, in plain torch.

`logits` runs a checkpoint. `forward` takes batches through the layers that `layer_stream` delivers
and `loader` reads. `layer` is one layer, made of `attention`, `moe` and `gemm`; on a GPU it uses
kernels of `triton_layer`. `context` is what all layers are given, including the observers by which
calibration and reports watch. `expert_parallel` lets several processes share a pass.

Names of tensors end in their dimensions:

    B  sequences of a batch          T  packed tokens of a batch       V  vocabulary
    K  inputs of a linear; for hidden states the hidden size          N  outputs of a linear
    I  width between the two linears of an MLP                        D  width of a head, or half
    E  experts of a layer            k  experts chosen for a token     G  groups of experts
    S  rows sorted by expert, T * k in all                            P  positions

Weights are [N, K]; `gate_up` [2I, K] has the rows of gate first. Importing any module of this
folder imports torch; this file does not.
"""
