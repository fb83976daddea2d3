"""Random damage of a file from a seed: flipped bits, cuts, swapped blocks, additions, and odd values in JSON."""

import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**63, 1e308, -0.5, "", "x", "../x", "${oc.env:SECRET}", [], [0], {}, {"": 0}, [[[[]]]], "F32",
    "é" * 50, 10**30,
]  # fmt: skip


def mutate(data: bytes, choose: random.Random) -> bytes:
    """Return damaged data; it may be equal."""
    kinds = [_flip, _cut, _swap, _add]
    if data[:1] in (b"{", b"["):
        kinds += [_change_json] * 3
    elif len(data) > 8 and data[8:9] == b"{":  # a safetensors file
        kinds += [_change_header] * 3
    return choose.choice(kinds)(data, choose)


def _flip(data: bytes, choose: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 8])):
        if changed:
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def _cut(data: bytes, choose: random.Random) -> bytes:
    begin = choose.randrange(len(data) + 1)
    return data[:begin] if choose.random() < 0.5 else data[:begin] + data[begin + choose.choice([1, 4, 64]) :]


def _swap(data: bytes, choose: random.Random) -> bytes:
    size = choose.choice([1, 4, 16])
    a, b = sorted(choose.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def _add(data: bytes, choose: random.Random) -> bytes:
    at, begin = choose.randrange(len(data) + 1), choose.randrange(len(data) + 1)
    new = choose.choice([choose.randbytes(choose.choice([1, 8, 100])), data[begin : begin + 50], b"[" * 2000, b"\n7\n", b"\0"])
    return data[:at] + new + data[at:]


def _change_json(data: bytes, choose: random.Random) -> bytes:
    """Change a value, or a name, of one JSON object or of one line of them."""
    lines = data.splitlines(keepends=True) if b"\n{" in data else [data]
    number = choose.randrange(len(lines))
    try:
        content = json.loads(lines[number])
    except ValueError:
        return _flip(data, choose)
    places = list(_places(content))
    if places:
        node, key = choose.choice(places)
        action = choose.random()
        if action < 0.6:
            node[key] = choose.choice(ODD)
        elif action < 0.8:
            del node[key]
        elif isinstance(node, dict):
            node[choose.choice(["x", "step", f"{key}x"])] = node[key]
        else:
            node.append(node[key])
    lines[number] = json.dumps(content).encode() + b"\n" * lines[number].endswith(b"\n")
    return b"".join(lines)


def _change_header(data: bytes, choose: random.Random) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    text = _change_json(data[8:end], choose) if choose.random() < 0.8 else _flip(data[8:end], choose)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _places(node: Any) -> Any:
    """Yield (container, key) of every value."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, value in items[:200]:  # a random state has 625 numbers
        yield node, key
        yield from _places(value)
