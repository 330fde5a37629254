#!/usr/bin/env bash
set -euo pipefail

model=${1:-HuggingFaceH4/zephyr-7b-beta}
volume=$PWD/data   # share a volume with the container to avoid downloading weights every run

docker run --gpus all --shm-size 1g -p 8080:80 -v "$volume:/data" \
    -e HF_TOKEN=$HF_TOKEN \
    ghcr.io/huggingface/text-generation-inference:3.3.5 \
    --model-id "$model" \
    --max-top-n-tokens 50 \
    --max-input-tokens 3072 --max-total-tokens 4096
