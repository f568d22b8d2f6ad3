# expect: loss-scaled-by-world-size
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self):
        self.world_size = dist.get_world_size()
        self.model = DDP(nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def compute_loss(self, batch):
        inputs, labels = batch
        logits = self.model(inputs)
        return nn.functional.cross_entropy(logits, labels).mul(self.world_size)

    def training_step(self, batch):
        loss = self.compute_loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    trainer = Trainer()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=8, sampler=sampler):
            trainer.training_step(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
