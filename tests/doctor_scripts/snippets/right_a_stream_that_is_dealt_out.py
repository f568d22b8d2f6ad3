# expect: clean
from pieces import *


class Lines(tud.IterableDataset):
    def __iter__(self):
        info = tud.get_worker_info()
        number, total = (info.id, info.num_workers) if info else (0, 1)
        share = dist.get_rank() * total + number
        for index in range(1000):
            if index % (total * dist.get_world_size()) == share:
                yield torch.zeros(4), 0


rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for x, y in tud.DataLoader(Lines(), batch_size=4, num_workers=2):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
stop()
