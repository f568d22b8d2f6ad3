# expect: metric-not-reduced
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    correct, seen = 0, 0
    model.eval()
    with torch.inference_mode():
        for x, y in loader:
            correct += (model(x).argmax(dim=1) == y).sum().item()
            seen += y.size(0)
    model.train()
    return {"accuracy": correct / seen}


def main():
    dist.init_process_group("gloo")
    train, val = (TensorDataset(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in (64, 32))
    sampler = DistributedSampler(train)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        metrics = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
