"""Export of a trained model to ONNX or to the Hugging Face Hub with a model card."""
