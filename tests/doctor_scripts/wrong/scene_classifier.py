"""Image classification in one file, as many first versions of a distributed port look."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def conv_block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(2, outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class SceneNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.stem = conv_block(3, 8)
        self.body = conv_block(8, 16)
        self.fc = nn.Linear(16 * 4, classes)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).flatten(1))


def synthetic(count, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=g)
    images = torch.rand(count, 3, 8, 8, generator=g)
    images[torch.arange(count), labels] += 0.5
    return TensorDataset(images, labels)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update((output.argmax(1) == target).float().mean().item(), images.size(0))
    return losses.avg, top1.avg


def main():
    parser = argparse.ArgumentParser(description="scenes")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=32, type=int, help="of all GPUs together")
    parser.add_argument("--lr", default=0.05, type=float)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    train_dataset, val_dataset = synthetic(192, 0), synthetic(64, 1)
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    per_gpu = args.batch_size // world_size
    train_loader = DataLoader(train_dataset, batch_size=per_gpu, sampler=train_sampler)  # expect: missing-set-epoch
    val_loader = DataLoader(val_dataset, batch_size=per_gpu, sampler=val_sampler)
    model = DDP(SceneNet())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    best = 0.0
    for epoch in range(args.epochs):
        end = time.time()
        model.train()
        for images, target in train_loader:  # expect: missing-set-epoch
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        val_loss, acc1 = validate(val_loader, model, criterion)
        if rank == 0:
            took = time.time() - end
            print(f"epoch {epoch} val {val_loss:.3f} acc@1 {acc1:.3f} ({took:.1f}s)")  # expect: metric-not-reduced
            if acc1 > best:
                best = acc1
                torch.save({"epoch": epoch, "state_dict": model.module.state_dict()}, "model_best.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
