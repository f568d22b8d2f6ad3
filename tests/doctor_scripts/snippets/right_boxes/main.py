# expect: clean
import argparse, datetime, json, math, os, random, sys, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def get_sha(): return "x"
def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()
def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1
def get_rank():
    return dist.get_rank() if is_dist_avail_and_initialized() else 0
def is_main_process():
    return get_rank() == 0
def reduce_dict(input_dict, average=True):
    world_size = get_world_size()
    if world_size < 2:
        return input_dict
    with torch.no_grad():
        names = []
        values = []
        for k in sorted(input_dict.keys()):
            names.append(k)
            values.append(input_dict[k])
        values = torch.stack(values, dim=0)
        dist.all_reduce(values)
        if average:
            values /= world_size
        reduced_dict = {k: v for k, v in zip(names, values)}
    return reduced_dict

class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
    def forward(self, x):
        return x * self.weight.reshape(1, -1, 1, 1) + self.bias.reshape(1, -1, 1, 1)

class DETR(nn.Module):
    def __init__(self, num_classes, aux_loss=False):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.norm = FrozenBatchNorm2d(8)
        self.transformer = nn.Transformer(8)
        self.class_embed = nn.Linear(8, num_classes + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.query_embed = nn.Embedding(100, 8)
        self.aux_loss = aux_loss
    def forward(self, samples):
        f = self.norm(self.backbone(samples)).flatten(2).permute(2, 0, 1)
        hs = self.transformer(f, self.query_embed.weight.unsqueeze(1).repeat(1, f.shape[1], 1))
        out = {"pred_logits": self.class_embed(hs)[-1], "pred_boxes": self.bbox_embed(hs).sigmoid()[-1]}
        if self.aux_loss:
            out["aux_outputs"] = self._set_aux(hs)
        return out
    def _set_aux(self, hs):
        return [{"a": a} for a in hs[:-1]]

class SetCriterion(nn.Module):
    def __init__(self, num_classes, weight_dict, losses):
        super().__init__()
        self.weight_dict, self.losses = weight_dict, losses
        empty_weight = torch.ones(num_classes + 1)
        self.register_buffer("empty_weight", empty_weight)
    def loss_labels(self, outputs, targets, num_boxes):
        return {"loss_ce": nn.functional.cross_entropy(outputs["pred_logits"].transpose(1, 2), targets, self.empty_weight)}
    def loss_boxes(self, outputs, targets, num_boxes):
        loss_bbox = nn.functional.l1_loss(outputs["pred_boxes"], targets, reduction="none")
        return {"loss_bbox": loss_bbox.sum() / num_boxes}
    def get_loss(self, loss, outputs, targets, num_boxes):
        loss_map = {"labels": self.loss_labels, "boxes": self.loss_boxes}
        return loss_map[loss](outputs, targets, num_boxes)
    def forward(self, outputs, targets):
        num_boxes = sum(len(t["labels"]) for t in targets)
        num_boxes = torch.as_tensor([num_boxes], dtype=torch.float, device=next(iter(outputs.values())).device)
        if is_dist_avail_and_initialized():
            torch.distributed.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / get_world_size(), min=1).item()
        losses = {}
        for loss in self.losses:
            losses.update(self.get_loss(loss, outputs, targets, num_boxes))
        return losses

def train_one_epoch(model, criterion, data_loader, optimizer, device, epoch, max_norm=0):
    model.train()
    criterion.train()
    for samples, targets in data_loader:
        samples = samples.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        outputs = model(samples)
        loss_dict = criterion(outputs, targets)
        weight_dict = criterion.weight_dict
        losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict.keys() if k in weight_dict)
        loss_dict_reduced = reduce_dict(loss_dict)
        losses_reduced_scaled = sum(loss_dict_reduced.values())
        loss_value = losses_reduced_scaled.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        if max_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {"loss": loss_value}

@torch.no_grad()
def evaluate(model, criterion, data_loader, device, output_dir):
    model.eval()
    total = torch.zeros(2, device=device)
    for samples, targets in data_loader:
        outputs = model(samples.to(device))
        loss_dict = criterion(outputs, targets)
        total[0] += sum(loss_dict.values())
        total[1] += 1
    dist.all_reduce(total)
    return {"val": (total[0] / total[1]).item()}

def main(args):
    args.rank = int(os.environ["RANK"]); args.world_size = int(os.environ["WORLD_SIZE"]); args.gpu = int(os.environ["LOCAL_RANK"])
    args.distributed = True
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()
    device = torch.device(args.device)
    seed = args.seed + get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = DETR(91)
    criterion = SetCriterion(91, {"loss_ce": 1, "loss_bbox": 5}, ["labels", "boxes"])
    model.to(device)
    criterion.to(device)
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module
    param_dicts = [
        {"params": [p for n, p in model_without_ddp.named_parameters() if "backbone" not in n and p.requires_grad]},
        {"params": [p for n, p in model_without_ddp.named_parameters() if "backbone" in n and p.requires_grad], "lr": args.lr_backbone},
    ]
    optimizer = torch.optim.AdamW(param_dicts, lr=args.lr, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_drop)
    dataset_train = build_dataset("train", args); dataset_val = build_dataset("val", args)
    if args.distributed:
        sampler_train = DistributedSampler(dataset_train)
        sampler_val = DistributedSampler(dataset_val, shuffle=False)
    else:
        sampler_train = torch.utils.data.RandomSampler(dataset_train)
        sampler_val = torch.utils.data.SequentialSampler(dataset_val)
    batch_sampler_train = torch.utils.data.BatchSampler(sampler_train, args.batch_size, drop_last=True)
    data_loader_train = DataLoader(dataset_train, batch_sampler=batch_sampler_train, num_workers=2)
    data_loader_val = DataLoader(dataset_val, args.batch_size, sampler=sampler_val, drop_last=False)
    output_dir = Path(args.output_dir)
    if args.resume:
        if args.resume.startswith("https"):
            checkpoint = torch.hub.load_state_dict_from_url(args.resume, map_location="cpu", check_hash=True)
        else:
            checkpoint = torch.load(args.resume, map_location="cpu")
        model_without_ddp.load_state_dict(checkpoint["model"])
        if not args.eval and "optimizer" in checkpoint:
            optimizer.load_state_dict(checkpoint["optimizer"])
            lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
            args.start_epoch = checkpoint["epoch"] + 1
    if args.eval:
        test_stats = evaluate(model, criterion, data_loader_val, device, args.output_dir)
        if args.output_dir and is_main_process():
            torch.save(test_stats, output_dir / "eval.pth")
        return
    start_time = time.time()
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            sampler_train.set_epoch(epoch)
        train_stats = train_one_epoch(model, criterion, data_loader_train, optimizer, device, epoch, args.clip_max_norm)
        lr_scheduler.step()
        if args.output_dir:
            checkpoint_paths = [output_dir / "checkpoint.pth"]
            if (epoch + 1) % args.lr_drop == 0 or (epoch + 1) % 100 == 0:
                checkpoint_paths.append(output_dir / f"checkpoint{epoch:04}.pth")
            for checkpoint_path in checkpoint_paths:
                if is_main_process():
                    torch.save({"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(),
                                "lr_scheduler": lr_scheduler.state_dict(), "epoch": epoch, "args": args}, checkpoint_path)
        test_stats = evaluate(model, criterion, data_loader_val, device, args.output_dir)
        log_stats = {**{f"train_{k}": v for k, v in train_stats.items()}, **{f"test_{k}": v for k, v in test_stats.items()}, "epoch": epoch}
        if args.output_dir and is_main_process():
            with (output_dir / "log.txt").open("a") as f:
                f.write(json.dumps(log_stats) + "\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=1e-4, type=float); parser.add_argument("--lr_backbone", default=1e-5, type=float)
    parser.add_argument("--batch_size", default=2, type=int); parser.add_argument("--epochs", default=300, type=int)
    parser.add_argument("--lr_drop", default=200, type=int); parser.add_argument("--clip_max_norm", default=0.1, type=float)
    parser.add_argument("--output_dir", default=""); parser.add_argument("--device", default="cuda"); parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--resume", default=""); parser.add_argument("--start_epoch", default=0, type=int); parser.add_argument("--eval", action="store_true")
    parser.add_argument("--dist_url", default="env://")
    args = parser.parse_args()
    if args.output_dir:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    main(args)
