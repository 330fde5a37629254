#!/bin/bash
# ruleid: KH-CONFIG-LMCACHE-ONE-KEY
lmcache server --l2-adapter '{"type": "fs", "base_path": "/kv", "serde": {"type": "aesgcm", "master_key_path": "/run/secrets/key"}}'
# ruleid: KH-CONFIG-LMCACHE-PLAIN
LMCACHE_LOCAL_DISK=/kv vllm serve m --host localhost
# ruleid: KH-CONFIG-LMCACHE-PLAIN
lmcache server --l2-adapter '{"type": "fs", "base_path": "/kv"}'
# ruleid: KH-CONFIG-LMCACHE-PLAIN, KH-CONFIG-LMCACHE-REMOTE
lmcache server --l2-adapter '{"type": "fs", "serde": {"type": "fp8"}}' --l2-adapter '{"type": "resp", "host": "cache", "port": 6379}'
# ok: KH-CONFIG-LMCACHE-PLAIN
LMCACHE_LOCAL_DISK=False vllm serve m --host localhost
# ok: KH-CONFIG-LMCACHE-PLAIN
lmcache server --l1-size-gb 60
# ok: KH-CONFIG-LMCACHE-PLAIN
pip install lmcache vllm
# ruleid: KH-CONFIG-LMCACHE-REMOTE
LMCACHE_REMOTE_URL=redis://cache:6379 vllm serve m --host localhost
# ok: KH-CONFIG-LMCACHE-REMOTE
LMCACHE_REMOTE_URL=rediss://cache:6379 vllm serve m --host localhost
