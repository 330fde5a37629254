FROM python
# ruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
CMD cd /app && vllm serve m --api-key $KEY
