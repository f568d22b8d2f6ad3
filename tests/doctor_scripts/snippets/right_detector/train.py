# expect: clean
import argparse, math, os, sys, time, logging
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, distributed
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

LOCAL_RANK = int(os.getenv("LOCAL_RANK", -1))
RANK = int(os.getenv("RANK", -1))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", 1))
LOGGER = logging.getLogger("train")
LOGGER.setLevel(logging.INFO if RANK in (-1, 0) else logging.WARNING)


@contextmanager
def rank_zero_first(local_rank):
    if local_rank not in [-1, 0]:
        dist.barrier(device_ids=[local_rank])
    yield
    if local_rank == 0:
        dist.barrier(device_ids=[0])


class Boxes(Dataset):
    def __init__(self, path, cache=False):
        self.files = sorted(Path(path).rglob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.zeros(3, 640, 640), torch.zeros(10, 6)


class Conv(nn.Module):
    def __init__(self, c1, c2, k=1, s=1, act=True):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, bias=False)
        self.norm = nn.GroupNorm(1, c2)
        self.act = nn.SiLU() if act is True else nn.Identity()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Detector(nn.Module):
    def __init__(self, nc=80):
        super().__init__()
        self.model = nn.Sequential(*[Conv(3, 16, 3, 2), Conv(16, 32, 3, 2)])
        self.save = []
        self.head = nn.ModuleList(nn.Conv2d(x, nc, 1) for x in (16, 32))

    def forward(self, x):
        y = []
        for m in self.model:
            x = m(x)
            y.append(x)
        for i in range(2):
            y[i] = self.head[i](y[i])
        return y if self.training else torch.cat([v.flatten(2) for v in y], 2)


class ComputeLoss:
    def __init__(self, model):
        self.bce = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0]))
        self.device = next(model.parameters()).device

    def __call__(self, p, targets):
        lcls = torch.zeros(1, device=self.device)
        for i, pi in enumerate(p):
            n = targets.shape[0]
            if n:
                lcls += self.bce(pi, torch.zeros_like(pi))
        bs = p[0].shape[0]
        return lcls * bs, lcls.detach()


class ModelEMA:
    def __init__(self, model, decay=0.9999):
        self.ema = deepcopy(de_parallel(model)).eval()
        self.updates = 0
        self.decay = lambda x: decay * (1 - math.exp(-x / 2000))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        msd = de_parallel(model).state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class EarlyStopping:
    def __init__(self, patience=30):
        self.best_fitness = 0.0
        self.best_epoch = 0
        self.patience = patience or float("inf")

    def __call__(self, epoch, fitness):
        if fitness >= self.best_fitness:
            self.best_epoch = epoch
            self.best_fitness = fitness
        delta = epoch - self.best_epoch
        return delta >= self.patience


def de_parallel(model):
    return model.module if type(model) in (nn.DataParallel, DDP) else model


def init_seeds(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)


def create_dataloader(path, batch_size, rank=-1, workers=8, shuffle=False):
    with rank_zero_first(rank):
        dataset = Boxes(path, cache=True)
    batch_size = min(batch_size, len(dataset))
    nd = torch.cuda.device_count()
    nw = min([os.cpu_count() // max(nd, 1), batch_size if batch_size > 1 else 0, workers])
    sampler = None if rank == -1 else distributed.DistributedSampler(dataset, shuffle=shuffle)
    generator = torch.Generator()
    generator.manual_seed(6148914691236517205 + RANK)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle and sampler is None, num_workers=nw,
                      sampler=sampler, worker_init_fn=seed_worker, generator=generator), dataset


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    seen, hits = 0, 0.0
    for im, targets in tqdm(loader):
        out = model(im.to(device))
        hits += (out.sigmoid() > 0.5).sum().item()
        seen += im.shape[0]
    return hits / max(seen, 1)


def train(opt, device):
    save_dir = Path(opt.save_dir)
    last, best = save_dir / "last.pt", save_dir / "best.pt"
    if RANK in {-1, 0}:
        save_dir.mkdir(parents=True, exist_ok=True)
        tb = SummaryWriter(str(save_dir))
    init_seeds(opt.seed + 1 + RANK)
    cuda = device.type != "cpu"
    weights = opt.weights
    pretrained = weights.endswith(".pt")
    if pretrained:
        ckpt = torch.load(weights, map_location="cpu")
        model = Detector(nc=80).to(device)
        model.load_state_dict(ckpt["model"], strict=False)
    else:
        model = Detector(nc=80).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr, momentum=0.9, nesterov=True)
    lf = lambda x: (1 - x / opt.epochs) * 0.99 + 0.01
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)
    ema = ModelEMA(model) if RANK in {-1, 0} else None
    best_fitness, start_epoch = 0.0, 0
    if cuda and RANK == -1 and torch.cuda.device_count() > 1:
        model = torch.nn.DataParallel(model)
    if opt.sync_bn and cuda and RANK != -1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    train_loader, dataset = create_dataloader("train", opt.batch_size // WORLD_SIZE, LOCAL_RANK, shuffle=True)
    if RANK in {-1, 0}:
        val_loader = create_dataloader("val", opt.batch_size // WORLD_SIZE * 2, -1)[0]
    if cuda and RANK != -1:
        model = DDP(model, device_ids=[LOCAL_RANK], output_device=LOCAL_RANK)
    nb = len(train_loader)
    nw = max(round(3 * nb), 100)
    last_opt_step = -1
    accumulate = max(round(64 / opt.batch_size), 1)
    scaler = torch.cuda.amp.GradScaler(enabled=cuda)
    stopper, stop = EarlyStopping(patience=opt.patience), False
    compute_loss = ComputeLoss(model)
    for epoch in range(start_epoch, opt.epochs):
        model.train()
        mloss = torch.zeros(3, device=device)
        if RANK != -1:
            train_loader.sampler.set_epoch(epoch)
        pbar = enumerate(train_loader)
        if RANK in {-1, 0}:
            pbar = tqdm(pbar, total=nb)
        optimizer.zero_grad()
        for i, (imgs, targets) in pbar:
            ni = i + nb * epoch
            imgs = imgs.to(device, non_blocking=True).float() / 255
            if ni <= nw:
                accumulate = max(1, np.interp(ni, [0, nw], [1, 64 / opt.batch_size]).round())
            with torch.cuda.amp.autocast(cuda):
                pred = model(imgs)
                loss, loss_items = compute_loss(pred, targets.to(device))
                if RANK != -1:
                    loss *= WORLD_SIZE if opt.sum_over_ranks else 1
            scaler.scale(loss).backward()
            if ni - last_opt_step >= accumulate:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if ema:
                    ema.update(model)
                last_opt_step = ni
            if RANK in {-1, 0}:
                mloss = (mloss * i + loss_items) / (i + 1)
                pbar.set_description(f"{epoch} {mloss.mean():.4g}")
        scheduler.step()
        if RANK in {-1, 0}:
            results = validate(ema.ema, val_loader, device)
            fi = results
            stop = stopper(epoch=epoch, fitness=fi)
            if fi > best_fitness:
                best_fitness = fi
            tb.add_scalar("fitness", fi, epoch)
            ckpt = {"epoch": epoch, "model": deepcopy(de_parallel(model)).state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(ckpt, last)
            if best_fitness == fi:
                torch.save(ckpt, best)
            del ckpt
        if RANK != -1:
            broadcast_list = [stop if RANK == 0 else None]
            dist.broadcast_object_list(broadcast_list, 0)
            if RANK != 0:
                stop = broadcast_list[0]
        if stop:
            break
    if RANK in {-1, 0}:
        LOGGER.info(f"{epoch - start_epoch + 1} epochs completed.")
    torch.cuda.empty_cache()


def parse_opt():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=str, default="small.pt")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=int, default=100)
    parser.add_argument("--save-dir", default="runs")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--sum-over-ranks", action="store_true")
    return parser.parse_args()


def main(opt):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if LOCAL_RANK != -1:
        assert torch.cuda.device_count() > LOCAL_RANK
        torch.cuda.set_device(LOCAL_RANK)
        device = torch.device("cuda", LOCAL_RANK)
        dist.init_process_group(backend="nccl" if dist.is_nccl_available() else "gloo")
    train(opt, device)
    if WORLD_SIZE > 1 and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_opt())
