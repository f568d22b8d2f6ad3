# expect: clean
from pieces import *

rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        losses = []
        for out, target in zip(model(images.cuda()), targets.cuda()):
            found = target > 0
            losses.append((out * found).sum() / max(1, found.sum()))
        optimizer.zero_grad()
        (sum(losses) / len(targets)).backward()
        optimizer.step()
stop()
