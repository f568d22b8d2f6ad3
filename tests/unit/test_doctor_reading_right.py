# ruff: noqa: E501 - scripts as people write them
"""The static pass is silent on right scripts, whole ones in the style of those that people publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.reading import read

IMAGES = """
import argparse, os, random, shutil, time, warnings
from enum import Enum

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
import torch.utils.data.distributed
import torchvision.datasets as datasets
import torchvision.models as models
import torchvision.transforms as transforms
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Subset

parser = argparse.ArgumentParser(description="classification")
parser.add_argument("data", nargs="?", default="imagenet")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--print-freq", default=10, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("-e", "--evaluate", dest="evaluate", action="store_true")
parser.add_argument("--pretrained", action="store_true")
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="tcp://224.66.41.62:23456", type=str)
parser.add_argument("--dist-backend", default="nccl", type=str)
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")
best_acc1 = 0


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
    if args.gpu is not None:
        warnings.warn("one GPU only")
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    ngpus_per_node = torch.cuda.device_count() if torch.cuda.is_available() else 1
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(args.gpu, ngpus_per_node, args)


def main_worker(gpu, ngpus_per_node, args):
    global best_acc1
    args.gpu = gpu
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    if args.pretrained:
        model = models.__dict__[args.arch](pretrained=True)
    else:
        model = models.__dict__[args.arch]()
    if not torch.cuda.is_available():
        pass
    elif args.distributed:
        if args.gpu is not None:
            torch.cuda.set_device(args.gpu)
            model.cuda(args.gpu)
            args.batch_size = int(args.batch_size / ngpus_per_node)
            args.workers = int((args.workers + ngpus_per_node - 1) / ngpus_per_node)
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        else:
            model.cuda()
            model = torch.nn.parallel.DistributedDataParallel(model)
    elif args.gpu is not None:
        torch.cuda.set_device(args.gpu)
        model = model.cuda(args.gpu)
    else:
        model = torch.nn.DataParallel(model).cuda()
    device = torch.device("cuda:{}".format(args.gpu)) if torch.cuda.is_available() and args.gpu else torch.device("cpu")
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    if args.resume:
        if os.path.isfile(args.resume):
            loc = f"cuda:{args.gpu}"
            checkpoint = torch.load(args.resume, map_location=loc)
            args.start_epoch = checkpoint["epoch"]
            best_acc1 = checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
    traindir = os.path.join(args.data, "train")
    train_dataset = datasets.ImageFolder(traindir, transforms.Compose([transforms.ToTensor()]))
    val_dataset = datasets.ImageFolder(os.path.join(args.data, "val"), transforms.ToTensor())
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    else:
        train_sampler = None
        val_sampler = None
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=args.workers, pin_memory=True, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers, sampler=val_sampler)
    if args.evaluate:
        validate(val_loader, model, criterion, args)
        return
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if not args.multiprocessing_distributed or (
            args.multiprocessing_distributed and args.rank % ngpus_per_node == 0
        ):
            save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1,
                             "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, is_best)


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end = time.time()
        if i % args.print_freq == 0 and args.rank % 8 == 0:
            print(epoch, i, str(losses), str(top1), end)


def validate(val_loader, model, criterion, args):
    def run_validate(loader, base_progress=0):
        with torch.no_grad():
            for i, (images, target) in enumerate(loader):
                i = base_progress + i
                if torch.cuda.is_available():
                    images, target = images.cuda(args.gpu), target.cuda(args.gpu)
                output = model(images)
                loss = criterion(output, target)
                acc1, acc5 = accuracy(output, target, topk=(1, 5))
                losses.update(loss.item(), images.size(0))
                top1.update(acc1[0], images.size(0))

    losses = AverageMeter("Loss", ":.4e", Summary.NONE)
    top1 = AverageMeter("Acc@1", ":6.2f", Summary.AVERAGE)
    model.eval()
    run_validate(val_loader)
    if args.distributed:
        top1.all_reduce()
    if args.distributed and (len(val_loader.sampler) * args.world_size < len(val_loader.dataset)):
        aux_val_dataset = Subset(val_loader.dataset, range(len(val_loader.sampler) * args.world_size, len(val_loader.dataset)))
        aux_val_loader = torch.utils.data.DataLoader(aux_val_dataset, batch_size=args.batch_size, shuffle=False)
        run_validate(aux_val_loader, len(val_loader))
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter(object):
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=device)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred))
        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res


if __name__ == "__main__":
    main()
"""

LANGUAGE = """
import math, os, pickle, time
from contextlib import nullcontext
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group
from model import GPT, GPTConfig

out_dir = "out"
eval_interval = 2000
log_interval = 1
eval_iters = 200
always_save_checkpoint = True
init_from = "scratch"
wandb_log = False
dataset = "openwebtext"
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024
dropout = 0.0
learning_rate = 6e-4
max_iters = 600000
grad_clip = 1.0
warmup_iters = 2000
lr_decay_iters = 600000
min_lr = 6e-5
backend = "nccl"
device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
compile = True
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    ddp_world_size = 1
tokens_per_iter = gradient_accumulation_steps * ddp_world_size * batch_size * block_size
print(f"tokens per iteration will be: {tokens_per_iter:,}")
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
data_dir = os.path.join("data", dataset)


def get_batch(split):
    if split == "train":
        data = np.memmap(os.path.join(data_dir, "train.bin"), dtype=np.uint16, mode="r")
    else:
        data = np.memmap(os.path.join(data_dir, "val.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i:i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1:i + 1 + block_size]).astype(np.int64)) for i in ix])
    if device_type == "cuda":
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    else:
        x, y = x.to(device), y.to(device)
    return x, y


iter_num = 0
best_val_loss = 1e9
model_args = dict(n_layer=12, n_head=12, n_embd=768, block_size=block_size, bias=False, vocab_size=None, dropout=dropout)
if init_from == "scratch":
    model_args["vocab_size"] = 50304
    model = GPT(GPTConfig(**model_args))
elif init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    state_dict = checkpoint["model"]
    for k, v in list(state_dict.items()):
        if k.startswith("_orig_mod."):
            state_dict[k[len("_orig_mod."):]] = state_dict.pop(k)
    model.load_state_dict(state_dict)
    iter_num = checkpoint["iter_num"]
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(0.1, learning_rate, (0.9, 0.95), device_type)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
if compile:
    unoptimized_model = model
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                logits, loss = raw_model(X, Y)
            losses[k] = loss.item()
        mean = losses.mean().to(device)
        if ddp:
            torch.distributed.all_reduce(mean)
            mean /= ddp_world_size
        out[split] = mean
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (lr_decay_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


if wandb_log and master_process:
    import wandb
    wandb.init(project="owt", config=config)
X, Y = get_batch("train")
t0 = time.time()
local_iter_num = 0
raw_model = model.module if ddp else model
running_mfu = -1.0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if master_process:
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0 and master_process:
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(),
                              "model_args": model_args, "iter_num": iter_num, "config": config}
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = (micro_step == gradient_accumulation_steps - 1)
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt*1000:.2f}ms")
    iter_num += 1
    local_iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
"""

LANGUAGE_MODEL = """
import inspect, math
from dataclasses import dataclass
import torch
import torch.nn as nn
from torch.nn import functional as F


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.flash = hasattr(torch.nn.functional, "scaled_dot_product_attention")
        if not self.flash:
            self.register_buffer("mask", torch.tril(torch.ones(config.block_size, config.block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.vocab_size is not None
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
        print("number of parameters: %.2fM" % (self.get_num_params() / 1e6,))

    def get_num_params(self):
        return sum(p.numel() for p in self.parameters())

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        params = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay = [p for n, p in params.items() if p.dim() >= 2]
        nodecay = [p for n, p in params.items() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and device_type == "cuda"
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **(dict(fused=True) if fused else dict()))
"""

REFERENCE = """
import datetime, os, time, warnings
import torch
import torch.utils.data
import torchvision
import utils
from torch import nn


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None):
    model.train()
    metric_logger = utils.MetricLogger(delimiter="  ")
    header = f"Epoch: [{epoch}]"
    for i, (image, target) in enumerate(metric_logger.log_every(data_loader, args.print_freq, header)):
        image, target = image.to(device), target.to(device)
        with torch.cuda.amp.autocast(enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])


def evaluate(model, criterion, data_loader, device, print_freq=100, log_suffix=""):
    model.eval()
    metric_logger = utils.MetricLogger(delimiter="  ")
    num_processed_samples = 0
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, print_freq, "Test:"):
            image = image.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(image)
            loss = criterion(output, target)
            metric_logger.update(loss=loss.item())
            num_processed_samples += image.shape[0]
    num_processed_samples = utils.reduce_across_processes(num_processed_samples)
    if hasattr(data_loader.dataset, "__len__") and len(data_loader.dataset) != num_processed_samples and torch.distributed.get_rank() == 0:
        warnings.warn(f"dataset has {len(data_loader.dataset)} samples, but {num_processed_samples} were used")
    metric_logger.synchronize_between_processes()
    print(f"{metric_logger.loss.global_avg:.3f}")
    return metric_logger.loss.global_avg


def load_data(traindir, valdir, args):
    dataset = torchvision.datasets.ImageFolder(traindir)
    dataset_test = torchvision.datasets.ImageFolder(valdir)
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
        test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False)
    else:
        train_sampler = torch.utils.data.RandomSampler(dataset)
        test_sampler = torch.utils.data.SequentialSampler(dataset_test)
    return dataset, dataset_test, train_sampler, test_sampler


def main(args):
    if args.output_dir:
        utils.mkdir(args.output_dir)
    utils.init_distributed_mode(args)
    print(args)
    device = torch.device(args.device)
    dataset, dataset_test, train_sampler, test_sampler = load_data("train", "val", args)
    data_loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers)
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size, sampler=test_sampler)
    model = torchvision.models.get_model(args.model, weights=None, num_classes=10)
    model.to(device)
    if args.distributed and args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9)
    scaler = torch.cuda.amp.GradScaler() if args.amp else None
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module
    model_ema = None
    if args.model_ema:
        model_ema = utils.ExponentialMovingAverage(model_without_ddp, device=device, decay=0.99)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        args.start_epoch = checkpoint["epoch"] + 1
        if scaler:
            scaler.load_state_dict(checkpoint["scaler"])
    if args.test_only:
        evaluate(model, criterion, data_loader_test, device=device)
        return
    start_time = time.time()
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, device=device)
        if args.output_dir:
            checkpoint = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            if model_ema:
                checkpoint["model_ema"] = model_ema.state_dict()
            if scaler:
                checkpoint["scaler"] = scaler.state_dict()
            utils.save_on_master(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
            utils.save_on_master(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    total_time = time.time() - start_time
    print(f"Training time {datetime.timedelta(seconds=int(total_time))}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def get_args_parser(add_help=True):
    import argparse
    parser = argparse.ArgumentParser(description="training", add_help=add_help)
    parser.add_argument("--model", default="resnet18", type=str)
    parser.add_argument("--device", default="cuda", type=str)
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("-j", "--workers", default=16, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--output-dir", default=".", type=str)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--test-only", action="store_true")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--model-ema", action="store_true")
    parser.add_argument("--model-ema-steps", type=int, default=32)
    parser.add_argument("--lr-warmup-epochs", default=0, type=int)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--world-size", default=1, type=int)
    parser.add_argument("--dist-url", default="env://", type=str)
    return parser


if __name__ == "__main__":
    args = get_args_parser().parse_args()
    main(args)
"""

REFERENCE_UTILS = """
import datetime, errno, os, time
from collections import defaultdict, deque
import torch
import torch.distributed as dist


class SmoothedValue:
    def __init__(self, window_size=20, fmt=None):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0
        self.fmt = fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        t = reduce_across_processes([self.count, self.total])
        t = t.tolist()
        self.count = int(t[0])
        self.total = t[1]

    @property
    def median(self):
        d = torch.tensor(list(self.deque))
        return d.median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg)


class MetricLogger:
    def __init__(self, delimiter="\\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            self.meters[k].update(v)

    def __getattr__(self, attr):
        if attr in self.meters:
            return self.meters[attr]
        return self.__dict__[attr]

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def log_every(self, iterable, print_freq, header=None):
        i = 0
        start_time = time.time()
        for obj in iterable:
            yield obj
            if i % print_freq == 0:
                print(header, i, len(iterable), str(self))
            i += 1
        print(f"{header} Total time: {time.time() - start_time}")


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


def mkdir(path):
    try:
        os.makedirs(path)
    except OSError as e:
        if e.errno != errno.EEXIST:
            raise


def setup_for_distributed(is_master):
    import builtins as __builtin__
    builtin_print = __builtin__.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print(*args, **kwargs)

    __builtin__.print = print


def is_dist_avail_and_initialized():
    if not dist.is_available():
        return False
    if not dist.is_initialized():
        return False
    return True


def get_world_size():
    if not is_dist_avail_and_initialized():
        return 1
    return dist.get_world_size()


def get_rank():
    if not is_dist_avail_and_initialized():
        return 0
    return dist.get_rank()


def is_main_process():
    return get_rank() == 0


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    elif "SLURM_PROCID" in os.environ:
        args.rank = int(os.environ["SLURM_PROCID"])
        args.gpu = args.rank % torch.cuda.device_count()
    elif hasattr(args, "rank"):
        pass
    else:
        print("Not using distributed mode")
        args.distributed = False
        return
    args.distributed = True
    torch.cuda.set_device(args.gpu)
    args.dist_backend = "nccl"
    print(f"| distributed init (rank {args.rank}): {args.dist_url}", flush=True)
    torch.distributed.init_process_group(
        backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    torch.distributed.barrier()
    setup_for_distributed(args.rank == 0)


def reduce_across_processes(val):
    if not is_dist_avail_and_initialized():
        return torch.tensor(val)
    t = torch.tensor(val, device="cuda")
    dist.barrier()
    dist.all_reduce(t)
    return t
"""

TRAINER = """
import io, os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional
import fsspec
import hydra
import torch
from omegaconf import DictConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler
from torch.nn import functional as F


@dataclass
class TrainerConfig:
    max_epochs: int = None
    batch_size: int = None
    data_loader_workers: int = None
    grad_norm_clip: float = None
    snapshot_path: Optional[str] = None
    save_every: int = None
    use_amp: bool = None


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: Dict[str, Any]
    finished_epoch: int


class CharDataset(Dataset):
    def __init__(self, cfg):
        data = fsspec.open(cfg.path).open().read().decode("utf-8")
        data = data[: int(len(data) * cfg.truncate)]
        chars = sorted(list(set(data)))
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.block_size = cfg.block_size
        self.vocab_size = len(chars)
        self.data = data

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        dix = [self.stoi[s] for s in self.data[idx:idx + self.block_size + 1]]
        return torch.tensor(dix[:-1]), torch.tensor(dix[1:])


class Mixer(torch.nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.out = torch.nn.Linear(width, vocab)

    def forward(self, x, targets=None):
        logits = self.out(self.embed(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset=None):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_dataset = train_dataset
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset) if test_dataset else None
        self.epochs_run = 0
        self.model = model.to(self.local_rank)
        self.optimizer = optimizer
        self.save_every = self.config.save_every
        if self.config.use_amp:
            self.scaler = torch.amp.GradScaler("cuda")
        if self.config.snapshot_path is None:
            self.config.snapshot_path = "snapshot.pt"
        self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch_size, pin_memory=True, shuffle=False,
                          num_workers=self.config.data_loader_workers, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        try:
            snapshot = fsspec.open(self.config.snapshot_path)
            with snapshot as f:
                snapshot_data = torch.load(f, map_location="cpu")
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        snapshot = Snapshot(**snapshot_data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.amp.autocast(device_type="cuda", enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.use_amp:
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, dataloader, train=True):
        dataloader.sampler.set_epoch(epoch)
        for iter, (source, targets) in enumerate(dataloader):
            step_type = "Train" if train else "Eval"
            source = source.to(self.local_rank)
            targets = targets.to(self.local_rank)
            batch_loss = self._run_batch(source, targets, train)
            if iter % 100 == 0:
                print(f"[RANK{self.global_rank}] Epoch {epoch} | Iter {iter} | {step_type} Loss {batch_loss:.5f}")

    def _save_snapshot(self, epoch):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        snapshot = Snapshot(model_state=raw_model.state_dict(), optimizer_state=self.optimizer.state_dict(), finished_epoch=epoch)
        snapshot = asdict(snapshot)
        torch.save(snapshot, self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            epoch += 1
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and self.global_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
            if self.test_loader:
                self._run_epoch(epoch, self.test_loader, train=False)


def ddp_setup():
    init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def get_train_objs(cfg):
    torch.manual_seed(1)
    dataset = CharDataset(cfg.data)
    train_len = int(len(dataset) * cfg.split)
    train_set, test_set = random_split(dataset, [train_len, len(dataset) - train_len])
    model = Mixer(dataset.vocab_size, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    return model, optimizer, train_set, test_set


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg: DictConfig):
    ddp_setup()
    model, optimizer, train_data, test_data = get_train_objs(cfg)
    trainer = Trainer(TrainerConfig(**cfg["trainer_config"]), model, optimizer, train_data, test_data)
    trainer.train()
    destroy_process_group()


if __name__ == "__main__":
    main()
"""

DETECTOR = """
import argparse, math, os, sys, time, logging
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, distributed
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

LOCAL_RANK = int(os.getenv("LOCAL_RANK", -1))
RANK = int(os.getenv("RANK", -1))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", 1))
LOGGER = logging.getLogger("train")
LOGGER.setLevel(logging.INFO if RANK in (-1, 0) else logging.WARNING)


@contextmanager
def rank_zero_first(local_rank):
    if local_rank not in [-1, 0]:
        dist.barrier(device_ids=[local_rank])
    yield
    if local_rank == 0:
        dist.barrier(device_ids=[0])


class Boxes(Dataset):
    def __init__(self, path, cache=False):
        self.files = sorted(Path(path).rglob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.zeros(3, 640, 640), torch.zeros(10, 6)


class Conv(nn.Module):
    def __init__(self, c1, c2, k=1, s=1, act=True):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, bias=False)
        self.norm = nn.GroupNorm(1, c2)
        self.act = nn.SiLU() if act is True else nn.Identity()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Detector(nn.Module):
    def __init__(self, nc=80):
        super().__init__()
        self.model = nn.Sequential(*[Conv(3, 16, 3, 2), Conv(16, 32, 3, 2)])
        self.save = []
        self.head = nn.ModuleList(nn.Conv2d(x, nc, 1) for x in (16, 32))

    def forward(self, x):
        y = []
        for m in self.model:
            x = m(x)
            y.append(x)
        for i in range(2):
            y[i] = self.head[i](y[i])
        return y if self.training else torch.cat([v.flatten(2) for v in y], 2)


class ComputeLoss:
    def __init__(self, model):
        self.bce = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0]))
        self.device = next(model.parameters()).device

    def __call__(self, p, targets):
        lcls = torch.zeros(1, device=self.device)
        for i, pi in enumerate(p):
            n = targets.shape[0]
            if n:
                lcls += self.bce(pi, torch.zeros_like(pi))
        bs = p[0].shape[0]
        return lcls * bs, lcls.detach()


class ModelEMA:
    def __init__(self, model, decay=0.9999):
        self.ema = deepcopy(de_parallel(model)).eval()
        self.updates = 0
        self.decay = lambda x: decay * (1 - math.exp(-x / 2000))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        msd = de_parallel(model).state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class EarlyStopping:
    def __init__(self, patience=30):
        self.best_fitness = 0.0
        self.best_epoch = 0
        self.patience = patience or float("inf")

    def __call__(self, epoch, fitness):
        if fitness >= self.best_fitness:
            self.best_epoch = epoch
            self.best_fitness = fitness
        delta = epoch - self.best_epoch
        return delta >= self.patience


def de_parallel(model):
    return model.module if type(model) in (nn.DataParallel, DDP) else model


def init_seeds(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)


def create_dataloader(path, batch_size, rank=-1, workers=8, shuffle=False):
    with rank_zero_first(rank):
        dataset = Boxes(path, cache=True)
    batch_size = min(batch_size, len(dataset))
    nd = torch.cuda.device_count()
    nw = min([os.cpu_count() // max(nd, 1), batch_size if batch_size > 1 else 0, workers])
    sampler = None if rank == -1 else distributed.DistributedSampler(dataset, shuffle=shuffle)
    generator = torch.Generator()
    generator.manual_seed(6148914691236517205 + RANK)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle and sampler is None, num_workers=nw,
                      sampler=sampler, worker_init_fn=seed_worker, generator=generator), dataset


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    seen, hits = 0, 0.0
    for im, targets in tqdm(loader):
        out = model(im.to(device))
        hits += (out.sigmoid() > 0.5).sum().item()
        seen += im.shape[0]
    return hits / max(seen, 1)


def train(opt, device):
    save_dir = Path(opt.save_dir)
    last, best = save_dir / "last.pt", save_dir / "best.pt"
    if RANK in {-1, 0}:
        save_dir.mkdir(parents=True, exist_ok=True)
        tb = SummaryWriter(str(save_dir))
    init_seeds(opt.seed + 1 + RANK)
    cuda = device.type != "cpu"
    weights = opt.weights
    pretrained = weights.endswith(".pt")
    if pretrained:
        ckpt = torch.load(weights, map_location="cpu")
        model = Detector(nc=80).to(device)
        model.load_state_dict(ckpt["model"], strict=False)
    else:
        model = Detector(nc=80).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr, momentum=0.9, nesterov=True)
    lf = lambda x: (1 - x / opt.epochs) * 0.99 + 0.01
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)
    ema = ModelEMA(model) if RANK in {-1, 0} else None
    best_fitness, start_epoch = 0.0, 0
    if cuda and RANK == -1 and torch.cuda.device_count() > 1:
        model = torch.nn.DataParallel(model)
    if opt.sync_bn and cuda and RANK != -1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    train_loader, dataset = create_dataloader("train", opt.batch_size // WORLD_SIZE, LOCAL_RANK, shuffle=True)
    if RANK in {-1, 0}:
        val_loader = create_dataloader("val", opt.batch_size // WORLD_SIZE * 2, -1)[0]
    if cuda and RANK != -1:
        model = DDP(model, device_ids=[LOCAL_RANK], output_device=LOCAL_RANK)
    nb = len(train_loader)
    nw = max(round(3 * nb), 100)
    last_opt_step = -1
    accumulate = max(round(64 / opt.batch_size), 1)
    scaler = torch.cuda.amp.GradScaler(enabled=cuda)
    stopper, stop = EarlyStopping(patience=opt.patience), False
    compute_loss = ComputeLoss(model)
    for epoch in range(start_epoch, opt.epochs):
        model.train()
        mloss = torch.zeros(3, device=device)
        if RANK != -1:
            train_loader.sampler.set_epoch(epoch)
        pbar = enumerate(train_loader)
        if RANK in {-1, 0}:
            pbar = tqdm(pbar, total=nb)
        optimizer.zero_grad()
        for i, (imgs, targets) in pbar:
            ni = i + nb * epoch
            imgs = imgs.to(device, non_blocking=True).float() / 255
            if ni <= nw:
                accumulate = max(1, np.interp(ni, [0, nw], [1, 64 / opt.batch_size]).round())
            with torch.cuda.amp.autocast(cuda):
                pred = model(imgs)
                loss, loss_items = compute_loss(pred, targets.to(device))
                if RANK != -1:
                    loss *= WORLD_SIZE if opt.sum_over_ranks else 1
            scaler.scale(loss).backward()
            if ni - last_opt_step >= accumulate:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if ema:
                    ema.update(model)
                last_opt_step = ni
            if RANK in {-1, 0}:
                mloss = (mloss * i + loss_items) / (i + 1)
                pbar.set_description(f"{epoch} {mloss.mean():.4g}")
        scheduler.step()
        if RANK in {-1, 0}:
            results = validate(ema.ema, val_loader, device)
            fi = results
            stop = stopper(epoch=epoch, fitness=fi)
            if fi > best_fitness:
                best_fitness = fi
            tb.add_scalar("fitness", fi, epoch)
            ckpt = {"epoch": epoch, "model": deepcopy(de_parallel(model)).state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(ckpt, last)
            if best_fitness == fi:
                torch.save(ckpt, best)
            del ckpt
        if RANK != -1:
            broadcast_list = [stop if RANK == 0 else None]
            dist.broadcast_object_list(broadcast_list, 0)
            if RANK != 0:
                stop = broadcast_list[0]
        if stop:
            break
    if RANK in {-1, 0}:
        LOGGER.info(f"{epoch - start_epoch + 1} epochs completed.")
    torch.cuda.empty_cache()


def parse_opt():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=str, default="small.pt")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=int, default=100)
    parser.add_argument("--save-dir", default="runs")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--sum-over-ranks", action="store_true")
    return parser.parse_args()


def main(opt):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if LOCAL_RANK != -1:
        assert torch.cuda.device_count() > LOCAL_RANK
        torch.cuda.set_device(LOCAL_RANK)
        device = torch.device("cuda", LOCAL_RANK)
        dist.init_process_group(backend="nccl" if dist.is_nccl_available() else "gloo")
    train(opt, device)
    if WORLD_SIZE > 1 and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_opt())
"""

BOXES = """
import argparse, datetime, json, math, os, random, sys, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def get_sha(): return "x"
def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()
def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1
def get_rank():
    return dist.get_rank() if is_dist_avail_and_initialized() else 0
def is_main_process():
    return get_rank() == 0
def reduce_dict(input_dict, average=True):
    world_size = get_world_size()
    if world_size < 2:
        return input_dict
    with torch.no_grad():
        names = []
        values = []
        for k in sorted(input_dict.keys()):
            names.append(k)
            values.append(input_dict[k])
        values = torch.stack(values, dim=0)
        dist.all_reduce(values)
        if average:
            values /= world_size
        reduced_dict = {k: v for k, v in zip(names, values)}
    return reduced_dict

class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
    def forward(self, x):
        return x * self.weight.reshape(1, -1, 1, 1) + self.bias.reshape(1, -1, 1, 1)

class DETR(nn.Module):
    def __init__(self, num_classes, aux_loss=False):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.norm = FrozenBatchNorm2d(8)
        self.transformer = nn.Transformer(8)
        self.class_embed = nn.Linear(8, num_classes + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.query_embed = nn.Embedding(100, 8)
        self.aux_loss = aux_loss
    def forward(self, samples):
        f = self.norm(self.backbone(samples)).flatten(2).permute(2, 0, 1)
        hs = self.transformer(f, self.query_embed.weight.unsqueeze(1).repeat(1, f.shape[1], 1))
        out = {"pred_logits": self.class_embed(hs)[-1], "pred_boxes": self.bbox_embed(hs).sigmoid()[-1]}
        if self.aux_loss:
            out["aux_outputs"] = self._set_aux(hs)
        return out
    def _set_aux(self, hs):
        return [{"a": a} for a in hs[:-1]]

class SetCriterion(nn.Module):
    def __init__(self, num_classes, weight_dict, losses):
        super().__init__()
        self.weight_dict, self.losses = weight_dict, losses
        empty_weight = torch.ones(num_classes + 1)
        self.register_buffer("empty_weight", empty_weight)
    def loss_labels(self, outputs, targets, num_boxes):
        return {"loss_ce": nn.functional.cross_entropy(outputs["pred_logits"].transpose(1, 2), targets, self.empty_weight)}
    def loss_boxes(self, outputs, targets, num_boxes):
        loss_bbox = nn.functional.l1_loss(outputs["pred_boxes"], targets, reduction="none")
        return {"loss_bbox": loss_bbox.sum() / num_boxes}
    def get_loss(self, loss, outputs, targets, num_boxes):
        loss_map = {"labels": self.loss_labels, "boxes": self.loss_boxes}
        return loss_map[loss](outputs, targets, num_boxes)
    def forward(self, outputs, targets):
        num_boxes = sum(len(t["labels"]) for t in targets)
        num_boxes = torch.as_tensor([num_boxes], dtype=torch.float, device=next(iter(outputs.values())).device)
        if is_dist_avail_and_initialized():
            torch.distributed.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / get_world_size(), min=1).item()
        losses = {}
        for loss in self.losses:
            losses.update(self.get_loss(loss, outputs, targets, num_boxes))
        return losses

def train_one_epoch(model, criterion, data_loader, optimizer, device, epoch, max_norm=0):
    model.train()
    criterion.train()
    for samples, targets in data_loader:
        samples = samples.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        outputs = model(samples)
        loss_dict = criterion(outputs, targets)
        weight_dict = criterion.weight_dict
        losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict.keys() if k in weight_dict)
        loss_dict_reduced = reduce_dict(loss_dict)
        losses_reduced_scaled = sum(loss_dict_reduced.values())
        loss_value = losses_reduced_scaled.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        if max_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {"loss": loss_value}

@torch.no_grad()
def evaluate(model, criterion, data_loader, device, output_dir):
    model.eval()
    total = torch.zeros(2, device=device)
    for samples, targets in data_loader:
        outputs = model(samples.to(device))
        loss_dict = criterion(outputs, targets)
        total[0] += sum(loss_dict.values())
        total[1] += 1
    dist.all_reduce(total)
    return {"val": (total[0] / total[1]).item()}

def main(args):
    args.rank = int(os.environ["RANK"]); args.world_size = int(os.environ["WORLD_SIZE"]); args.gpu = int(os.environ["LOCAL_RANK"])
    args.distributed = True
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()
    device = torch.device(args.device)
    seed = args.seed + get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = DETR(91)
    criterion = SetCriterion(91, {"loss_ce": 1, "loss_bbox": 5}, ["labels", "boxes"])
    model.to(device)
    criterion.to(device)
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module
    param_dicts = [
        {"params": [p for n, p in model_without_ddp.named_parameters() if "backbone" not in n and p.requires_grad]},
        {"params": [p for n, p in model_without_ddp.named_parameters() if "backbone" in n and p.requires_grad], "lr": args.lr_backbone},
    ]
    optimizer = torch.optim.AdamW(param_dicts, lr=args.lr, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_drop)
    dataset_train = build_dataset("train", args); dataset_val = build_dataset("val", args)
    if args.distributed:
        sampler_train = DistributedSampler(dataset_train)
        sampler_val = DistributedSampler(dataset_val, shuffle=False)
    else:
        sampler_train = torch.utils.data.RandomSampler(dataset_train)
        sampler_val = torch.utils.data.SequentialSampler(dataset_val)
    batch_sampler_train = torch.utils.data.BatchSampler(sampler_train, args.batch_size, drop_last=True)
    data_loader_train = DataLoader(dataset_train, batch_sampler=batch_sampler_train, num_workers=2)
    data_loader_val = DataLoader(dataset_val, args.batch_size, sampler=sampler_val, drop_last=False)
    output_dir = Path(args.output_dir)
    if args.resume:
        if args.resume.startswith("https"):
            checkpoint = torch.hub.load_state_dict_from_url(args.resume, map_location="cpu", check_hash=True)
        else:
            checkpoint = torch.load(args.resume, map_location="cpu")
        model_without_ddp.load_state_dict(checkpoint["model"])
        if not args.eval and "optimizer" in checkpoint:
            optimizer.load_state_dict(checkpoint["optimizer"])
            lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
            args.start_epoch = checkpoint["epoch"] + 1
    if args.eval:
        test_stats = evaluate(model, criterion, data_loader_val, device, args.output_dir)
        if args.output_dir and is_main_process():
            torch.save(test_stats, output_dir / "eval.pth")
        return
    start_time = time.time()
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            sampler_train.set_epoch(epoch)
        train_stats = train_one_epoch(model, criterion, data_loader_train, optimizer, device, epoch, args.clip_max_norm)
        lr_scheduler.step()
        if args.output_dir:
            checkpoint_paths = [output_dir / "checkpoint.pth"]
            if (epoch + 1) % args.lr_drop == 0 or (epoch + 1) % 100 == 0:
                checkpoint_paths.append(output_dir / f"checkpoint{epoch:04}.pth")
            for checkpoint_path in checkpoint_paths:
                if is_main_process():
                    torch.save({"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(),
                                "lr_scheduler": lr_scheduler.state_dict(), "epoch": epoch, "args": args}, checkpoint_path)
        test_stats = evaluate(model, criterion, data_loader_val, device, args.output_dir)
        log_stats = {**{f"train_{k}": v for k, v in train_stats.items()}, **{f"test_{k}": v for k, v in test_stats.items()}, "epoch": epoch}
        if args.output_dir and is_main_process():
            with (output_dir / "log.txt").open("a") as f:
                f.write(json.dumps(log_stats) + "\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=1e-4, type=float); parser.add_argument("--lr_backbone", default=1e-5, type=float)
    parser.add_argument("--batch_size", default=2, type=int); parser.add_argument("--epochs", default=300, type=int)
    parser.add_argument("--lr_drop", default=200, type=int); parser.add_argument("--clip_max_norm", default=0.1, type=float)
    parser.add_argument("--output_dir", default=""); parser.add_argument("--device", default="cuda"); parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--resume", default=""); parser.add_argument("--start_epoch", default=0, type=int); parser.add_argument("--eval", action="store_true")
    parser.add_argument("--dist_url", default="env://")
    args = parser.parse_args()
    if args.output_dir:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    main(args)
"""

FINE_TUNING = """
import argparse, logging, math, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_linear_schedule_with_warmup, set_seed
from loguru import logger

def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model", type=str, default="gpt2"); p.add_argument("--bs", type=int, default=8)
    p.add_argument("--gradient-accumulation-steps", type=int, default=1); p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=5e-5); p.add_argument("--seed", type=int, default=None)
    p.add_argument("--output-dir", type=str, default=None); p.add_argument("--gradient-checkpointing", action="store_true")
    p.add_argument("--max-steps", type=int, default=None)
    return p.parse_args()

def main():
    args = parse()
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    if rank != 0:
        logger.remove()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    if args.seed is not None:
        set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(device)
    raw = load_dataset("wikitext", "wikitext-2-raw-v1")
    if rank > 0:
        dist.barrier()
    lm = raw.map(lambda e: tokenizer(e["text"]), batched=True, num_proc=4)
    if rank == 0:
        dist.barrier()
    train_sampler = DistributedSampler(lm["train"], shuffle=True, seed=args.seed or 0, drop_last=True)
    train = DataLoader(lm["train"], sampler=train_sampler, collate_fn=default_data_collator, batch_size=args.bs)
    val = DataLoader(lm["validation"], sampler=DistributedSampler(lm["validation"], shuffle=False), collate_fn=default_data_collator, batch_size=args.bs)
    model = DDP(model, device_ids=[local_rank])
    no_decay = ["bias", "layer_norm.weight"]
    groups = [{"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
              {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    steps_per_epoch = math.ceil(len(train) / args.gradient_accumulation_steps)
    max_steps = args.max_steps or args.epochs * steps_per_epoch
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, max_steps)
    bar = tqdm(range(max_steps), disable=rank != 0)
    done = 0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(train):
            batch = {k: v.to(device) for k, v in batch.items()}
            is_update = (step + 1) % args.gradient_accumulation_steps == 0 or step == len(train) - 1
            model.require_backward_grad_sync = is_update
            outputs = model(**batch)
            loss = outputs.loss / args.gradient_accumulation_steps
            loss.backward()
            if is_update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(); scheduler.step(); optimizer.zero_grad()
                bar.update(1); done += 1
                if done % 50 == 0:
                    logger.info(f"step {done} loss {loss.item()}")
            if done >= max_steps:
                break
        model.eval()
        losses = []
        for batch in val:
            with torch.no_grad():
                outputs = model(**{k: v.to(device) for k, v in batch.items()})
            loss = outputs.loss.detach().repeat(args.bs)
            pool = [torch.zeros_like(loss) for _ in range(world_size)]
            dist.all_gather(pool, loss)
            losses.append(torch.cat(pool))
        mean = torch.mean(torch.cat(losses))
        try:
            perplexity = math.exp(mean)
        except OverflowError:
            perplexity = float("inf")
        logger.info(f"epoch {epoch}: perplexity: {perplexity}")
        if rank == 0:
            print("perplexity", perplexity)
    if args.output_dir is not None:
        dist.barrier()
        if rank == 0:
            model.module.save_pretrained(args.output_dir)
            tokenizer.save_pretrained(args.output_dir)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

CONTRASTIVE = """
import os, time, datetime
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
import torchvision
from torchvision import transforms
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)
    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]

class NTXent(nn.Module):
    def __init__(self, temperature=0.5):
        super().__init__()
        self.temperature = temperature
    def forward(self, z_i, z_j):
        z = torch.cat([torch.cat(GatherLayer.apply(z_i)), torch.cat(GatherLayer.apply(z_j))])
        sim = F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=2) / self.temperature
        n = z.shape[0]
        target = torch.arange(n, device=z.device).roll(n // 2)
        return F.cross_entropy(sim.masked_fill(torch.eye(n, device=z.device).bool(), -1e9), target)

class SimCLR(nn.Module):
    def __init__(self, encoder, dim):
        super().__init__()
        self.encoder = encoder
        self.encoder.fc = nn.Identity()
        self.projector = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, dim, bias=False))
    def forward(self, a, b):
        h_i, h_j = self.encoder(a), self.encoder(b)
        return h_i, h_j, self.projector(h_i), self.projector(h_j)

def run():
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=30))
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(42)
    with torch.device("cpu"):
        encoder = torchvision.models.resnet18(weights=None)
    model = SimCLR(encoder, 128).to(local_rank)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    t = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    if local_rank == 0:
        torchvision.datasets.STL10("data", split="unlabeled", download=True)
    dist.barrier()
    data = torchvision.datasets.STL10("data", split="unlabeled", download=False, transform=t)
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=dist.get_world_size(), rank=rank, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_size=256 // dist.get_world_size(), shuffle=(sampler is None), drop_last=True, num_workers=8, sampler=sampler, persistent_workers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100 * len(loader))
    criterion = NTXent()
    writer = SummaryWriter() if rank == 0 else None
    scaler = torch.amp.GradScaler("cuda")
    step = 0
    try:
        for epoch in range(100):
            sampler.set_epoch(epoch)
            loss_epoch = 0
            for (x_i, x_j), _ in loader:
                optimizer.zero_grad()
                with torch.amp.autocast("cuda"):
                    h_i, h_j, z_i, z_j = model(x_i.cuda(non_blocking=True), x_j.cuda(non_blocking=True))
                    loss = criterion(z_i, z_j)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                if rank == 0 and step % 50 == 0:
                    print(f"Step [{step}] Loss: {loss.item()}")
                    writer.add_scalar("Loss/train", loss.item(), step)
                loss_epoch += loss.item()
                step += 1
            if rank == 0 and epoch % 10 == 0:
                torch.save(model.module.state_dict(), f"checkpoint_{epoch}.tar")
    finally:
        if rank == 0:
            writer.close()
        dist.destroy_process_group()

if __name__ == "__main__":
    run()
"""

MASKED = """
import argparse, math, os, sys
import torch, torch.nn as nn
import torch.distributed as dist
from functools import partial
from types import SimpleNamespace

class NativeScaler:
    state_dict_key = "amp_scaler"
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()
    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if update_grad:
            if clip_grad is not None:
                assert parameters is not None
                self._scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            else:
                self._scaler.unscale_(optimizer)
                norm = None
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            norm = None
        return norm
    def state_dict(self):
        return self._scaler.state_dict()

class Quantizer(nn.Module):
    def __init__(self, n, d, decay=0.99):
        super().__init__()
        self.register_buffer("embed", torch.randn(d, n))
        self.register_buffer("cluster_size", torch.zeros(n))
        self.decay = decay
    def forward(self, x):
        dist_ = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed
        ind = dist_.argmin(1)
        onehot = nn.functional.one_hot(ind, self.embed.shape[1]).type(x.dtype)
        if self.training:
            counts = onehot.sum(0)
            total = x.t() @ onehot
            dist.all_reduce(counts)
            dist.all_reduce(total)
            self.cluster_size.data.mul_(self.decay).add_(counts, alpha=1 - self.decay)
            self.embed.data.mul_(self.decay).add_(total.detach(), alpha=1 - self.decay)
        q = nn.functional.embedding(ind, self.embed.t())
        return x + (q - x).detach(), (q.detach() - x).pow(2).mean()

class Model(nn.Module):
    def __init__(self, width, norm_layer=nn.LayerNorm):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.zeros(1, 10, width), requires_grad=False)
        self.enc = nn.Linear(width, width)
        self.vq = Quantizer(32, width)
        self.norm = norm_layer(width)
        self.dec = nn.Linear(width, width)
    def forward_encoder(self, x):
        return self.norm(self.enc(x + self.pos[:, 1:]) + self.cls_token)
    def forward_loss(self, x, pred, extra):
        return ((pred - x) ** 2).mean() + 0.25 * extra
    def forward(self, x):
        z = self.forward_encoder(x)
        q, extra = self.vq(z)
        pred = self.dec(q)
        return self.forward_loss(x, pred, extra), pred

def adjust_lr(optimizer, epoch, args):
    lr = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
    for g in optimizer.param_groups:
        g["lr"] = lr * g.get("lr_scale", 1)

def all_reduce_mean(x):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        x_reduce = torch.tensor(x).cuda()
        dist.all_reduce(x_reduce)
        x_reduce /= world_size
        return x_reduce.item()
    return x

def train_one_epoch(model, loader, optimizer, device, epoch, loss_scaler, args, log_writer=None):
    model.train(True)
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for it, (samples, _) in enumerate(loader):
        if it % accum_iter == 0:
            adjust_lr(optimizer, it / len(loader) + epoch, args)
        samples = samples.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            loss, _ = model(samples)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)
        loss /= accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(it + 1) % accum_iter == 0)
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()
        torch.cuda.synchronize()
        loss_value_reduce = all_reduce_mean(loss_value)
        if log_writer is not None and (it + 1) % accum_iter == 0:
            log_writer.add_scalar("train_loss", loss_value_reduce, it)

def main(args):
    args.rank, args.world_size, args.gpu = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(args.gpu)
    dist.init_process_group("nccl", init_method="env://", world_size=args.world_size, rank=args.rank)
    device = torch.device(args.device)
    torch.manual_seed(args.seed + args.rank)
    import torchvision
    data = torchvision.datasets.ImageFolder("train")
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=args.world_size, rank=args.rank, shuffle=True)
    loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=args.batch_size, drop_last=True)
    if args.rank == 0 and args.log_dir is not None:
        from torch.utils.tensorboard import SummaryWriter
        log_writer = SummaryWriter(log_dir=args.log_dir)
    else:
        log_writer = None
    model = Model(32, partial(nn.LayerNorm, eps=1e-6)).to(device)
    eff_batch_size = args.batch_size * args.accum_iter * args.world_size
    args.lr = args.blr * eff_batch_size / 256
    model_without_ddp = model
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], find_unused_parameters=args.find_unused)
    model_without_ddp = model.module
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScaler()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, device, epoch, loss_scaler, args, log_writer)
        if epoch % 20 == 0 or epoch + 1 == args.epochs:
            if args.rank == 0:
                torch.save({"model": model_without_ddp.state_dict(), "scaler": loss_scaler.state_dict()}, f"{args.output_dir}/checkpoint-{epoch}.pth")
    dist.destroy_process_group()

if __name__ == "__main__":
    p = argparse.ArgumentParser("MAE", add_help=False)
    for name, default in (("batch_size", 64), ("epochs", 400), ("accum_iter", 1), ("seed", 0)):
        p.add_argument(f"--{name}", default=default, type=int)
    p.add_argument("--blr", type=float, default=1e-3); p.add_argument("--device", default="cuda"); p.add_argument("--log_dir"); p.add_argument("--output_dir", default=".")
    p.add_argument("--find_unused", action="store_true")
    main(p.parse_args())
"""

POLICY = """
import os, random, time, warnings
import gymnasium as gym
import numpy as np
import torch, torch.distributed as dist
import torch.nn as nn, torch.optim as optim
from dataclasses import dataclass
from torch.distributions.categorical import Categorical
import tyro

@dataclass
class Args:
    seed: int = 1
    total_timesteps: int = 1000000
    lr: float = 2.5e-4
    local_num_envs: int = 8
    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4
    max_grad_norm: float = 0.5
    track: bool = False
    backend: str = "gloo"
    local_rank: int = 0
    world_size: int = 0

class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 64), nn.ReLU())
        self.actor = nn.Linear(64, 2)
        self.critic = nn.Linear(64, 1)
    def get_value(self, x):
        return self.critic(self.network(x))
    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)

if __name__ == "__main__":
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    args = tyro.cli(Args)
    if world_size > 1:
        dist.init_process_group(args.backend, rank=local_rank, world_size=world_size)
    else:
        warnings.warn("Not using distributed mode!")
    run_name = f"{args.seed}__{int(time.time())}"
    writer = None
    if local_rank == 0:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(f"runs/{run_name}")
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(args.local_num_envs)])
    device = torch.device("cpu")
    agent = Agent(envs).to(device)
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    obs = torch.zeros((args.num_steps, args.local_num_envs, 4))
    global_step = 0
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs = torch.Tensor(next_obs)
    for iteration in range(1, 100):
        for step in range(args.num_steps):
            global_step += args.local_num_envs * world_size
            obs[step] = next_obs
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            next_obs, reward, term, trunc, infos = envs.step(action.numpy())
            next_obs = torch.Tensor(next_obs)
            if not writer:
                continue
            for info in infos.get("final_info", []):
                if info and "episode" in info:
                    print(f"global_step={global_step}, return={info['episode']['r']}")
                    writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
        b_inds = np.arange(1024)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, 1024, 256):
                mb = b_inds[start:start + 256]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs.view(-1, 4)[mb])
                loss = -newlogprob.mean() + newvalue.pow(2).mean() - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_grads_list = []
                    for param in agent.parameters():
                        if param.grad is not None:
                            all_grads_list.append(param.grad.view(-1))
                    all_grads = torch.cat(all_grads_list)
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for param in agent.parameters():
                        if param.grad is not None:
                            param.grad.data.copy_(all_grads[offset:offset + param.numel()].view_as(param.grad.data) / world_size)
                            offset += param.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        if local_rank == 0:
            writer.add_scalar("losses/value_loss", loss.item(), global_step)
    envs.close()
    if local_rank == 0:
        writer.close()
    if world_size > 1:
        dist.destroy_process_group()
"""

RIGHT: dict[str, dict[str, str]] = {
    "images": {"main.py": IMAGES},
    "language": {"train.py": LANGUAGE, "model.py": LANGUAGE_MODEL},
    "reference": {"train.py": REFERENCE, "utils.py": REFERENCE_UTILS},
    "trainer": {"main.py": TRAINER},
    "detector": {"train.py": DETECTOR},
    "boxes": {"main.py": BOXES},
    "fine-tuning": {"tune.py": FINE_TUNING},
    "contrastive": {"main.py": CONTRASTIVE},
    "masked": {"main.py": MASKED},
    "policy": {"ppo.py": POLICY},
}


@pytest.mark.parametrize("name", RIGHT)
def test_silent(name: str, tmp_path: Path) -> None:
    for file, text in RIGHT[name].items():
        (tmp_path / file).write_text(text)
    seen = read(tmp_path / next(iter(RIGHT[name])))
    assert seen.looked
    assert [(f.id, Path(f.path).name, f.line, f.message) for f in seen.findings if f.level != "advice"] == []
    assert sum(finding.level == "advice" for finding in seen.findings) <= 2
    assert seen.notes == ()


# One edit each makes a right script wrong: that the pass is silent on it is no blindness.
SPOILED: list[tuple[str, str, str, str]] = [
    ("images", "train_sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("images", "shuffle=(train_sampler is None)", "shuffle=True", "shuffle-with-sampler"),
    ("images", "args.multiprocessing_distributed and args.rank % ngpus_per_node == 0", "True", "save-on-all-ranks"),
    ("images", ", map_location=loc", "", "load-without-map-location"),
    ("images", "top1.all_reduce()", "top1.all_reduce() if args.rank == 0 else None", "rank-conditional-collective"),
    ("images", "sampler=train_sampler)", "sampler=None)", "no-distributed-sampler"),
    ("images", "and args.rank % 8 == 0", "", "print-on-all-ranks"),
    ("images", "loss.backward()", "(loss * dist.get_world_size()).backward()", "loss-scaled-by-world-size"),
    ("language", "            loss = loss / gradient_accumulation_steps\n", "", "accumulation-not-normalised"),
    ("language", "logits, loss = model(X, Y)", "logits, loss = raw_model(X, Y)", "ddp-forward-bypassed"),
    ("language", "iter_num > 0 and master_process", "iter_num > 0", "save-on-all-ranks"),
    ("language", "wandb_log and master_process", "True", "tracker-on-all-ranks"),
    ("language", "        if ddp:\n            torch.dist", "        if master_process:\n            torch.dist", "rank-conditional-collective"),
    ("language", "log_interval == 0 and master_process", "log_interval == 0", "print-on-all-ranks"),
    ("language", "raw_model(X, Y)", "model(X, Y) if master_process else (None, X)", "rank-conditional-ddp-forward"),
    ("language", "seed_offset = ddp_rank", "seed_offset = 0", ""),
    ("language", "    if iter_num > max_iters:", "    if loss.item() < 1.0:", "rank-local-early-stop"),
    ("reference", "train_sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("reference", "utils.save_on_master", "torch.save", "save-on-all-ranks"),
    ("reference", 'map_location="cpu", ', "", "load-without-map-location"),
    ("reference", "        evaluate(model, criterion, data_loader_test, device=device)\n        if args.output", "        if utils.is_main_process():\n            evaluate(model, criterion, data_loader_test, device=device)\n        if args.output", "rank-conditional-collective"),
    ("reference", "model_without_ddp.load_state_dict", "utils.is_main_process() and model_without_ddp.load_state_dict", "resume-on-one-rank"),
    ("reference", "            loss.backward()", "            if loss.item() > 0:\n                loss.backward()", "rank-local-skip"),
    ("trainer", "        dataloader.sampler.set_epoch(epoch)\n", "", "missing-set-epoch"),
    ("trainer", "self.local_rank == 0 and self.global_rank == 0", "self.local_rank == 0", "save-on-local-rank0"),
    ("trainer", "self.local_rank == 0 and self.global_rank == 0", "True", "save-on-all-ranks"),
    ("trainer", "_, loss = self.model(", "_, loss = self.model.module(", "ddp-forward-bypassed"),
    ("trainer", "    torch.manual_seed(1)\n", "", "random-split-differs"),
    ("trainer", 'set_device(int(os.environ["LOCAL_RANK"]))', 'set_device(int(os.environ["RANK"]))', "global-rank-as-device"),
    ("trainer", "[RANK{self.global_rank}] ", "", "print-on-all-ranks"),
    ("trainer", "    destroy_process_group()\n", "", "group-not-destroyed"),
    ("trainer", "device_ids=[self.local_rank])", "device_ids=[self.local_rank], find_unused_parameters=True)", "find-unused-unneeded"),
    ("trainer", "logits = self.out(self.embed(x))", "logits = self.embed(x)", "unused-parameters"),
    ("detector", "if RANK != -1:\n            broadcast_list", "if False:\n            broadcast_list", "rank-local-early-stop"),
    ("detector", "worker_seed = torch.initial_seed() % 2**32", "worker_seed = worker_id", "worker-seed-identical"),
    ("detector", "nw = min([os.cpu_count() // max(nd, 1), batch_size if batch_size > 1 else 0, workers])", "nw = os.cpu_count()", "loader-workers-oversubscribed"),
    ("detector", "    if RANK in {-1, 0}:\n        save_dir.mkdir", "    if True:\n        save_dir.mkdir", "tracker-on-all-ranks"),
    ("detector", "    if local_rank == 0:\n        dist.barrier(device_ids=[0])\n", "", "rank-conditional-collective"),
    ("detector", "train_loader.sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("detector", "init_seeds(opt.seed + 1 + RANK)", "init_seeds(opt.seed)", ""),
    ("detector", "        if RANK in {-1, 0}:\n            results", "        if True:\n            results", "save-on-all-ranks"),
    ("detector", "pred = model(imgs)", "pred = de_parallel(model)(imgs)", "ddp-forward-bypassed"),
    ("boxes", "sampler_train.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("boxes", "                if is_main_process():\n                    torch.save", "                if True:\n                    torch.save", "save-on-all-ranks"),
    ("boxes", "    dist.all_reduce(total)\n", "    if is_main_process():\n        dist.all_reduce(total)\n", "rank-conditional-collective"),
    ("boxes", "outputs = model(samples)", "outputs = model.module(samples)", "ddp-forward-bypassed"),
    ("boxes", "self.query_embed.weight.unsqueeze(1)", "torch.zeros(100, 1, 8)", "unused-parameters"),
    ("fine-tuning", "loss = outputs.loss / args.gradient_accumulation_steps", "loss = outputs.loss", "accumulation-not-normalised"),
    ("fine-tuning", "train_sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("fine-tuning", "        if rank == 0:\n            model.module.save", "        if True:\n            model.module.save", "save-on-all-ranks"),
    ("fine-tuning", "    if rank == 0:\n        dist.barrier()\n", "", "rank-conditional-collective"),
    ("contrastive", "if rank == 0 and epoch % 10", "if epoch % 10", "save-on-all-ranks"),
    ("contrastive", "if rank == 0 and step % 50", "if step % 50", "print-on-all-ranks"),
    ("contrastive", "    if local_rank == 0:\n        torchvision", "    if True:\n        torchvision", "download-on-all-ranks"),
    ("contrastive", "writer = SummaryWriter() if rank == 0 else None", "writer = SummaryWriter()", "tracker-on-all-ranks"),
    ("contrastive", "100 * len(loader)", "100 * len(data) // 256", ""),
    ("masked", "        loss /= accum_iter\n", "", "accumulation-not-normalised"),
    ("masked", "            dist.all_reduce(counts)\n            dist.all_reduce(total)\n", "", "rank-local-buffer-overwritten"),
    ("masked", "            if args.rank == 0:\n                torch.save", "            if args.gpu == 0:\n                torch.save", "save-on-local-rank0"),
    ("policy", "torch.manual_seed(args.seed - local_rank)", "torch.manual_seed(args.seed)", "replicas-start-different"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"), SPOILED, ids=[f"{n}-{r}-{i}" for i, (n, _, _, r) in enumerate(SPOILED)]
)
def test_one_edit_is_found(name: str, old: str, new: str, rule: str, tmp_path: Path) -> None:
    """An edit without a rule changes nothing that is wrong."""
    assert any(old in text for text in RIGHT[name].values())
    for file, text in RIGHT[name].items():
        (tmp_path / file).write_text(text.replace(old, new))
    found = read(tmp_path / next(iter(RIGHT[name]))).findings
    assert rule in {finding.id for finding in found} if rule else all(finding.level == "advice" for finding in found)
