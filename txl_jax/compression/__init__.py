"""Compression of files with a trained model that learns from what it has coded.

`predictor` predicts the next byte of some streams and learns from them, `range_coder` turns
predictions and bytes into bits and back, `codec` leads both through a text, and `file_format` is
the file.
"""
