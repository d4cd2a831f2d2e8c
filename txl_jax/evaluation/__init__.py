"""Ways to score a text with a trained model."""
