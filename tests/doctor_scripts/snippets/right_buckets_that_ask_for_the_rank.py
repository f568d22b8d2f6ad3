# expect: clean
from pieces import *


class Buckets(tud.Sampler):
    """Batches of similar length, in another order each epoch."""

    def __init__(self, lengths, batch_size, seed=0):
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        order.sort(key=lambda i: self.lengths[i])
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        yield from batches[dist.get_rank() :: dist.get_world_size()]


rank, local, world = start()
random.seed(7)
lengths = [random.randint(4, 40) for _ in range(256)]
sampler = Buckets(lengths, 16 // world, seed=7)
loader = tud.DataLoader(Pictures([str(i) for i in range(256)]), batch_sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
stop()
