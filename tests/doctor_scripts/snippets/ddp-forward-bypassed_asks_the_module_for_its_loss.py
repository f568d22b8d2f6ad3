# expect: ddp-forward-bypassed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())

    def loss(self, x):
        return nn.functional.mse_loss(self(x), x)


def unwrap(model):
    return model.module if isinstance(model, DDP) else model


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(Autoencoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            unwrap(model).loss(x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
