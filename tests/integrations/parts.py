"""What test_parts.py runs on two ranks: parts of fused projections, sharded and replicated, against one process."""

import sys
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

from maxgain import MaxGain

INF = float("inf")
TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2():
    """Transformers' Conv1D, whose weight has its outputs in the second dimension; it is sharded along the first."""
    model = GPT2LMHeadModel(GPT2Config(**TOKENS, **QUIET, n_positions=16, n_embd=24, n_layer=2, n_head=2))
    return model, model.transformer.h, {"*.c_attn": ("q", "k", "v")}, {"*[q]": 0.3, "*[k]": 0.3, "*": INF}


def phi3():
    """Twice as many queries as keys and values, and a gate beside the up projection."""
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "max_position_embeddings": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = Phi3ForCausalLM(Phi3Config(**TOKENS, **sizes, **heads))
    parts = {"*.qkv_proj": ("q0", "q1", "k", "v"), "*.gate_up_proj": ("gate", "up")}
    return model, model.model.layers, parts, {"*[q?]": 0.3, "*[gate]": 0.3, "*": INF}


def trained(make, how, rank):
    torch.manual_seed(0)
    model, blocks, parts, gamma = make()
    forward = model
    if "fsdp" in how:
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    if "ddp" in how:
        forward = nn.parallel.DistributedDataParallel(model)
    if "compiled" in how:
        forward = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    alone = how in ("", "compiled")
    constraint = MaxGain(model, gamma, parts=parts, process_group=False if alone else None).attach(optimizer)
    least = dict.fromkeys(constraint.gains, 1.0)
    for step in range(4):
        batch = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(step))
        batch = batch if alone else batch[2 * rank : 2 * rank + 2]
        forward(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        least = {name: min(scale, least[name]) for name, scale in constraint.scales.items()}
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return {"weights": weights, "gains": constraint.gains, "least": least}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    ways = ("", "compiled", "ddp", "fsdp", "fsdp compiled")
    found = {(make.__name__, how): trained(make, how, rank) for make in (gpt2, phi3) for how in ways}
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
