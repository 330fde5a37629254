# todoruleid: KH-CONFIG-VLLM-OPEN
FROM vllm/vllm-openai as Base
CMD ["--model", "m"]
FROM x
FROM base
