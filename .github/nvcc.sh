#!/bin/sh
# The CUDA 13.0 compiler from the package index, as /usr/local/cuda, where the build finds it.
set -eu
python3 -m pip install -q --no-deps --target /opt/nvcc --require-hashes \
  -r "$(dirname "$0")/../requirements/nvcc.txt"
ln -s lib /opt/nvcc/nvidia/cu13/lib64 # where the compiler looks
ln -s libcudart.so.13 /opt/nvcc/nvidia/cu13/lib/libcudart.so
ln -sfn /opt/nvcc/nvidia/cu13 /usr/local/cuda
