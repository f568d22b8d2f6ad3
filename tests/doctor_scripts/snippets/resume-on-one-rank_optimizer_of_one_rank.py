# expect: resume-on-one-rank
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def resume(args, model, optimizer):
    if dist.get_rank() != 0 or not args.resume:
        return
    state = torch.load(args.resume, map_location="cpu")
    optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="last.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resume(args, model, optimizer)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
