"""Names and layouts of other frameworks' weights: numpy tensors in, numpy tensors out."""
