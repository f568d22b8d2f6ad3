# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def batches(data, rank, world, size):
    mine = list(range(rank, len(data), world))
    rounds = torch.tensor(len(mine) // size)
    dist.all_reduce(rounds, op=dist.ReduceOp.MIN)
    for index in range(rounds.item()):
        chosen = mine[index * size : (index + 1) * size]
        yield tuple(part[chosen] for part in data.tensors)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(67, 8), torch.randn(67, 1))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in batches(data, dist.get_rank(), dist.get_world_size(), 4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
