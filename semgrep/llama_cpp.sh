#!/bin/bash
# ruleid: KH-CONFIG-LLAMA-EMBEDDINGS
numactl -N 0 /opt/llama-server --embedding
# ruleid: KH-CONFIG-LLAMA-EMBEDDINGS
llama-server --embeddings --pooling mean
# ruleid: KH-CONFIG-LLAMA-METRICS, KH-CONFIG-LLAMA-SLOT-FILES
llama-server --slot-save-path /slots --metrics
# ruleid: KH-CONFIG-LLAMA-METRICS
llama-server --metrics
# ruleid: KH-CONFIG-LLAMA-OPEN
sudo -u ml /opt/bin/llama-server --host 0.0.0.0
# ruleid: KH-CONFIG-LLAMA-OPEN
llama-server -m m --host ${HOST:-0.0.0.0}
# ruleid: KH-CONFIG-LLAMA-OPEN
llama-server -m x --host=0.0.0.0
# ok: KH-CONFIG-LLAMA-OPEN
llama-server -m x
# ok: KH-CONFIG-LLAMA-OPEN
llama-server -m x --host 127.0.0.1 --port 80
# ok: KH-CONFIG-LLAMA-OPEN
llama-server -m x --host 10.0.0.7 --api-key $KEY
# ok: KH-CONFIG-LLAMA-OPEN
llama-server -m x --host $HOST
# ok: KH-CONFIG-LLAMA-OPEN
llama-server -m x --host /run/llama.sock
# ok: KH-CONFIG-LLAMA-OPEN
LLAMA_API_KEY=k llama-server -m x --host 0.0.0.0
# ok: KH-CONFIG-LLAMA-OPEN
llama-server --host 0.0.0.0 "$@"
# ruleid: KH-CONFIG-LLAMA-SLOTS
bash -c 'llama-server --slots'
# ok: KH-CONFIG-LLAMA-SLOTS
sudo apt install llama-server --slots
# ruleid: KH-CONFIG-LLAMA-OPEN
llama-server -m m --host ${HOST-0.0.0.0}
# ok: KH-CONFIG-LLAMA-OPEN
llama-server -m m --host ${HOST:?name it}
# A variable that the script sets itself is not followed.
HOST=0.0.0.0
# todoruleid: KH-CONFIG-LLAMA-OPEN
llama-server -m m --host $HOST
HOST=${1:-0.0.0.0}
# todoruleid: KH-CONFIG-LLAMA-OPEN
llama-server -m m --host "$HOST"
export HOST=${HOST:-0.0.0.0}
# todoruleid: KH-CONFIG-LLAMA-OPEN
llama-server -m m --host $HOST
