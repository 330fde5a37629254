"""What an endpoint may give away, one module per secret: its weights, its inputs."""
