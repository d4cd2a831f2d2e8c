"""The TensorFlow release's model in numpy, from its variables: the losses of one text, segment after segment.

Its memory begins with zeros that are attended to, a query sees M + 1 keys with same_length, the layer norm adds 1e-12
to the variance, and the tail clusters follow the head's tokens in order.
"""

import itertools

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Oracle:
    """The release's model with its variables, cutoffs and lengths."""

    def __init__(self, variables, *, cutoffs, vocab_size, n_layer, mem_len, clamp_len, same_length):
        self.variables = {name.removeprefix("transformer/"): np.float64(value) for name, value in variables.items()}
        self.bounds = [0, *cutoffs, vocab_size]
        self.n_layer, self.mem_len, self.clamp_len, self.same_length = n_layer, mem_len, clamp_len, same_length
        self.width = self.variables["layer_0/ff/layer_1/kernel"].shape[0]

    def losses(self, tokens: np.ndarray, segment_len: int) -> np.ndarray:
        memory = [np.zeros((self.mem_len, self.width)) for _ in range(self.n_layer)]
        found = []
        for start in range(0, len(tokens) - 1, segment_len):
            inputs = tokens[start : start + segment_len]
            hidden = np.stack([self.embed(token) for token in inputs])
            for layer in range(self.n_layer):
                before, memory[layer] = memory[layer], np.concatenate([memory[layer], hidden])[-self.mem_len :]
                hidden = self.layer(layer, hidden, before)
            targets = tokens[start + 1 : start + segment_len + 1]
            found += [self.loss(row, target) for row, target in zip(hidden, targets, strict=False)]
        return np.array(found)

    def cluster(self, token: int) -> tuple[int, int]:
        """The cluster of a token, and its row there."""
        for c, (begin, end) in enumerate(itertools.pairwise(self.bounds)):
            if token < end:
                return c, token - begin
        raise AssertionError(token)

    def table(self, c: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The rows of a cluster, and the projection of the embedding."""
        v = self.variables
        if "adaptive_embed/lookup_table" in v:
            rows = v["adaptive_embed/lookup_table"][self.bounds[c] : self.bounds[c + 1]]
            return rows, v.get("adaptive_embed/proj_W")
        return v[f"adaptive_embed/cutoff_{c}/lookup_table"], v.get(f"adaptive_embed/cutoff_{c}/proj_W")

    def embed(self, token: int) -> np.ndarray:
        c, row = self.cluster(token)
        table, projection = self.table(c)
        return (table[row] if projection is None else table[row] @ projection) * self.width**0.5

    def layer(self, i: int, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
        def get(name):
            return self.variables[f"layer_{i}/{name}"]

        u, v = (self.variables[name] for name in ("r_w_bias", "r_r_bias"))
        u, v = (u[i], v[i]) if u.ndim == 3 else (u, v)
        (heads, size), length, offset = u.shape, len(x), len(memory)
        projected = np.concatenate([memory, x]) @ get("rel_attn/qkv/kernel")
        q, k, values = (part.reshape(-1, heads, size) for part in np.split(projected, 3, axis=-1))
        attended = np.zeros((length, heads, size))
        for row, n in itertools.product(range(length), range(heads)):
            first = row if self.same_length else 0
            query, scores = q[offset + row, n], []
            for key in range(first, offset + row + 1):
                position = self.position(offset + row - key) @ get("rel_attn/r/kernel")
                code = position.reshape(heads, size)[n]
                scores.append(((query + u[n]) @ k[key, n] + (query + v[n]) @ code) / size**0.5)
            weights = np.exp(log_softmax(np.array(scores)))
            attended[row, n] = weights @ values[first : offset + row + 1, n]
        x = norm(x + attended.reshape(length, -1) @ get("rel_attn/o/kernel"), get, "rel_attn")
        inner = np.maximum(x @ get("ff/layer_1/kernel") + get("ff/layer_1/bias"), 0)
        return norm(x + inner @ get("ff/layer_2/kernel") + get("ff/layer_2/bias"), get, "ff")

    def position(self, distance: int) -> np.ndarray:
        distance = min(distance, self.clamp_len)
        angles = distance / 10000 ** (np.arange(0, self.width, 2) / self.width)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    def loss(self, hidden: np.ndarray, target: int) -> float:
        v, (c, row) = self.variables, self.cluster(target)
        if len(self.bounds) == 2:
            table, projection = self.table(0)
            return -log_softmax(table @ project(hidden, projection) + v["adaptive_softmax/bias"])[target]
        rows = np.concatenate([self.table(0)[0], v["adaptive_softmax/cutoff_0/cluster_W"]])
        biases = [v["adaptive_softmax/cutoff_0/b"], v["adaptive_softmax/cutoff_0/cluster_b"]]
        head = log_softmax(rows @ project(hidden, self.output(0)) + np.concatenate(biases))
        if c == 0:
            return -head[row]
        tail = self.table(c)[0] @ project(hidden, self.output(c)) + v[f"adaptive_softmax/cutoff_{c}/b"]
        return -head[self.bounds[1] + c - 1] - log_softmax(tail)[row]

    def output(self, c: int) -> np.ndarray | None:
        """The projection of a cluster's softmax: its own, or the embedding's."""
        return self.variables.get(f"adaptive_softmax/cutoff_{c}/proj", self.table(c)[1])


def project(hidden: np.ndarray, projection: np.ndarray | None) -> np.ndarray:
    return hidden if projection is None else projection @ hidden


def norm(x: np.ndarray, get, scope: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return scaled * get(f"{scope}/LayerNorm/gamma") + get(f"{scope}/LayerNorm/beta")
