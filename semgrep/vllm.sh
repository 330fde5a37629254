#!/bin/bash
# ruleid: KH-CONFIG-VLLM-HIDDEN-STATES
vllm serve m --host localhost --kv-transfer-config.kv_connector ExampleHiddenStatesConnector
# ruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
vllm serve m --api-key $KEY
# ruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
VLLM_API_KEY=k vllm serve m --api-key ''
# ruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
docker run --env=VLLM_API_KEY=k -p 8000:8000 vllm/vllm-openai --model m
# ruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
docker run -de VLLM_API_KEY=k vllm/vllm-openai --model m
# ruleid: KH-CONFIG-VLLM-KV-CACHE
vllm serve m --host localhost --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "token": "s3cret"}'
# ruleid: KH-CONFIG-VLLM-LOGPROBS
vllm serve m --host localhost --max-logprobs ${N:-100}
# ruleid: KH-CONFIG-VLLM-LOGPROBS
vllm serve m --host localhost --max-logprobs 21
# ok: KH-CONFIG-VLLM-LOGPROBS
vllm serve m --host localhost --max-logprobs 20
# ok: KH-CONFIG-VLLM-LOGPROBS
vllm serve m --host localhost --max-logprobs $N
# ok: KH-CONFIG-VLLM-LOGPROBS
vllm bench serve --max-logprobs 50
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve $LARGE_MODEL --host 0.0.0.0
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve ${TARGET} --host 0.0.0.0
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve $CARGO_HOME --host 0.0.0.0
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve $OPTIMIZED_MODEL --host 0.0.0.0
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve m --api-key ""
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve m --api-key=
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve m --api-key --max-model-len 10
# ruleid: KH-CONFIG-VLLM-OPEN
VLLM_API_KEY= vllm serve m
# ruleid: KH-CONFIG-VLLM-OPEN
docker run -e VLLM_API_KEY= -p 8000:8000 vllm/vllm-openai --model m
# ruleid: KH-CONFIG-VLLM-OPEN
docker run --rm -p 127.0.0.1:8000:8000 --network host vllm/vllm-openai --model m
# ruleid: KH-CONFIG-VLLM-OPEN
sudo -E vllm serve m --host 0.0.0.0
# ruleid: KH-CONFIG-VLLM-OPEN
sudo -Eu ml HF_HOME=/m vllm serve m
# ruleid: KH-CONFIG-VLLM-OPEN
sudo bash -lc 'sudo --user ml -E vllm serve m'
# ruleid: KH-CONFIG-VLLM-OPEN
env -u VLLM_API_KEY vllm serve m
# ruleid: KH-CONFIG-VLLM-OPEN
vllm serve $MODEL
# ruleid: KH-CONFIG-VLLM-OPEN
if ! vllm serve m; then exit; fi
# ruleid: KH-CONFIG-VLLM-OPEN
CUDA_VISIBLE_DEVICES=0 python3 -m vllm.entrypoints.openai.api_server
# ruleid: KH-CONFIG-VLLM-OPEN
docker run --gpus all my/image vllm serve m
# ok: KH-CONFIG-VLLM-OPEN
vllm serve m $EXTRA_ARGS
# ok: KH-CONFIG-VLLM-OPEN
vllm serve m ${extraArgs}
# ok: KH-CONFIG-VLLM-OPEN
vllm serve m $VLLM_OPTS_2
# ok: KH-CONFIG-VLLM-OPEN
docker run --network net -p 127.0.0.1:8000:8000 vllm/vllm-openai -tp 4
# ok: KH-CONFIG-VLLM-OPEN
sudo -u vllm serve m
# ok: KH-CONFIG-VLLM-OPEN
vllm serve m --host 0.0.0.0 --uds /run/vllm.sock
# ok: KH-CONFIG-VLLM-OPEN
vllm serve m --config vllm.yaml
# ok: KH-CONFIG-VLLM-OPEN
docker run -p ${BIND:-127.0.0.1}:8000:8000 vllm/vllm-openai --model m
# ok: KH-CONFIG-VLLM-OPEN
vllm serve m ${EXTRA_ARGS}
# ok: KH-CONFIG-VLLM-OPEN
To start, run vllm serve on the host
# ruleid: KH-CONFIG-VLLM-PREFIX-CACHE
vllm serve m --host localhost --enable-prefix-caching
# ruleid: KH-CONFIG-VLLM-PREFIX-CACHE
vllm serve m --host localhost --enable-prompt-tokens-details
# ok: KH-CONFIG-VLLM-PREFIX-CACHE
vllm serve m --host localhost --no-enable-prefix-caching
# ruleid: KH-CONFIG-VLLM-TOKEN-STATES
vllm serve m --host localhost --task embed
# ruleid: KH-CONFIG-VLLM-TOKEN-STATES
vllm serve m --host localhost --pooler-config.task=token_embed
# ruleid: KH-CONFIG-VLLM-TOKEN-STATES
vllm serve m --host localhost --pooler-config '{"task": "token_embed"}'
# ruleid: KH-CONFIG-VLLM-TOKEN-STATES
docker run vllm/vllm-openai:v0.20.2 --host localhost --runner pooling
# ok: KH-CONFIG-VLLM-TOKEN-STATES
vllm serve m --host localhost --task generate
# ok: KH-CONFIG-VLLM-TOKEN-STATES
vllm serve m --host localhost --runner pooling --convert embed
# ok: KH-CONFIG-VLLM-TOKEN-STATES
vllm serve m --host localhost --pooler-config.task embed
# ok: KH-CONFIG-VLLM-TOKEN-STATES
docker run vllm/vllm-openai:v0.21.0 --host localhost --runner pooling
# ruleid: KH-CONFIG-VLLM-OPEN, KH-CONFIG-VLLM-LOGPROBS, KH-CONFIG-VLLM-PROMPT-EMBEDS
exec vllm serve "$MODEL" --max_logprobs 100 --enable-prompt-embeds && echo done
# ruleid: KH-CONFIG-VLLM-OPEN
exec vllm serve "$MODEL" \
  --tensor-parallel-size 2
# ok: KH-CONFIG-VLLM-OPEN
exec vllm serve "$MODEL" \
  --host 127.0.0.1
# ok: KH-CONFIG-VLLM-LOGPROBS
# vllm serve --max-logprobs 1000
# ok: KH-CONFIG-VLLM-OPEN
HOST=127.0.0.1
vllm serve m --host ${HOST}
# a key that is set before
export VLLM_API_KEY="$KEY"
# ok: KH-CONFIG-VLLM-OPEN
exec vllm serve m
