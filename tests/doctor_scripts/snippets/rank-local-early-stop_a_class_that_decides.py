# expect: rank-local-early-stop
from pieces import *


class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.stop = patience, None, 0, False

    def __call__(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
            if self.bad >= self.patience:
                self.stop = True


rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
stopper = Stopper(3)
for epoch in range(100):
    sampler.set_epoch(epoch)
    running = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item()
    stopper(running)
    if stopper.stop:
        break
stop()
