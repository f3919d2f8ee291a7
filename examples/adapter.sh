#!/bin/sh
# From an adapter to a served model: train one with PEFT, look at it, merge and quantize, prove it.
set -eu
cd "$(dirname "$0")/.."
out=${1:-demo-output/adapter}
rm -rf "$out"
run() { echo; echo "\$ $*"; "$@"; }
run python examples/train_adapter.py "$out/trained"
run beamq inspect "$out/trained" --source examples/beam-nano
run beamq merge examples/beam-nano "$out/trained" "$out/merged"
run beamq quantize examples/beam-nano "$out/nvfp4" --adapter "$out/trained" --samples 32
run beamq verify "$out/nvfp4" --source examples/beam-nano --adapter "$out/trained"
run beamq compare examples/beam-nano "$out/nvfp4" --adapter "$out/trained" --samples 8 --write-card
