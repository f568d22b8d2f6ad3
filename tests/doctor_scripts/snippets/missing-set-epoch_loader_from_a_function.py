# expect: missing-set-epoch
from pieces import *


def data(files):
    dataset = Pictures(files)
    order = DistributedSampler(dataset, shuffle=True)
    return tud.DataLoader(dataset, batch_size=4, sampler=order), order


def main(epochs=3):
    rank, local, world = start()
    loader, _ = data(sorted(os.listdir("a")))
    model = DistributedDataParallel(Net().cuda(local), device_ids=[local])
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        for x, y in loader:
            sgd.zero_grad()
            F.cross_entropy(model(x), y).backward()
            sgd.step()
    stop()


main()
