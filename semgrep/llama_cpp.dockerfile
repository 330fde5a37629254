FROM python:3.11 AS base
# ruleid: KH-CONFIG-LLAMA-OPEN, KH-CONFIG-LLAMA-PROPS
FROM ghcr.io/ggml-org/llama.cpp:server
# ruleid: KH-CONFIG-LLAMA-SLOT-FILES
ENV LLAMA_ARG_SLOT_SAVE_PATH=/slots
CMD ["-m", "/m.gguf", \
     "--props"]
