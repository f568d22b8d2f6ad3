# expect: rank-local-buffer-overwritten
from pieces import *


class Tally(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.fc(x - self.mean)


rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
model = DistributedDataParallel(Tally().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in tud.DataLoader(data, 4, sampler=sampler):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
stop()
