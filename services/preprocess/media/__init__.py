"""Media: fetching, limits, decoding, frames of videos, pixel values."""
