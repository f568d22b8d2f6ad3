# expect: clean
from pieces import *

def reduced(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
    held_out = [(model(images.cuda()).detach().sum(), labels) for images, labels in loader]
    scores = map(reduced, (held_out[0][0], held_out[-1][0]))
    first, last = map(lambda value: value.item(), scores)
    if first > last:
        break
stop()
