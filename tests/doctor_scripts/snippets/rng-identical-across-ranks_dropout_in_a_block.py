# expect: rng-identical-across-ranks
from pieces import *


def train(model, loader, optimizer, sampler, epochs, device):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.proj(x))


rank, local, world = start()
torch.manual_seed(42)
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
model = DistributedDataParallel(Block().to(local))
train(model, tud.DataLoader(data, 4, sampler=sampler), torch.optim.SGD(model.parameters(), 0.1), sampler, 2, local)
stop()
