"""A trained model for others: as one ONNX file, or on the Hugging Face hub with a card that describes it."""
