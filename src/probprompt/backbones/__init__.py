"""Frozen vision transformers and their pretrained weights."""
