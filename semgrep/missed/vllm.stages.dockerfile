# todoruleid: KH-CONFIG-VLLM-OPEN
FROM vllm/vllm-openai AS base
FROM base
CMD ["--model", "m"]
