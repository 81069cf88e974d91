"""A process of a training: where it runs, what it writes, and what it keeps for another to go on from."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.train_pair.model import Llama

SHARD = 14_000_000  # bytes of a checkpoint file


class Run:
    """Where this process runs and where it writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if cuda else torch.float32
        if cuda:
            torch.cuda.set_device(local)
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None)
        args.out.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()

    def log(self, **row: object) -> None:
        if self.rank == 0:
            row = {"t": round(time.monotonic() - self.began, 1), **row}
            with open(self.args.out / "log.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    def save(self, name: str, model: Llama, spent: float) -> None:
        """Weights as bf16 safetensors in shards of at most ``SHARD`` bytes, and the clock."""
        if self.rank:
            return
        shards: list[dict[str, Tensor]] = [{}]
        size = 0
        for key, value in model.state_dict().items():
            value = value.detach().to("cpu", torch.bfloat16).contiguous()
            if size + value.nbytes > SHARD:
                shards.append({})
                size = 0
            shards[-1][key] = value
            size += value.nbytes
        for i, shard in enumerate(shards):
            save_file(shard, self.args.out / f"{name}-{i}.safetensors", metadata={"format": "pt"})
        state = {"seconds": spent, "shape": model.shape.to_dict()}
        (self.args.out / f"{name}.json").write_text(json.dumps(state))

    def load(self, name: str, model: Llama) -> float:
        """Restores ``name`` if it was saved; the seconds already spent on it."""
        state = self.args.out / f"{name}.json"
        if not (self.args.resume and state.exists()):
            return 0.0
        for file in sorted(self.args.out.glob(f"{name}-*.safetensors")):
            model.load_state_dict({k: v.float() for k, v in load_file(file).items()}, strict=False)
        return float(json.loads(state.read_text())["seconds"])


def same_everywhere(model: Llama) -> None:
    if dist.is_initialized():
        for p in model.parameters():
            dist.broadcast(p.data, 0)


def fastest_backend(run: Run, model: Llama, length: int, rows: int) -> SDPBackend:
    """The quicker of cuDNN's and flash attention at this length, forward and backward."""
    if run.device.type == "cpu":
        return SDPBackend.MATH
    shape = (rows, length, model.shape.heads, model.shape.head_dim)
    times: dict[SDPBackend, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            for repeat in range(3):
                q, k, v = (
                    torch.randn(shape, device=run.device, dtype=run.dtype).transpose(1, 2).requires_grad_()
                    for _ in range(3)
                )
                torch.cuda.synchronize()
                start = time.monotonic()
                with sdpa_kernel(backend):
                    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                o.backward(torch.ones_like(o))
                torch.cuda.synchronize()
                if repeat:
                    times[backend] = min(times.get(backend, 9e9), time.monotonic() - start)
        except RuntimeError as error:
            times.pop(backend, None)
            run.log(backend=str(backend), failed=str(error)[:200])
    run.log(length=length, attention_ms={b.name: round(1e3 * t, 2) for b, t in times.items()})
    return min(times, key=times.__getitem__)
