#!/usr/bin/env bash
# Builds in place, runs the GPU tests and measures, on a machine with a CUDA device and no network.
#
#   benchmarks/gpu_check.sh WHEELS OUT [SECONDS]
#
# WHEELS   a folder with wheels of what the machine lacks (cffi, pycparser …); may be empty
# OUT      logs and JSON results go there
# SECONDS  time for everything, 520 unless told otherwise: what would not fit any more is left out
#
# PYTHON names the interpreter (python3), DIRECTORY the drive to measure (a temporary folder). The exit
# status is 0 only if the build and the tests passed and every measurement that was begun succeeded.
set -uo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1" "$2"
wheels=$(cd "$1" && pwd)
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit 2
limit=${3:-520}
python=${PYTHON:-python3}
work=$(mktemp -d "${DIRECTORY:-${TMPDIR:-/tmp}}/infinity-gpu-XXXXXX")
trap 'rm -rf "$work"' EXIT
failed=()
SECONDS=0
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

# phase NAME NEEDED MOST COMMAND...: run it if NEEDED seconds are left, for MOST seconds at most.
phase() {
  local name=$1 needed=$2 most=$3 began=$SECONDS left status
  shift 3
  left=$((limit - SECONDS))
  if [ "$left" -lt "$needed" ]; then
    echo "== $name: left out, $left s are left" | tee -a "$out/phases.txt"
    return 0
  fi
  [ "$left" -lt "$most" ] && most=$left
  echo "== $name (at most $most s)"
  timeout --kill-after=10 "$most" "$@" 2>&1 | tee "$out/$name.log" | tail -n 60
  status=${PIPESTATUS[0]}
  echo "== $name: exit status $status after $((SECONDS - began)) s" | tee -a "$out/phases.txt"
  [ "$status" -eq 0 ] || failed+=("$name")
  return "$status"
}

prepare() {
  if ! "$python" -c 'import cffi, pycparser' 2>/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
      --target "$work/site" "$wheels"/*.whl || return 1
  fi
  "$python" setup.py -q build_ext --inplace --parallel 8 || return 1
  "$python" - <<'PY'
import platform
import torch
from infinity.hardware import aio, cpu_adam
print("python", platform.python_version(), "torch", torch.__version__, "isa", cpu_adam.isa())
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory, "bytes")
PY
}

export PYTHONPATH=$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}
export -f prepare
export python wheels work

phase build 60 180 bash -c prepare || exit 1
phase tests 30 200 "$python" -m pytest -m gpu -p no:cacheprovider --durations=10 -rf --tb=short

# One line of standard output is the result; the log has the rest.
json() { # NAME NEEDED MOST COMMAND...
  local name=$1
  if phase "$@"; then
    [ -f "$out/$name.log" ] && grep '^{' "$out/$name.log" | tail -n 1 >"$out/$name.json"
  fi
}
json link 20 60 "$python" -m infinity bench link --device cuda --json

step() { # NAME NEEDED MOST OPTIONS...
  local name=$1 needed=$2 most=$3
  shift 3
  phase "$name" "$needed" "$most" "$python" benchmarks/whole_step.py --device cuda --directory "$work" \
    --contestants infinity torch --positions 1024 --tokens 1024 --timeout 120 --output "$out/$name.json" "$@"
}
# GPT-2 of 203 M parameters: each placement beside torch, then the same behind the next forward.
step step-small 60 110 --dtype bf16 --rounds 7 --warmup 2 \
  --modes in-memory state-on-host all-on-host state-on-nvme
step overlap-small 50 90 --dtype bf16 --rounds 3 --warmup 1 --update overlap delayed \
  --modes state-on-host all-on-host state-on-nvme
# 1.4 G parameters: what the link costs when compute is not nothing.
step step-large 60 110 --dtype bf16 --rounds 3 --warmup 1 --layers 26 --width 2048 \
  --modes state-on-host all-on-host
step nvme-small 50 90 --dtype bf16 --rounds 3 --warmup 1 --modes all-on-nvme

# Traced runs: 6.7 B with its state on the host, 1.5 B with everything on the drive. `infinity trace` says how
# close each comes to its largest resource, and how many bytes crossed the link.
traced() { # NAME NEEDED MOST OPTIONS...
  local name=$1 needed=$2 most=$3
  shift 3
  phase "$name" "$needed" "$most" "$python" -m infinity train --device cuda --dtype bf16 --steps 8 \
    --nvme "$work/$name" --trace "$out/$name.json" "$@" || return
  json "$name-roofline" 5 30 "$python" -m infinity trace "$out/$name.json" --json
}
traced state-6.7b 120 200 --preset 6.7b --batch 4 --sequence 2048 --recompute \
  --parameters device --gradients host --optimizer-state host
traced nvme-1.5b 60 120 --preset 1.5b --batch 4 --sequence 2048 --recompute --activations host \
  --parameters nvme --gradients nvme --optimizer-state nvme

# Few files: logs of what succeeded say nothing that the results do not.
for name in build link step-small overlap-small step-large nvme-small; do
  [[ " ${failed[*]:-} " == *" $name "* ]] || rm -f "$out/$name.log"
done
echo "== ${#failed[@]} failed${failed:+: ${failed[*]}}; $SECONDS s" | tee -a "$out/phases.txt"
[ ${#failed[@]} -eq 0 ]
