# expect: collective-order-differs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(config):
    box = [config]
    if dist.get_rank() == 0:
        dist.broadcast_object_list(box, src=0)
        dist.barrier()
    else:
        dist.barrier()
        dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    dist.init_process_group("gloo")
    cfg = share({"lr": 0.1, "epochs": 2} if dist.get_rank() == 0 else None)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
