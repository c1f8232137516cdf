"""What quantization costs: distributions of next tokens beside those of float32."""
