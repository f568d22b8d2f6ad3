# expect: rank-local-skip
from pieces import *


class Boxes(Pictures):
    def __getitem__(self, index):
        return torch.zeros(4), {"boxes": torch.zeros(index % 3, 4)}


def collate(samples):
    images, targets = zip(*samples)
    return torch.stack(images), list(targets)


rank, local, world = start()
data = Boxes([str(i) for i in range(64)])
sampler = DistributedSampler(data, drop_last=True)
loader = tud.DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        targets = [{k: v.cuda() for k, v in target.items()} for target in targets]
        if sum(len(target["boxes"]) for target in targets) == 0:
            continue
        optimizer.zero_grad()
        model(images.cuda()).square().mean().backward()
        optimizer.step()
stop()
