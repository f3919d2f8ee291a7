#!/bin/sh
# The main job on a trained 3.6M-parameter Beam: plan, convert both ways, verify, compare.
set -eu
cd "$(dirname "$0")/.."
out=demo-output
rm -rf "$out"
run() { echo; echo "\$ $*"; "$@"; }
run beamq plan examples/beam-nano --recipe nvfp4
run beamq quantize examples/beam-nano "$out/nvfp4" --recipe nvfp4 --samples 32
run beamq quantize examples/beam-nano "$out/fp8" --recipe fp8
run beamq verify "$out/nvfp4" --source examples/beam-nano --level forward
run beamq verify "$out/fp8" --source examples/beam-nano --level tensors
run beamq inspect "$out/nvfp4"
run beamq compare examples/beam-nano "$out/fp8" "$out/nvfp4" --report "$out/report" --write-card
