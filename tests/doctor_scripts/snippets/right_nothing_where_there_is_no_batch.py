# expect: clean
from pieces import *
from streams import batches


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def prepared(self, batch):
        if not batch:
            return None
        return {name: part.cuda() for name, part in batch.items()}

    def forward(self, batch):
        return F.cross_entropy(self.model(batch["images"]), batch["labels"]) if batch is not None else None

    def step(self, batch):
        loss = self.forward(self.prepared(batch))
        if loss is not None:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
trainer = Trainer(DistributedDataParallel(Net().cuda(), device_ids=[local]))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        trainer.step(batch)
    for batch in batches(loader):
        trainer.step(batch)
stop()
