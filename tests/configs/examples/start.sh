#!/bin/bash
# vllm serve --max-logprobs 1000
export CUDA_VISIBLE_DEVICES=0
exec vllm serve "$MODEL" \
  --max_logprobs 100 \
  --enable-prompt-embeds && echo done
docker run -p 6333:6333 -e A=b qdrant/qdrant
docker pull qdrant/qdrant
python3 -m sglang.launch_server --model-path x --host 0.0.0.0 --enable-return-hidden-states
