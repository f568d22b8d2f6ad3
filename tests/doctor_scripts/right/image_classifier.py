"""A small convolutional classifier: augmentation, AMP, cosine schedule with warm-up, evaluation, best checkpoint."""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Shapes(Dataset):
    """Bright squares on noise; the class is the quadrant."""

    def __init__(self, count, seed, train):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=generator)
        self.images = 0.3 * torch.randn(count, 1, 12, 12, generator=generator)
        for image, label in zip(self.images, self.labels.tolist()):
            top, left = 6 * (label // 2), 6 * (label % 2)
            image[0, top : top + 6, left : left + 6] += 1.0
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            image = image + 0.05 * torch.randn_like(image)
        return image, self.labels[index]


class SmallNet(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--output", default="out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    return parser.parse_args()


def train_one_epoch(model, loader, optimizer, scheduler, scaler, device, epoch, args):
    loader.sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        stats[0] += F.cross_entropy(logits, labels, reduction="sum")
        stats[1] += (logits.argmax(1) == labels).sum()
        stats[2] += labels.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    args = parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, test_set = Shapes(256, 10, train=True), Shapes(77, 11, train=False)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // world_size,
        sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),
        drop_last=True,
    )
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=64)

    model = DDP(SmallNet(8, 4).to(device), device_ids=[local_rank] if device.type == "cuda" else None)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    total = args.epochs * len(train_loader)

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, total - args.warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and args.amp)
    best = 0.0
    for epoch in range(args.epochs):
        began = time.time()
        train_one_epoch(model, train_loader, optimizer, scheduler, scaler, device, epoch, args)
        loss, accuracy = evaluate(model.module, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} accuracy {accuracy:.3f} in {time.time() - began:.1f} s")
            os.makedirs(args.output, exist_ok=True)
            if accuracy >= best:
                best = accuracy
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(args.output, "best.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
