# expect: rank-local-early-stop
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience=3):
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def __call__(self, loss):
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [nn.functional.mse_loss(model(x), y).item() for x, y in loader]
    model.train()
    return sum(losses) / len(losses)


def main():
    dist.init_process_group("gloo")
    train, val = (TensorDataset(torch.randn(n, 8), torch.randn(n, 1)) for n in (64, 32))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopper = EarlyStopping()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if stopper(validate(model, val_loader)):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
