"""What adding up a tensor over ranks takes with gloo, in processes on this machine: the table in docs/scaling.md.

``python benchmarks/exchange.py FILE`` writes medians and quartiles of 20 in milliseconds, for each number of ranks and
of bytes, with the machine and its load.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = (2, 4)
BYTES = (144, 8_000, 400_000, 4_000_000, 16_000_000)
WARM_UPS, TIMES = 3, 20


def on_a_rank(rank: int, ranks: int, folder: str) -> None:
    """Times every size; the first rank writes."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {}
    for size in BYTES:
        tensor = torch.zeros(size // 4)
        for turn in range(WARM_UPS + TIMES):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if turn >= WARM_UPS:
                taken.setdefault(str(size), []).append(1000 * (time.perf_counter() - begin))
    if rank == 0:
        Path(folder, "taken.json").write_text(json.dumps(taken), encoding="utf-8")
    dist.destroy_process_group()


def measured(ranks: int) -> dict[str, dict[str, float]]:
    """Quartiles by size."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_a_rank, args=(ranks, folder), nprocs=ranks)
        taken = json.loads(Path(folder, "taken.json").read_text(encoding="utf-8"))
    named = ("lower", "median", "upper")
    return {
        size: dict(zip(named, (round(t, 3) for t in statistics.quantiles(times, n=4)), strict=True))
        for size, times in taken.items()
    }


if __name__ == "__main__":
    found = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "milliseconds": {str(ranks): measured(ranks) for ranks in RANKS},
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
