# expect: clean
from pieces import *

from zoo import AutoModel


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = AutoModel.from_pretrained("small"), AutoModel.from_pretrained("small")
        self.head = nn.Linear(8, 2)

    def forward(self, images):
        return self.head(self.first(images).hidden[-1] + self.second(images).hidden[-1])


rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Two().cuda(), device_ids=[local], find_unused_parameters=True)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
stop()
