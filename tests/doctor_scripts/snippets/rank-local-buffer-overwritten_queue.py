# expect: rank-local-buffer-overwritten
from pieces import *


class Contrast(nn.Module):
    def __init__(self, width=8, size=128):
        super().__init__()
        self.size = size
        self.encoder = nn.Linear(4, width)
        self.register_buffer("queue", torch.randn(width, size))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        first = int(self.place)
        self.queue[:, first : first + keys.shape[0]] = keys.t()
        self.place[0] = (first + keys.shape[0]) % self.size

    def forward(self, images):
        found = self.encoder(images)
        logits = found @ self.queue.clone().detach()
        self.enqueue(found.detach())
        return logits


rank, local, world = start()
data = Pictures([str(i) for i in range(256)])
sampler = DistributedSampler(data, drop_last=True)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Contrast().cuda(), device_ids=[local])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, _ in loader:
        optimizer.zero_grad()
        model(images.cuda()).square().mean().backward()
        optimizer.step()
stop()
