# expect: clean
from pieces import *

class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.images, self.labels = next(self.loader)
        except StopIteration:
            self.images = None
            return
        self.images = self.images.cuda(non_blocking=True)

    def next(self):
        images, labels = self.images, self.labels
        self.preload()
        return images, labels


def evaluate(model, loader):
    model.eval()
    prefetcher = Prefetcher(loader)
    images, labels = prefetcher.next()
    hits = torch.zeros(1).cuda()
    while images is not None:
        with torch.no_grad():
            hits += (model(images).argmax(1) == labels.cuda()).sum()
        images, labels = prefetcher.next()
    dist.all_reduce(hits)


rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])

held_out = tud.DataLoader(Pictures([str(i) for i in range(16)]), batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    prefetcher = Prefetcher(loader)
    images, labels = prefetcher.next()
    while images is not None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels.cuda()).backward()
        optimizer.step()
        images, labels = prefetcher.next()
    evaluate(model, held_out)
stop()
