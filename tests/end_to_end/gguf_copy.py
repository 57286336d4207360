"""A GGUF file taken apart: keys and tensors can be changed, added and left out before it is written again.

Plain Python, no packages; harness.Gguf changes bytes in place instead.
"""
import math
import pathlib
import struct

from harness import MODEL

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 8: (32, 34), 12: (256, 144), 14: (256, 210), 26: (1, 4), 30: (1, 2)}  # type: values, bytes


class GgufCopy:
    def __init__(self, path=MODEL):
        self.keys = {}     # key -> (type, value); of arrays the value is (element type, list)
        self.tensors = {}  # name -> [dimensions, type, bytes]
        self._data, self._at = pathlib.Path(path).read_bytes(), 8
        n_tensors, n_keys = self._take("QQ")
        for _ in range(n_keys):
            key = self._string().decode()
            kind, = self._take("I")
            self.keys[key] = (kind, self._value(kind))
        places = []
        for _ in range(n_tensors):
            name = self._string().decode()
            n_dims, = self._take("I")
            places.append((name, self._take(f"{n_dims}Q"), *self._take("IQ")))
        start = -(-self._at // 32) * 32
        for name, dims, kind, offset in places:
            values, size = BLOCKS[kind]
            n_bytes = math.prod(dims) // values * size
            self.tensors[name] = [dims, kind, self._data[start + offset:start + offset + n_bytes]]

    def save(self, folder, name):
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys)))
        for key, (kind, value) in self.keys.items():
            out += self._packed(STRING, key.encode()) + struct.pack("<I", kind) + self._packed(kind, value)
        offset = 0
        for tensor, (dims, kind, data) in self.tensors.items():
            out += self._packed(STRING, tensor.encode()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
            offset += -(-len(data) // 32) * 32
        out += bytes(-len(out) % 32)
        for _, _, data in self.tensors.values():
            out += data + bytes(-len(data) % 32)
        path = pathlib.Path(folder) / name
        path.write_bytes(out)
        return path

    def _take(self, form):
        values = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self):
        size, = self._take("Q")
        self._at += size
        return self._data[self._at - size:self._at]

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            element, count = self._take("IQ")
            return element, [self._value(element) for _ in range(count)]
        return self._take(SCALARS[kind])[0]

    def _packed(self, kind, value):
        if kind == STRING:
            return struct.pack("<Q", len(value)) + value
        if kind == ARRAY:
            element, values = value
            return struct.pack("<IQ", element, len(values)) + b"".join(self._packed(element, v) for v in values)
        return struct.pack("<" + SCALARS[kind], value)
