"""Autoencoder with a moving average of its weights, warm-up, resume, and meters."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tracking import Average, MetricLogger, only_main_prints


def init_distributed_mode(args):
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.gpu = int(os.environ["LOCAL_RANK"])
    args.distributed = args.world_size > 1
    if torch.cuda.is_available():
        torch.cuda.set_device(args.gpu)
        args.device, backend = f"cuda:{args.gpu}", "nccl"
    else:
        args.device, backend = "cpu", "gloo"
    dist.init_process_group(backend, init_method="env://", world_size=args.world_size, rank=args.rank)
    dist.barrier()
    only_main_prints(args.rank == 0)


def save_on_master(args, *words, **options):
    if args.rank == 0:
        torch.save(*words, **options)


def build():
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 3), nn.Linear(3, 24), nn.GELU(), nn.Linear(24, 12))


def train_one_epoch(model, average, loader, optimizer, scheduler, epoch, args):
    model.train()
    metrics = MetricLogger()
    for (x,) in loader:
        x = x.to(args.device)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update(model.module)
        metrics.update(len(x), loss=loss.detach(), lr=scheduler.get_last_lr()[0])
    metrics.synchronize_between_processes()
    print(f"epoch {epoch}: {metrics}")


@torch.no_grad()
def evaluate(net, loader, header):
    metrics = MetricLogger()
    for (x,) in loader:
        metrics.update(len(x), error=(net(x) - x).abs().mean())
    metrics.synchronize_between_processes()
    print(f"{header}: {metrics}")


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    data = torch.randn(192, 3) @ torch.randn(3, 12)
    train_set, test_set = TensorDataset(data[:160]), TensorDataset(data[160:])
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // args.world_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=8, sampler=range(args.rank, len(test_set), args.world_size))

    net = build().to(args.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader) - 3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[3])
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["epoch"] + 1
    model = net
    if args.distributed:
        model = DistributedDataParallel(net, device_ids=[args.gpu] if torch.cuda.is_available() else None)
    average = Average(net, decay=0.9)

    for epoch in range(start, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, average, train_loader, optimizer, scheduler, epoch, args)
        evaluate(average.net, test_loader, "average")
        checkpoint = {
            "model": net.state_dict(),
            "average": average.net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        save_on_master(args, checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=4e-3, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output-dir", default=".")
    main(parser.parse_args())
