# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, loader, optimizer, scaler, writer):
    for x, y in loader:
        with autocast():
            loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if writer is not None:
            writer.append(loss.item())


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        if dist.get_rank() == 0:
            train(model, loader, optimizer, scaler, [])
        else:
            train(model, loader, optimizer, scaler, None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
