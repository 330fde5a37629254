[Container]
Image = ollama/ollama
PublishPort = 127.0.0.1:1:1
