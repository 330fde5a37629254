# ruleid: KH-CONFIG-VLLM-OPEN
FROM vllm/vllm-openai
# ruleid: KH-CONFIG-VLLM-LOGPROBS
CMD ["--model", "m", "--max-logprobs", "50", \
     # ruleid: KH-CONFIG-VLLM-PROMPT-EMBEDS
     "--enable-prompt-embeds"]
