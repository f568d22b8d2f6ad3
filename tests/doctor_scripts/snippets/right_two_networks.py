# expect: clean
from pieces import *

rank, local, world = start()
torch.manual_seed(rank)
fake, real = (DistributedDataParallel(Net().to(local), device_ids=[local]) for _ in range(2))
a, b = torch.optim.Adam(fake.parameters()), torch.optim.Adam(real.parameters())
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
for epoch in range(9):
    sampler.set_epoch(epoch)
    for x, _ in tud.DataLoader(data, 8, sampler=sampler):
        for p in real.parameters():
            p.requires_grad = True
        b.zero_grad()
        (real(x).mean() - real(fake(x).detach()).mean()).backward()
        b.step()
        for p in real.parameters():
            p.requires_grad = False
        a.zero_grad()
        (-real(fake(x)).mean()).backward()
        a.step()
stop()
