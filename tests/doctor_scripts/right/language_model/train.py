"""Language model on random windows of one long sequence. Runs alone (python train.py) or under torchrun."""

import contextlib
import math
import os

import torch
from model import Config, Decoder
from torch.distributed import all_reduce, destroy_process_group, get_world_size, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, gradient_accumulation_steps = 4, 4
max_iters, eval_interval, eval_iters = 6, 3, 2
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 2, 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{ddp_local_rank}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % get_world_size() == 0
    gradient_accumulation_steps //= get_world_size()
else:
    device, master_process, seed_offset = "cpu", True, 0

torch.manual_seed(1337 + seed_offset)
config = Config()
text = torch.randint(config.vocabulary, (4000,), generator=torch.Generator().manual_seed(7))


def get_batch():
    starts = torch.randint(len(text) - config.context - 1, (batch_size,))
    x = torch.stack([text[i : i + config.context] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + config.context] for i in starts])
    return x.to(device), y.to(device)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters, device=device)
    for k in range(eval_iters):
        x, y = get_batch()
        losses[k] = raw_model(x, y)[1]
    model.train()
    mean = losses.mean()
    if ddp:
        all_reduce(mean)
        mean /= get_world_size()
    return mean.item()


model = Decoder(config).to(device)
optimizer = model.make_optimizer(learning_rate, 0.1)
raw_model = model
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank] if "cuda" in device else None)
    raw_model = model.module

best_val_loss = 1e9
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        if master_process:
            print(f"step {iter_num}: val loss {val_loss:.4f}")
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                }
                torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        x, y = get_batch()
        with model.no_sync() if ddp and not last else contextlib.nullcontext():
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if ddp:
    destroy_process_group()
