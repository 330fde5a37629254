"""What the extraction of a language model's last layer is made of."""
