# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(names):
    count = torch.tensor(len(names) if names is not None else 0)
    dist.broadcast(count, src=0)
    received = []
    if dist.get_rank() == 0:
        for name in names:
            dist.broadcast_object_list([name], src=0)
            received.append(name)
    else:
        for _ in range(count.item()):
            box = [None]
            dist.broadcast_object_list(box, src=0)
            received.append(box[0])
    return received


def main():
    dist.init_process_group("gloo")
    names = share(["a", "b", "c"] if dist.get_rank() == 0 else None)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, len(names)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
