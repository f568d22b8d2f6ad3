# expect: global-batch-grows
from pieces import *


def train(model, loader, optimizer, sampler, epochs, device):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
order = DistributedSampler(data)
model = DistributedDataParallel(Net().to(local))
train(model, tud.DataLoader(data, 64, sampler=order), torch.optim.SGD(model.parameters(), lr=0.1), order, 3, local)
stop()
