FROM vllm/vllm-openai
ENV VLLM_API_KEY=k
CMD ["--model", "m"]
