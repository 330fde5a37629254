FROM vllm/vllm-openai AS a
CMD ["m"]
FROM python
COPY --from=a /x /x
