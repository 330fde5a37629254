[Container]
# ruleid: KH-CONFIG-OLLAMA-OPEN
Image = ollama/ollama
PublishPort = 11434:11434
