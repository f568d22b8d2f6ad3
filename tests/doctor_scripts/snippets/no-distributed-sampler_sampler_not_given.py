# expect: no-distributed-sampler
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_loader(args):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    return loader, sampler


def main(args):
    dist.init_process_group("gloo")
    loader, sampler = get_loader(args)
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args())
