# expect: clean
from pieces import *

rank, local, world = start()
data = Pictures([str(i) for i in range(64)])
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
    for parameter in model.parameters():
        if rank:
            dist.send(parameter.data, dst=0)
            dist.recv(parameter.data, src=0)
        else:
            dist.recv(parameter.data, src=1)
            dist.send(parameter.data, dst=1)
stop()
