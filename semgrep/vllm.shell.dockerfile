FROM python
# ruleid: KH-CONFIG-VLLM-OPEN
CMD cd /app && vllm serve m --host 0.0.0.0
