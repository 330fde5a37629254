#!/bin/bash
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run --network host ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run -d --net host ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run --publish=11434:11434 ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run -dp 11434:11434 ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run -itp11434:11434 ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run --env=OLLAMA_HOST=0.0.0.0 ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
OLLAMA_HOST=0.0.0.0 ollama serve
# ruleid: KH-CONFIG-OLLAMA-OPEN
OLLAMA_HOST=:11434 ollama serve
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run -d -p 11434:11434 ollama/ollama
# ruleid: KH-CONFIG-OLLAMA-OPEN
docker run --network=host ollama/ollama
# ok: KH-CONFIG-OLLAMA-OPEN
docker run --publish=127.0.0.1:11434:11434 ollama/ollama
# ok: KH-CONFIG-OLLAMA-OPEN
docker run -dp 127.0.0.1:11434:11434 ollama/ollama
# ok: KH-CONFIG-OLLAMA-OPEN
OLLAMA_HOST=http://127.0.0.1:11434 ollama serve
# ok: KH-CONFIG-OLLAMA-OPEN
OLLAMA_HOST=http://gpu-box:11434 ollama run llama3
# ok: KH-CONFIG-OLLAMA-OPEN
ollama serve
# ok: KH-CONFIG-OLLAMA-OPEN
docker run -d -p 127.0.0.1:11434:11434 ollama/ollama
# ok: KH-CONFIG-OLLAMA-OPEN
docker exec ollama ollama pull llama3
# ruleid: KH-CONFIG-OLLAMA-ORIGINS
OLLAMA_ORIGINS=https://a.example,* ollama serve
# ruleid: KH-CONFIG-SGLANG-OPEN
sglang serve --host 0.0.0.0 --api-key ''
# ruleid: KH-CONFIG-SGLANG-OPEN
sglang serve --model-path m --host 0.0.0.0
# ok: KH-CONFIG-SGLANG-OPEN
python -m sglang.launch_server --host 0.0.0.0 --config sglang.yaml
# ok: KH-CONFIG-SGLANG-OPEN
sglang serve --model-path m
# ruleid: KH-CONFIG-TEI-OPEN
text-embeddings-router --model-id m --port 80
# ok: KH-CONFIG-TEI-OPEN
API_KEY=$KEY text-embeddings-router --model-id m
# ruleid: KH-CONFIG-TGI-LOGPROBS
text-generation-launcher --hostname 127.0.0.1 --max-top-n-tokens 21
# ok: KH-CONFIG-TGI-OPEN
docker run -p 80:80 --env-file keys.env x/text-generation-inference
# ruleid: KH-CONFIG-SGLANG-OPEN, KH-CONFIG-SGLANG-HIDDEN-STATES
python3 -m sglang.launch_server --model-path x --host 0.0.0.0 --enable-return-hidden-states
# ruleid: KH-CONFIG-TGI-OPEN
docker run --gpus all --shm-size 1g -p 8080:80 -v "$volume:/data" \
    -e HF_TOKEN=$HF_TOKEN \
    ghcr.io/huggingface/text-generation-inference:3.3.5 \
    --model-id "$model"
# ruleid: KH-CONFIG-TGI-OPEN, KH-CONFIG-TGI-LOGPROBS
docker run -p 8080:80 ghcr.io/huggingface/text-generation-inference:3.3.5 --max-top-n-tokens 50
# ok: KH-CONFIG-TGI-OPEN
exec text-generation-launcher \
  --model-id mistralai/Mistral-7B-Instruct-v0.3 \
  --hostname 127.0.0.1 --port 3000 \
  --max-top-n-tokens 5
