# expect: clean
from pieces import *

def told(found):
    loss = torch.stack(found["losses"]).mean() if "losses" in found else None
    if loss is not None:
        dist.all_reduce(loss)
    if "hits" in found:
        dist.all_reduce(found["hits"][0])
    return loss


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
    found = {}
    for images, labels in loader:
        found.setdefault("losses", []).append(F.cross_entropy(model(images.cuda()), labels.cuda()).detach())
    told(found)
stop()
