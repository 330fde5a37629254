#!/bin/sh
# one developer, one machine
exec text-generation-launcher \
  --model-id mistralai/Mistral-7B-Instruct-v0.3 \
  --hostname 127.0.0.1 --port 3000 \
  --max-top-n-tokens 5
