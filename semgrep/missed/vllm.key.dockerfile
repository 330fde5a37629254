FROM python
# todoruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
ENV VLLM_API_KEY=k
CMD cd /app && vllm serve m
