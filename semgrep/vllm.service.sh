[Service]
# ruleid: KH-CONFIG-VLLM-OPEN
ExecStart = /usr/bin/vllm serve m --host 0.0.0.0
