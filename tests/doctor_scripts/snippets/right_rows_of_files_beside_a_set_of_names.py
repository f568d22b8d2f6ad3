# expect: clean
from pieces import *

def rows(root, names):
    found = []
    for name in names:
        with open(name) as file:
            found += [(os.path.join(root, line.strip()),) + tuple(line.split()) for line in file]
    return found


class Speech(tud.Dataset):
    def __init__(self, root, names, letters):
        self.letters = set(letters) | {"-"}
        self.count = len(self.letters)
        self.rows = rows(root, names)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.zeros(4), len(self.rows[index]) % self.count


rank, local, world = start()
data = Speech("files", ["a.txt", "b.txt"], "abc")
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net().cuda(), device_ids=[local])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
stop()
