"""Ranking of pairs."""

import torch
import torch.distributed as dist
from meters import Board
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOG_EVERY, EPOCHS, GLOBAL_BATCH = 4, 2, 16


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, better, worse):
        return (self.score(better) - self.score(worse)).squeeze(1)


def pairs():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 128, 6, generator=generator)
    swap = (first.sum(1) < second.sum(1)).unsqueeze(1)
    return TensorDataset(torch.where(swap, second, first), torch.where(swap, first, second))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = pairs()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(Ranker())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    board = Board("loss", "accuracy")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (better, worse) in enumerate(loader):
            margin = model(better, worse)
            loss = nn.functional.softplus(-margin).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            board.add(len(margin), loss=loss.detach(), accuracy=(margin > 0).float().mean())
            if step % LOG_EVERY == 0 and is_main_process():
                print(f"[{epoch}/{step}] {board.report()}")  # expect: rank-conditional-collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
