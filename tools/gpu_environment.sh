#!/usr/bin/env bash
# Builds the two environments for GPUs from requirements/; `make gpu` and slurm/Containerfile run it.
#
#   tools/gpu_environment.sh trainer .venv-gpu
#   tools/gpu_environment.sh engines .venv-engines
#   tools/gpu_environment.sh megasharp .venv-gpu     # this clone, into either
#
# PYTHON is a CPython 3.12 with its headers (python3.12; make's GPU_PYTHON). uv is used where it is on the path, else pip.
# An existing folder is replaced.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.12}
NVIDIA_INDEX=https://pypi.nvidia.com
NEEDED_GB=10

fail() {
  echo "make gpu: $1" >&2
  exit 1
}

find_nvcc() {
  if [ -n "${CUDA_HOME:-}" ]; then
    echo "$CUDA_HOME/bin/nvcc"
  else
    command -v nvcc || echo /usr/local/cuda/bin/nvcc
  fi
}

check_machine() {
  local glibc nvcc release
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "this is $(uname -sm), but the locks are for Linux x86_64"
  glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
  [ "$(printf '%s\n' 2.34 "$glibc" | sort -V | head -1)" = 2.34 ] ||
    fail "glibc ${glibc:-unknown} is older than 2.34, for which SGLang's wheel is built (RHEL 9, Ubuntu 22.04, Debian 12 have it); use an image"
  # A shim of pyenv is found, and runs nothing where no version is chosen.
  "$PYTHON" -c '' || fail "$PYTHON does not run; name one that does with GPU_PYTHON=/path/to/python3.12"
  "$PYTHON" -c 'import sys; sys.exit((sys.version_info[:2], sys.implementation.name) != ((3, 12), "cpython"))' ||
    fail "$PYTHON is no CPython 3.12, for which the locks are made; name one with GPU_PYTHON=/path/to/python3.12"
  "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' ||
    fail "$PYTHON has no headers (Python.h), which Transformer Engine is compiled with; install python3.12-dev"
  command -v "${CXX:-c++}" >/dev/null || fail "there is no C++ compiler (${CXX:-c++}), which Transformer Engine is compiled with"
  nvcc=$(find_nvcc)
  [ -x "$nvcc" ] ||
    fail "there is no nvcc ($nvcc), with which SGLang compiles kernels when it starts; load CUDA 13's module, or set CUDA_HOME"
  release=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  [ "$release" = 13 ] || fail "$nvcc is of CUDA ${release:-unknown}, but torch and SGLang are built for CUDA 13"
}

# A lock's wheels have 3.5 GB (trainer) and 4.0 GB (engines); wheels of it that were unpacked grew by 2.2.
check_room() {
  local free parent
  parent=$(dirname "$1")
  free=$(df -Pk "$parent" | awk 'NR == 2 {print int($4 / 1000000)}')
  [ "$free" -ge "$NEEDED_GB" ] || fail "$parent has $free GB free, but $1 needs about $NEEDED_GB GB; make room, or build on another disk"
}

make_environment() {
  [ -e "$1" ] || check_room "$1"
  # Not by `uv venv`: whether it replaces a folder, and by which option, depends on its version.
  local options=(--clear)
  ! command -v uv >/dev/null || options+=(--without-pip)
  "$PYTHON" -m venv "${options[@]}" "$1"
  use_environment "$1"
}

use_environment() {
  install=(uv pip install -q --python "$1/bin/python" --no-deps)
  command -v uv >/dev/null || install=("$1/bin/python" -m pip --disable-pip-version-check install -q --no-deps)
}

build_trainer() {
  make_environment "$1"
  echo "$1: downloading requirements/trainer.txt; gigabytes"
  "${install[@]}" -r requirements/trainer.txt
  # Its headers of CUDA, cuDNN and NCCL are those of the wheels that torch came with, not the system's.
  echo "$1: compiling Transformer Engine's torch part, with MAX_JOBS=${MAX_JOBS:-all cores}"
  PATH="$(realpath "$1")/bin:$PATH" NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
    "${install[@]}" --no-build-isolation -r requirements/trainer-apart.txt
}

build_engines() {
  make_environment "$1"
  echo "$1: downloading requirements/engines.txt; gigabytes"
  "${install[@]}" -r requirements/engines.txt
  "${install[@]}" --extra-index-url "$NVIDIA_INDEX" -r requirements/engines-apart.txt
}

build_megasharp() {
  use_environment "$1"
  "${install[@]}" --no-build-isolation -e .
}

check_machine
case "${1:-}" in
  trainer | engines | megasharp) "build_$1" "${2:?the folder of the environment}" ;;
  *) fail "expected trainer, engines or megasharp, not ${1:-nothing}" ;;
esac
