# expect: clean
import os, time, datetime
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
import torchvision
from torchvision import transforms
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)
    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]

class NTXent(nn.Module):
    def __init__(self, temperature=0.5):
        super().__init__()
        self.temperature = temperature
    def forward(self, z_i, z_j):
        z = torch.cat([torch.cat(GatherLayer.apply(z_i)), torch.cat(GatherLayer.apply(z_j))])
        sim = F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=2) / self.temperature
        n = z.shape[0]
        target = torch.arange(n, device=z.device).roll(n // 2)
        return F.cross_entropy(sim.masked_fill(torch.eye(n, device=z.device).bool(), -1e9), target)

class SimCLR(nn.Module):
    def __init__(self, encoder, dim):
        super().__init__()
        self.encoder = encoder
        self.encoder.fc = nn.Identity()
        self.projector = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, dim, bias=False))
    def forward(self, a, b):
        h_i, h_j = self.encoder(a), self.encoder(b)
        return h_i, h_j, self.projector(h_i), self.projector(h_j)

def run():
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=30))
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(42)
    with torch.device("cpu"):
        encoder = torchvision.models.resnet18(weights=None)
    model = SimCLR(encoder, 128).to(local_rank)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    t = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    if local_rank == 0:
        torchvision.datasets.STL10("data", split="unlabeled", download=True)
    dist.barrier()
    data = torchvision.datasets.STL10("data", split="unlabeled", download=False, transform=t)
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=dist.get_world_size(), rank=rank, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_size=256 // dist.get_world_size(), shuffle=(sampler is None), drop_last=True, num_workers=8, sampler=sampler, persistent_workers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100 * len(loader))
    criterion = NTXent()
    writer = SummaryWriter() if rank == 0 else None
    scaler = torch.amp.GradScaler("cuda")
    step = 0
    try:
        for epoch in range(100):
            sampler.set_epoch(epoch)
            loss_epoch = 0
            for (x_i, x_j), _ in loader:
                optimizer.zero_grad()
                with torch.amp.autocast("cuda"):
                    h_i, h_j, z_i, z_j = model(x_i.cuda(non_blocking=True), x_j.cuda(non_blocking=True))
                    loss = criterion(z_i, z_j)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                if rank == 0 and step % 50 == 0:
                    print(f"Step [{step}] Loss: {loss.item()}")
                    writer.add_scalar("Loss/train", loss.item(), step)
                loss_epoch += loss.item()
                step += 1
            if rank == 0 and epoch % 10 == 0:
                torch.save(model.module.state_dict(), f"checkpoint_{epoch}.tar")
    finally:
        if rank == 0:
            writer.close()
        dist.destroy_process_group()

if __name__ == "__main__":
    run()
