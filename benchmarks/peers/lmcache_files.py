"""Files written by LMCache's own code, and the prompts read from them with `keyhole recover`.

Writing the files needs LMCache 0.5.6, but no GPU:

    pip install --no-deps --target PEER lmcache==0.5.6 msgspec pyzmq nvtx numba llvmlite
    blake3 \\
        py-cpuinfo cachetools aiofile caio
    python benchmarks/peers/lmcache_files.py --packages PEER --model SMOLLM2.gguf --data
    DATA

The caches are SmolLM2's, computed in float32 and stored in `--precisions`; each text
has `--tokens` tokens of DREAM's dialogues, by default one chunk of LMCache. `--parts`
selects:

    disk       files of its LocalDiskBackend
    fs         files of its FSConnector, which writes sizes in front
    server     files of its multiprocess server (FSL2Adapter)
    later      the same, of each text's second chunk
    fp8        the same as `server`, quantised by its serde
    encrypted  the same, encrypted by AES-GCM with keys from a master key and the tenant's salt:
               counts the files that are reported as encrypted, and not read
    names      names of encrypted files, which are LMCache's hash of the tokens without a key: finds
               `--texts` prompts among a hundred times as many by name, and four unknown
               digits at the end of a known prompt
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))

import show
import subjects
from keyhole import recover
from keyhole.models import Loaded, anatomy
from show import Row

PEER = "lmcache 0.5.6"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PARTS = ["disk", "fs", "server", "later", "fp8", "encrypted", "names"]
MASTER = b"a master key of thirty-two bytes"


def run(
    quick: bool,
    packages: Path | None = None,
    data: Path = subjects.DATA,
    model: Path | None = None,
    parts: list[str] = PARTS,
    precisions: list[str] = list(DTYPES),  # noqa: B006 - read, never changed
    texts: int = 10,
    tokens: int = 256,
) -> Iterator[Row]:
    if packages is None:
        raise SystemExit(f"install {PEER} into a folder, and give that as --packages")
    sys.path.append(str(packages))
    loaded = subjects.smollm2(model, "cpu")
    words = torch.cat(subjects.encoded(loaded, subjects.turns(data, "dev"))).tolist()
    count = 1 if quick else texts
    ids = [words[start : start + tokens] for start in range(0, count * tokens, tokens)]
    for part in (part for part in parts if part in WAYS):
        for precision in precisions:
            before = words[-tokens:] if part == "later" else []
            items = [
                read_file(loaded, before, text, part, DTYPES[precision]) for text in ids
            ]
            yield read_row(f"{part}, {precision}", items)
    if "encrypted" in parts:
        yield from encrypted(loaded, ids, precisions)
    if "names" in parts:
        yield from by_name(loaded, words, ids, tokens)


@torch.no_grad()
def chunk(loaded: Loaded, ids: list[int], dtype: torch.dtype) -> Tensor:
    """Return keys and values (2, layers, tokens, heads · numbers) as LMCache stores them."""
    given = torch.tensor([ids])
    kept = anatomy(loaded.model).base(input_ids=given, use_cache=True).past_key_values
    both = [
        torch.stack([getattr(layer, side)[0] for layer in kept.layers])
        for side in ("keys", "values")
    ]
    return torch.stack(both).transpose(2, 3).flatten(3).to(dtype).contiguous()


def memory(numbers: Tensor) -> Any:
    """Return LMCache's own memory object around such an array."""
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import (
        AdHocMemoryAllocator,
    )
    from lmcache.v1.memory_management import MemoryFormat

    made = AdHocMemoryAllocator("cpu").allocate(
        numbers.shape, numbers.dtype, MemoryFormat.KV_2LTD
    )
    made.tensor.copy_(numbers)
    return made


@cache
def hasher(tokens: int) -> Any:
    """Return LMCache's own hasher for chunks of so many tokens."""
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    return TokenHasher(chunk_size=tokens)


def hashed(ids: list[int]) -> bytes:
    """Return LMCache's hash of one chunk."""
    return hasher(len(ids)).compute_chunk_hashes(ids)[0]


def engine(folder: Path, numbers: Tensor, ids: list[int]) -> tuple[Any, Any, Any, Any]:
    """Return the configuration, host backend, metadata and key of an engine."""
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import (
        AdHocMemoryAllocator,
    )
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=len(ids), local_disk=str(folder), max_local_disk_size=1.0
    )
    _, layers, _, width = numbers.shape
    about = LMCacheMetadata(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        1,
        1,
        0,
        0,
        numbers.dtype,
        (layers, 2, len(ids), 1, width),
        chunk_size=len(ids),
    )
    host = LocalCPUBackend(
        config, about, "cpu", memory_allocator=AdHocMemoryAllocator("cpu")
    )
    number = int.from_bytes(hashed(ids)[:8], "big")
    return (
        config,
        host,
        about,
        CacheEngineKey(about.model_name, 1, 0, number, numbers.dtype),
    )


def on_disk(folder: Path, numbers: Tensor, ids: list[int]) -> Path:
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    config, host, about, key = engine(folder, numbers, ids)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    disk = LocalDiskBackend(config, loop, host, "cpu", metadata=about)
    done = threading.Event()
    disk.submit_put_task(
        key, memory(numbers), on_complete_callback=lambda _: done.set()
    )
    if not done.wait(60):
        raise SystemExit("LMCache wrote nothing")
    disk.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    return only_file(folder)


def by_connector(folder: Path, numbers: Tensor, ids: list[int]) -> Path:
    from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

    config, host, _, key = engine(folder, numbers, ids)

    async def put() -> None:
        loop = asyncio.get_running_loop()
        await FSConnector(loop, host, config, base_paths_str=str(folder)).put(
            key, memory(numbers)
        )

    asyncio.run(put())
    return only_file(folder)


def by_server(
    folder: Path, numbers: Tensor, ids: list[int], serde: str = "", salt: str = ""
) -> Path:
    """Write a file with its server's adapter, through a serde and for a tenant if given."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import (
        FSL2Adapter,
        FSL2AdapterConfig,
    )
    from lmcache.v1.distributed.serde import aesgcm, fp8
    from lmcache.v1.distributed.serde.key_provider import HkdfKeyProvider

    key = ObjectKey(
        hashed(ids),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ObjectKey.ComputeKVRank(1, 0, 1, 0),
        cache_salt=salt,
    )
    stored = memory(numbers)
    if serde:
        keys = HkdfKeyProvider(MASTER, 16, aesgcm._HKDF_INFO_PREFIX)
        writer = {
            "fp8": fp8.Fp8QuantizationSerializer,
            "aesgcm": lambda: aesgcm.AesGcmSerializer(keys),
        }[serde]()
        layout = MemoryLayoutDesc([numbers.shape], [numbers.dtype])
        size = writer.estimate_serialized_size(layout)
        framed = memory(torch.zeros(size, dtype=torch.uint8))
        writer.serialize(stored, framed, key)
        stored = framed
    adapter = FSL2Adapter(FSL2AdapterConfig(str(folder)))
    task = adapter.submit_store_task([key], [stored])
    started = time.monotonic()
    while (
        task not in adapter.pop_completed_store_tasks()
        and time.monotonic() < started + 60
    ):
        time.sleep(0.01)
    adapter.close()
    return only_file(folder)


def only_file(folder: Path) -> Path:
    (file,) = (file for file in folder.iterdir() if file.suffix in (".pt", ".data"))
    return file


WAYS: dict[str, Callable[[Path, Tensor, list[int]], Path]] = {
    "disk": on_disk,
    "fs": by_connector,
    "server": by_server,
    "later": by_server,
    "fp8": lambda folder, numbers, ids: by_server(folder, numbers, ids, "fp8"),
}


def read_file(
    loaded: Loaded, before: list[int], ids: list[int], part: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Write the file of tokens that follow others, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = chunk(loaded, [*before, *ids], dtype)[
            :, :, len(before) :
        ].contiguous()
        file = WAYS[part](Path(folder), numbers, ids)
        ((read,), seconds) = show.timed(lambda: recover.run(loaded, str(file)))
        size = file.stat().st_size
    return {
        "tokens": len(ids),
        "bytes": size,
        "exact": list(read.ids) == ids,
        "right": sum(a == b for a, b in zip(read.ids, ids, strict=False)),
        "verified": read.verified,
        "status": str(read.status),
        "seconds": round(seconds, 2),
    }


def read_row(what: str, items: list[dict[str, Any]]) -> Row:
    right = sum(item["right"] for item in items)
    tokens = sum(item["tokens"] for item in items)
    seconds = sum(item["seconds"] for item in items) / len(items)
    details = f"{right} of {tokens} tokens right; {seconds:.1f} s per file"
    return subjects.verified(what, items, details)


def encrypted(
    loaded: Loaded, ids: list[list[int]], precisions: list[str]
) -> Iterator[Row]:
    """Read encrypted files of two tenants, which must be reported as encrypted."""
    for precision in precisions:
        items: list[dict[str, Any]] = []
        for text in ids:
            for salt in ("tenant-a", "tenant-b"):
                with tempfile.TemporaryDirectory() as folder:
                    numbers = chunk(loaded, text, DTYPES[precision])
                    file = by_server(Path(folder), numbers, text, "aesgcm", salt)
                    (read,) = recover.run(loaded, str(file))
                    items.append(
                        {
                            "salt": salt,
                            "status": str(read.status),
                            "reason": read.reason,
                            "tokens": len(read.ids),
                            "named": salt in file.name,
                        }
                    )
        reported = sum(
            item["status"] == "not applicable" and "encrypted" in item["reason"]
            for item in items
        )
        read_any = sum(item["tokens"] > 0 for item in items)
        yield Row(
            f"AES-GCM, {precision}, two tenants",
            f"{reported} of {len(items)} reported as encrypted, {read_any} read",
            "all, 0 read",
            reported == len(items) and not read_any,
            f"{sum(item['named'] for item in items)} names have the tenant's salt; "
            f"{items[0]['reason']}",
            items=items,
        )


def by_name(
    loaded: Loaded, words: list[int], ids: list[list[int]], tokens: int
) -> Iterator[Row]:
    """Find the prompt of an encrypted file from its name."""
    count = len(ids)
    starts = range(0, min(len(words) - tokens, 100 * count * 40), 40)
    others = [words[start : start + tokens] for start in starts][: 100 * count]
    candidates = {hashed(text).hex(): text for text in [*ids, *others]}
    found: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(ids):
            place = Path(folder) / str(number)
            place.mkdir()
            file = by_server(
                place, torch.randn(2, 1, 1, 8), text, "aesgcm", f"tenant-{number}"
            )
            found.append(candidates.get(file.name.split("@")[3]) == text)
    yield Row(
        f"which of {len(candidates)} prompts an encrypted file is of, by its name",
        f"{sum(found)} of {count}",
        "all",
        all(found),
        "blake3 of the tokens, no key or salt in it",
        items=[{"found": each} for each in found],
    )
    draw = random.Random(0)
    secrets = list[dict[str, Any]]()
    for text in ids:
        pin = f"{draw.randrange(10_000):04d}"
        known = text[: tokens - 4]
        wanted = hashed(known + digits(loaded, pin))
        started = time.perf_counter()
        tried = 0
        guess = ""
        for number in range(10_000):
            tried = tried + 1
            guess = f"{number:04d}"
            if hashed(known + digits(loaded, guess)) == wanted:
                break
        secrets.append(
            {
                "found": guess == pin,
                "tried": tried,
                "seconds": time.perf_counter() - started,
            }
        )
    right = sum(item["found"] for item in secrets)
    seconds = sum(item["seconds"] for item in secrets) / count
    yield Row(
        "four digits after a known prompt, by the name of the encrypted file",
        f"{right} of {count}",
        "all",
        right == count,
        f"{seconds:.2f} s each",
        items=secrets,
    )


def digits(loaded: Loaded, number: str) -> list[int]:
    """Return the token of each digit, as SmolLM2 has them."""
    return [loaded.tokenizer.convert_tokens_to_ids(digit) for digit in number]


if __name__ == "__main__":
    show.main(run)
