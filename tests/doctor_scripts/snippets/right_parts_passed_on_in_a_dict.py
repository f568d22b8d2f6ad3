# expect: clean
from pieces import *

class Users(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Linear(4, 8), nn.Linear(4, 8)
        self.body = Both()

    def forward(self, parts):
        parts["user"] = self.user(parts["user"])
        parts["item"] = self.item(parts["item"])
        return self.body(parts)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, parts):
        return self.head(parts["user"] + parts["item"])


rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Users().cuda(), device_ids=[local])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
stop()
