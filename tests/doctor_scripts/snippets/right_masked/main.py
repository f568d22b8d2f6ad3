# expect: clean
import argparse, math, os, sys
import torch, torch.nn as nn
import torch.distributed as dist
from functools import partial
from types import SimpleNamespace

class NativeScaler:
    state_dict_key = "amp_scaler"
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()
    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if update_grad:
            if clip_grad is not None:
                assert parameters is not None
                self._scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            else:
                self._scaler.unscale_(optimizer)
                norm = None
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            norm = None
        return norm
    def state_dict(self):
        return self._scaler.state_dict()

class Quantizer(nn.Module):
    def __init__(self, n, d, decay=0.99):
        super().__init__()
        self.register_buffer("embed", torch.randn(d, n))
        self.register_buffer("cluster_size", torch.zeros(n))
        self.decay = decay
    def forward(self, x):
        dist_ = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed
        ind = dist_.argmin(1)
        onehot = nn.functional.one_hot(ind, self.embed.shape[1]).type(x.dtype)
        if self.training:
            counts = onehot.sum(0)
            total = x.t() @ onehot
            dist.all_reduce(counts)
            dist.all_reduce(total)
            self.cluster_size.data.mul_(self.decay).add_(counts, alpha=1 - self.decay)
            self.embed.data.mul_(self.decay).add_(total.detach(), alpha=1 - self.decay)
        q = nn.functional.embedding(ind, self.embed.t())
        return x + (q - x).detach(), (q.detach() - x).pow(2).mean()

class Model(nn.Module):
    def __init__(self, width, norm_layer=nn.LayerNorm):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.zeros(1, 10, width), requires_grad=False)
        self.enc = nn.Linear(width, width)
        self.vq = Quantizer(32, width)
        self.norm = norm_layer(width)
        self.dec = nn.Linear(width, width)
    def forward_encoder(self, x):
        return self.norm(self.enc(x + self.pos[:, 1:]) + self.cls_token)
    def forward_loss(self, x, pred, extra):
        return ((pred - x) ** 2).mean() + 0.25 * extra
    def forward(self, x):
        z = self.forward_encoder(x)
        q, extra = self.vq(z)
        pred = self.dec(q)
        return self.forward_loss(x, pred, extra), pred

def adjust_lr(optimizer, epoch, args):
    lr = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
    for g in optimizer.param_groups:
        g["lr"] = lr * g.get("lr_scale", 1)

def all_reduce_mean(x):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        x_reduce = torch.tensor(x).cuda()
        dist.all_reduce(x_reduce)
        x_reduce /= world_size
        return x_reduce.item()
    return x

def train_one_epoch(model, loader, optimizer, device, epoch, loss_scaler, args, log_writer=None):
    model.train(True)
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for it, (samples, _) in enumerate(loader):
        if it % accum_iter == 0:
            adjust_lr(optimizer, it / len(loader) + epoch, args)
        samples = samples.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            loss, _ = model(samples)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)
        loss /= accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(it + 1) % accum_iter == 0)
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()
        torch.cuda.synchronize()
        loss_value_reduce = all_reduce_mean(loss_value)
        if log_writer is not None and (it + 1) % accum_iter == 0:
            log_writer.add_scalar("train_loss", loss_value_reduce, it)

def main(args):
    args.rank, args.world_size, args.gpu = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(args.gpu)
    dist.init_process_group("nccl", init_method="env://", world_size=args.world_size, rank=args.rank)
    device = torch.device(args.device)
    torch.manual_seed(args.seed + args.rank)
    import torchvision
    data = torchvision.datasets.ImageFolder("train")
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=args.world_size, rank=args.rank, shuffle=True)
    loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=args.batch_size, drop_last=True)
    if args.rank == 0 and args.log_dir is not None:
        from torch.utils.tensorboard import SummaryWriter
        log_writer = SummaryWriter(log_dir=args.log_dir)
    else:
        log_writer = None
    model = Model(32, partial(nn.LayerNorm, eps=1e-6)).to(device)
    eff_batch_size = args.batch_size * args.accum_iter * args.world_size
    args.lr = args.blr * eff_batch_size / 256
    model_without_ddp = model
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], find_unused_parameters=args.find_unused)
    model_without_ddp = model.module
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScaler()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, device, epoch, loss_scaler, args, log_writer)
        if epoch % 20 == 0 or epoch + 1 == args.epochs:
            if args.rank == 0:
                torch.save({"model": model_without_ddp.state_dict(), "scaler": loss_scaler.state_dict()}, f"{args.output_dir}/checkpoint-{epoch}.pth")
    dist.destroy_process_group()

if __name__ == "__main__":
    p = argparse.ArgumentParser("MAE", add_help=False)
    for name, default in (("batch_size", 64), ("epochs", 400), ("accum_iter", 1), ("seed", 0)):
        p.add_argument(f"--{name}", default=default, type=int)
    p.add_argument("--blr", type=float, default=1e-3); p.add_argument("--device", default="cuda"); p.add_argument("--log_dir"); p.add_argument("--output_dir", default=".")
    p.add_argument("--find_unused", action="store_true")
    main(p.parse_args())
