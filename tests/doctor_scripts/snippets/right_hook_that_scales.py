# expect: clean
from pieces import *

rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])


def hook(state, bucket):
    return dist.all_reduce(bucket.buffer().div_(4 * world), async_op=True).get_future().then(lambda f: f.value()[0])


model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (images, labels) in enumerate(loader):
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
stop()
