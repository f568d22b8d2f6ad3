# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def unwrap(model):
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "module", model)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    net = torch.compile(nn.Linear(8, 1), disable=True)
    model = DDP(net)
    decay = [p for p in unwrap(model).parameters() if p.dim() > 1]
    rest = [p for p in unwrap(model).parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(unwrap(model).state_dict(), "net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
