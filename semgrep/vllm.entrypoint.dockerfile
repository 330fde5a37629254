FROM python
# ruleid: KH-CONFIG-VLLM-OPEN
ENTRYPOINT HF_HOME=/m exec vllm serve m
