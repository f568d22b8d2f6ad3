# expect: iterable-not-sharded
from pieces import *


class Lines(tud.IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        info = tud.get_worker_info()
        with open(self.path) as lines:
            for number, line in enumerate(lines):
                if info is None or number % info.num_workers == info.id:
                    yield torch.zeros(4), 0


rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for x, y in tud.DataLoader(Lines("a.txt"), batch_size=4, num_workers=2):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
stop()
