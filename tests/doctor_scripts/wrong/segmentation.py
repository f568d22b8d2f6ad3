"""Dense prediction; rank 0 makes pictures of the validation set while the others wait."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.AvgPool2d(2))
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, padding=1))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x):
        down = self.down(x - self.offset)
        return self.up(down + self.middle(down))


def blobs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    masks = (
        (torch.rand(count, 1, 4, 4, generator=generator) > 0.6).float().repeat_interleave(2, 2).repeat_interleave(2, 3)
    )
    return TensorDataset(masks + 0.2 * torch.randn(masks.shape, generator=generator), masks)


def predict(model, loader, folder, epoch):
    model.eval()
    overlap = union = 0.0
    with torch.no_grad():
        for images, masks in loader:
            found = model(images) > 0  # expect: rank-conditional-ddp-forward
            overlap += (found & (masks > 0)).sum().item()
            union += (found | (masks > 0)).sum().item()
    os.makedirs(folder, exist_ok=True)
    torch.save(found, os.path.join(folder, f"epoch{epoch}.pt"))
    model.train()
    return overlap / union


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--pictures", default="pictures")
    opt = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set, valid_set = blobs(64, 0), blobs(16, 1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8 // dist.get_world_size(), sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=8)
    torch.manual_seed(0)
    model = DDP(UNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=opt.lr)
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        for images, masks in train_loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(images), masks).backward()
            optimizer.step()
        if rank == 0:
            iou = predict(model, valid_loader, opt.pictures, epoch)  # expect: rank-conditional-ddp-forward
            print(f"epoch {epoch}: IoU {iou:.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
