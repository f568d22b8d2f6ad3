"""A trainer that makes no mistake; snippets replace some of its methods by other ones."""

from pieces import *


class Trainer:
    def __init__(self, accumulate=1):
        self.rank, self.local, self.world = start()
        self.net = Net().to(self.local)
        self.model = DistributedDataParallel(self.net, device_ids=[self.local])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * self.world)
        self.criterion = nn.CrossEntropyLoss()
        self.data = Pictures(sorted(os.listdir("train")))
        self.sampler = DistributedSampler(self.data)
        self.loader = tud.DataLoader(self.data, batch_size=32 // self.world, sampler=self.sampler)
        self.accumulate = accumulate

    def is_main(self):
        return self.rank == 0

    def batches(self, epoch):
        self.sampler.set_epoch(epoch)
        for images, labels in self.loader:
            yield images.to(self.local), labels.to(self.local)

    def run(self, epochs):
        for epoch in range(epochs):
            for step, (images, labels) in enumerate(self.batches(epoch)):
                self.step(step, images, labels)
            self.done(epoch)
        stop()

    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def done(self, epoch):
        pass
