FROM vllm/vllm-openai AS a
# todoruleid: KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES
ENV VLLM_API_KEY=k
FROM a
CMD ["--model", "m"]
