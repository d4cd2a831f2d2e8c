"""Compression of files with a trained model that learns from what it has coded.

`predictor` predicts the next byte of each stream and learns from it, `range_coder` turns
predictions and bytes into bits and back, `codec` drives both through a text, and `file_format`
defines the file.
"""
