# expect: clean
from pieces import *

class Resumable(DistributedSampler):
    def __init__(self, data):
        super().__init__(data)
        self.progress = 0

    def set_epoch(self, epoch):
        raise NotImplementedError("use `with sampler.in_epoch(epoch)`")

    @contextlib.contextmanager
    def in_epoch(self, epoch):
        self.epoch = epoch
        yield
        self.progress = 0


rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = Resumable(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    with sampler.in_epoch(epoch):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
            optimizer.step()
stop()
