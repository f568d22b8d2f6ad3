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
    for images, labels in loader:
        optimizer.zero_grad()
        weights = (model(images.cuda()).exp() * images.sum(1, keepdim=True).cuda()).sum(0, keepdim=True)
        weights = weights / weights.sum(-1, keepdim=True)
        known = (labels >= 0).cuda()
        (-(weights.log()[:, 0] * known).sum() / 8).backward()
        optimizer.step()
stop()
