# expect: clean
import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Training:
    def __init__(self, data):
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        self.model = DistributedDataParallel(torch.nn.Linear(5, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epoch, self.batch = 0, 0

    def run(self):
        while self.epoch < 3:
            self.sampler.set_epoch(self.epoch)
            for (x,) in itertools.islice(self.loader, self.batch, None):
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.batch += 1
            self.epoch, self.batch = self.epoch + 1, 0


dist.init_process_group("gloo")
torch.manual_seed(0)
Training(TensorDataset(torch.randn(64, 5))).run()
dist.destroy_process_group()
