"""URLs in tests: strings, as in the product, with some methods of `pathlib.Path`."""

import os

from txl_jax.runtime import storage


class Remote(str):
    """A URL such as gs://bucket/run."""

    __slots__ = ()

    def __truediv__(self, name):
        return Remote(os.path.join(self, name))

    @property
    def name(self):
        return os.path.basename(self)

    def iterdir(self):
        return [self / name for name in storage.names(self)]

    def exists(self):
        return storage.exists(self)

    def read_bytes(self):
        return storage.read(self)

    def read_text(self):
        return storage.read(self).decode()

    def write_bytes(self, data):
        storage.write(self, data)

    def write_text(self, text):
        storage.write(self, text.encode())

    def unlink(self):
        storage.remove(self)
