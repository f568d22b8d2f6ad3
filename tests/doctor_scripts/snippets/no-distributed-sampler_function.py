# expect: no-distributed-sampler
from pieces import *


def train(model, loader, optimizer, sampler, epochs, device):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


def main():
    rank, local, world = start()
    model = DistributedDataParallel(Net().to(local))
    data = Pictures(sorted(os.listdir("a")))
    loader = tud.DataLoader(data, batch_size=8, drop_last=True)
    train(model, loader, torch.optim.SGD(model.parameters(), 0.1), DistributedSampler(data), 3, local)
    stop()


main()
