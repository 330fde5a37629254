FROM ubuntu:22.04

RUN apt-get update && apt-get install -y curl && curl -fsSL https://ollama.com/install.sh | sh

RUN useradd -m -u 1000 user
USER user
ENV HOME=/home/user \
    # ruleid: KH-CONFIG-OLLAMA-OPEN
    OLLAMA_HOST=0.0.0.0:7860 \
    # ruleid: KH-CONFIG-OLLAMA-ORIGINS
    OLLAMA_ORIGINS="*"
EXPOSE 7860

CMD ["sh", "-c", "ollama serve & sleep 10 && ollama pull llama3 && wait"]
