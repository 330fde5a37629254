[Unit]
Description=llama.cpp

[Service]
# ruleid: KH-CONFIG-LLAMA-OPEN, KH-CONFIG-LLAMA-METRICS
Environment="LLAMA_ARG_HOST=0.0.0.0" LLAMA_ARG_ENDPOINT_METRICS=1
ExecStart=/usr/local/bin/llama-server \
    --model /srv/model.gguf \
    # ruleid: KH-CONFIG-LLAMA-PROMPT-LOG
    --log-prompts-dir /var/log/prompts
