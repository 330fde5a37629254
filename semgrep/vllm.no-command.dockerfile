FROM vllm/vllm-tpu:v0.21.0
ENV X=1
RUN pip install ray
