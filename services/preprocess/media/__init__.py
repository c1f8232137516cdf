"""Media: limits, decoding, frames of videos, pixel values."""
