#!/usr/bin/env bash
# Finds out what there is to find out on a machine with a CUDA device and no network, a stage at a time.
#
#   benchmarks/gpu_check.sh STAGE WHEELS OUT [SECONDS]
#   benchmarks/gpu_check.sh --list
#
# STAGE    one of those that --list names
# WHEELS   a folder with wheels of what the machine lacks (cffi, pycparser, pytest …); may be empty. `speed` takes
#          DeepSpeed for a peer, if it is installed or there: its sdist has to be a wheel (benchmarks/README.md)
# OUT      gets STAGE.json, written anew after each part of the stage, and STAGE.tar.gz: logs and whole results
# SECONDS  time for everything, 540 unless told otherwise: what would not fit any more is left out
#
# PYTHON names the interpreter (python3), DIRECTORY the drive to measure (a temporary folder); BUILD=no says
# that the native parts are built; DEVICE=lagging runs the smallest sizes on a double of CUDA, without a GPU.
# The exit status is 0 only if the build succeeded and every part that was begun has passed.
set -uo pipefail
if [ "${1:-}" = --list ]; then
  exec "${PYTHON:-python3}" "$(dirname "$0")/gpu.py" --list
elif [ $# -lt 3 ]; then
  sed -n '2,16s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
stage=$1
mkdir -p "$2" "$3"
wheels=$(cd "$2" && pwd)
out=$(cd "$3" && pwd)
limit=${4:-540}
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
work=$(mktemp -d "${DIRECTORY:-${TMPDIR:-/tmp}}/infinity-gpu-XXXXXX")
SECONDS=0
mkdir "$work/$stage" "$work/data"
# However this ends, what there is goes out in one file.
trap 'tar -czf "$out/$stage.tar.gz" -C "$work" "$stage"; rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}
export PATH=$work/site/bin:$PATH TORCH_EXTENSIONS_DIR=$work/extensions

prepare() {
  local needs=cffi,pycparser,pytest,hypothesis
  ! compgen -G "$wheels/deepspeed-*.whl" >/dev/null || needs+=,deepspeed
  if ! "$python" -c "import $needs" 2>/dev/null && ls "$wheels"/*.whl >/dev/null; then
    timeout 120 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
      --target "$work/site" "$wheels"/*.whl || return 1
  fi
  [ "${BUILD:-yes}" = no ] || timeout 240 "$python" setup.py -q build_ext --inplace --parallel 8
}
if ! prepare >"$work/$stage/build.log" 2>&1; then
  tail -n 40 "$work/$stage/build.log" >&2
  exit 1
fi

# An interrupt first, so that the stage can still write what it has measured.
left=$((limit - SECONDS))
timeout --signal=INT --kill-after=40 "$left" \
  "$python" benchmarks/gpu.py "$stage" --device "${DEVICE:-cuda}" --directory "$work/data" \
  --output "$out/$stage.json" --logs "$work/$stage" --seconds $((left > 60 ? left - 30 : left))
