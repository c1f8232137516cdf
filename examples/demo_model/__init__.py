"""The demo model: drawn scenes, questions about them, training and export."""
