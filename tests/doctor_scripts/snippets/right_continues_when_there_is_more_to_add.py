# expect: clean
from pieces import *


def train():
    try:
        import remote

        result = remote.sync()
    except OSError:
        result = False
    if not result:
        return
    rank, local, world = start()
    data = Pictures([str(i) for i in range(64)])
    sampler = DistributedSampler(data)
    loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Net().cuda(), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        kept = []
        for step, (images, labels) in enumerate(loader):
            kept.append((images, labels))
            if (step + 1) % 4:
                continue
            optimizer.zero_grad()
            for images, labels in kept:
                (F.cross_entropy(model(images.cuda()), labels.cuda()) / 4).backward()
            optimizer.step()
            kept = []
    stop()


train()
