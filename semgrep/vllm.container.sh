[Unit]
Description=vLLM
After=network-online.target

[Container]
# ruleid: KH-CONFIG-VLLM-OPEN
Image=docker.io/vllm/vllm-openai:v0.10.2
ContainerName=vllm
PublishPort=8000:8000
AddDevice=nvidia.com/gpu=all
Environment=HF_HOME=/cache
Exec=--model Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.9

[Install]
WantedBy=default.target
