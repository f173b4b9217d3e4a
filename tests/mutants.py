"""Files that somebody has changed inside their chunks: opened under 1 GiB, and what opens is shown.

`python -m tests.mutants COUNT FILE...` opens so many, and prints what became of them.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

_FRAME = struct.Struct("<II")
_MAGIC = b"accumviz 6\n"
EVIL: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**53, 2**62, 2**63, 2**70, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "loss", "w", "step", "backward", "sync", "\ud800", "</script>\u202e\0", "9" * 5000, "x" * 100_000),
    *(
        [],
        {},
        [1],
        [-1],
        ["a"],
        [None],
        [[]],
        [2**62, 0],
        [2**31, 2**31],
        [0.5],
        {"a": 1},
        {"": None},
        {"a": {"b": []}},
    ),
    *([1] * 10_000, [[]] * 1000, [{}] * 1000, "deep"),
    *('{"ranks":0}', '{"bytes":-1}', '{"optimizer_index":"x"}', '{"lr":3}', "{", "[]", '{"op":[]}', '{"skipped":[1]}'),
]


def frames(data: bytes) -> list[bytes]:
    """The inflated contents of a file's chunks."""
    found, at = [], len(_MAGIC)
    while at + _FRAME.size <= len(data):
        (length, _), at = _FRAME.unpack_from(data, at), at + _FRAME.size
        found.append(zlib.decompressobj().decompress(data[at : at + length]))
        at += length
    return found


def joined(contents: list[bytes]) -> bytes:
    """A file of these contents, padded as much as a reader asks for, so that it looks at what is inside."""
    chunks = []
    for raw in contents:
        body = zlib.compress(raw)
        body += bytes(len(raw) // 2)
        chunks.append(_FRAME.pack(len(body), zlib.crc32(body)) + body)
    return _MAGIC + b"".join(chunks)


def mutant(data: bytes, seed: int) -> bytes:
    """One changed file: always the same for one seed."""
    rng = random.Random(seed)
    change = rng.choice([_shuffle, _inner, _json, _json, _json, _json, _numbers, _numbers, _shape])
    return change(data, rng)


def _shuffle(data: bytes, rng: random.Random) -> bytes:
    bodies = frames(data)
    what, at = rng.randrange(3), rng.randrange(len(bodies))
    if what == 0:
        rng.shuffle(bodies)
    elif what == 1:
        bodies.insert(rng.randrange(len(bodies) + 1), bodies[at])
    else:
        del bodies[at]
    return joined(bodies)


def _opened(data: bytes, rng: random.Random) -> tuple[list[bytes], int, dict[str, Any], bytes]:
    bodies = frames(data)
    at = rng.randrange(len(bodies))
    raw = bodies[at]
    (length,) = struct.unpack_from("<I", raw)
    return bodies, at, json.loads(raw[4 : 4 + length]), raw[4 + length :]


def _closed(bodies: list[bytes], at: int, header: Any, raw: bytes) -> bytes:
    head = json.dumps(header).replace('"deep"', "[" * 3000 + "]" * 3000).encode()
    bodies[at] = struct.pack("<I", len(head)) + head + raw
    return joined(bodies)


def _inner(data: bytes, rng: random.Random) -> bytes:
    bodies, at, header, raw = _opened(data, rng)
    changed = bytearray(json.dumps(header).encode() + raw)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    length = len(json.dumps(header))
    bodies[at] = struct.pack("<I", length) + bytes(changed)
    return joined(bodies)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key there."""
    found = []
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        found.append((node, key))
        if isinstance(node[key], dict | list):
            found += _places(node[key])
    return found


def _json(data: bytes, rng: random.Random) -> bytes:
    bodies, at, header, raw = _opened(data, rng)
    for _ in range(rng.choice([1, 1, 2])):
        node, key = rng.choice(_places(header))
        what = rng.randrange(6)
        if what == 0:
            del node[key]
        elif what == 1 and isinstance(node, list):
            node.insert(key, copy.deepcopy(rng.choice(EVIL)))
        elif what == 2 and isinstance(node, dict):
            name = rng.choice(["x", "rank", "lr", "evil", "notes", "stopped", "parameters", "meta", "end"])
            node[name] = copy.deepcopy(rng.choice(EVIL))
        elif what == 3 and isinstance(node[key], str) and node[key].startswith('{"') and node[key] not in EVIL:
            inside = json.loads(node[key])
            name = rng.choice([*inside, "ranks", "bytes", "op", "skipped", "optimizer", "lr"])
            node[key] = json.dumps(inside | {name: rng.choice(EVIL)})
        else:
            node[key] = copy.deepcopy(rng.choice(EVIL))
    return _closed(bodies, at, header, raw)


def _array(header: dict[str, Any], rng: random.Random) -> tuple[Any, int, int]:
    """One array's entry, and where its bytes begin and end."""
    spans, at = [], 0
    for entry in header["arrays"]:
        size = {"<f4": 4, "<f8": 8, "|u1": 1, "<i4": 4, "<i8": 8}[entry[1]]
        for side in entry[2]:
            size *= side
        spans.append((entry, at, at + size))
        at += size
    return rng.choice(spans)


def _numbers(data: bytes, rng: random.Random) -> bytes:
    bodies, at, header, raw = _opened(data, rng)
    if not header["arrays"]:
        return _json(data, rng)
    (_, dtype, _), start, end = _array(header, rng)
    size = int(dtype[-1])
    count = (end - start) // size
    if not count:
        return _json(data, rng)
    planes = bytearray(raw)
    for _ in range(rng.choice([1, 1, 3, 50])):
        i = rng.randrange(count)
        values = [b"\0" * size, b"\xff" * size, b"\x7f" * size, rng.randbytes(size)]
        values += [b"\x01" + b"\0" * (size - 1), b"\0" * (size - 1) + b"\x80"]
        if "f" in dtype:
            code = dtype.replace("f4", "f").replace("f8", "d")
            values += [struct.pack(code, x) for x in (float("nan"), float("inf"), -1.0, 1e30)]
        value = rng.choice(values)
        for byte in range(size):
            planes[start + byte * count + i] = value[byte]
    return _closed(bodies, at, header, bytes(planes))


def _shape(data: bytes, rng: random.Random) -> bytes:
    bodies, at, header, raw = _opened(data, rng)
    if not header["arrays"]:
        return _json(data, rng)
    entry, _, _ = _array(header, rng)
    what = rng.randrange(5)
    if what == 0:
        rng.shuffle(entry[2])
    elif what == 1:
        entry[2] = [*entry[2], 1]
    elif what == 2:
        entry[2] = rng.choice([[0], [0, 2**40], [2**40, 0], [], [1], [2**62, 4], [-1, -1], [0] * 40])
    elif what == 3:
        entry[1] = rng.choice(["<f4", "<f8", "|u1", "<i4", "<i8", "|O", "<U9"])
    else:
        header["arrays"].append(list(entry))
        raw += raw
    return _closed(bodies, at, header, raw)


def show(found: Any, drawn: bool) -> None:
    """Ask everything of it that a reader would."""
    import accumviz as av

    repr(found)
    found.windows()
    found.provenance()
    found.to_html()
    av.play(found).to_html()
    if drawn:
        av.timeline(found).to_html()


def run(paths: list[str], start: int, count: int, drawn_every: int) -> Counter[str]:
    """Open mutants of these files in turn; anything but the documented error is printed and counted."""
    import accumviz as av
    from accumviz.ledger.container import LedgerFileError

    ends: Counter[str] = Counter()
    whole = [Path(path).read_bytes() for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ledger"
        for seed in range(start, start + count):
            path.write_bytes(mutant(whole[seed % len(whole)], seed))
            try:
                found = av.load(path)
            except LedgerFileError:
                ends["refused"] += 1
                continue
            except BaseException:
                ends["RAISED"] += 1
                print(f"seed {seed} of {paths[seed % len(paths)]}: {traceback.format_exc()}")
                continue
            ends["opened"] += 1
            try:
                show(found, drawn=ends["opened"] % drawn_every == 0)
            except BaseException:
                ends["SHOWN BADLY"] += 1
                print(f"seed {seed} of {paths[seed % len(paths)]}: {traceback.format_exc()}")
    return ends


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    start, count, drawn_every, *paths = sys.argv[1:]
    print(dict(run(paths, int(start), int(count), int(drawn_every))))


if __name__ == "__main__":
    main()
