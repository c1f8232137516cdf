"""Media items of prompts: taken from clients, their pixel values made once and kept."""
