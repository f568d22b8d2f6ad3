# expect: clean
import argparse, logging, math, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_linear_schedule_with_warmup, set_seed
from loguru import logger

def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model", type=str, default="gpt2"); p.add_argument("--bs", type=int, default=8)
    p.add_argument("--gradient-accumulation-steps", type=int, default=1); p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=5e-5); p.add_argument("--seed", type=int, default=None)
    p.add_argument("--output-dir", type=str, default=None); p.add_argument("--gradient-checkpointing", action="store_true")
    p.add_argument("--max-steps", type=int, default=None)
    return p.parse_args()

def main():
    args = parse()
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    if rank != 0:
        logger.remove()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    if args.seed is not None:
        set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(device)
    raw = load_dataset("wikitext", "wikitext-2-raw-v1")
    if rank > 0:
        dist.barrier()
    lm = raw.map(lambda e: tokenizer(e["text"]), batched=True, num_proc=4)
    if rank == 0:
        dist.barrier()
    train_sampler = DistributedSampler(lm["train"], shuffle=True, seed=args.seed or 0, drop_last=True)
    train = DataLoader(lm["train"], sampler=train_sampler, collate_fn=default_data_collator, batch_size=args.bs)
    val = DataLoader(lm["validation"], sampler=DistributedSampler(lm["validation"], shuffle=False), collate_fn=default_data_collator, batch_size=args.bs)
    model = DDP(model, device_ids=[local_rank])
    no_decay = ["bias", "layer_norm.weight"]
    groups = [{"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
              {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    steps_per_epoch = math.ceil(len(train) / args.gradient_accumulation_steps)
    max_steps = args.max_steps or args.epochs * steps_per_epoch
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, max_steps)
    bar = tqdm(range(max_steps), disable=rank != 0)
    done = 0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(train):
            batch = {k: v.to(device) for k, v in batch.items()}
            is_update = (step + 1) % args.gradient_accumulation_steps == 0 or step == len(train) - 1
            model.require_backward_grad_sync = is_update
            outputs = model(**batch)
            loss = outputs.loss / args.gradient_accumulation_steps
            loss.backward()
            if is_update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(); scheduler.step(); optimizer.zero_grad()
                bar.update(1); done += 1
                if done % 50 == 0:
                    logger.info(f"step {done} loss {loss.item()}")
            if done >= max_steps:
                break
        model.eval()
        losses = []
        for batch in val:
            with torch.no_grad():
                outputs = model(**{k: v.to(device) for k, v in batch.items()})
            loss = outputs.loss.detach().repeat(args.bs)
            pool = [torch.zeros_like(loss) for _ in range(world_size)]
            dist.all_gather(pool, loss)
            losses.append(torch.cat(pool))
        mean = torch.mean(torch.cat(losses))
        try:
            perplexity = math.exp(mean)
        except OverflowError:
            perplexity = float("inf")
        logger.info(f"epoch {epoch}: perplexity: {perplexity}")
        if rank == 0:
            print("perplexity", perplexity)
    if args.output_dir is not None:
        dist.barrier()
        if rank == 0:
            model.module.save_pretrained(args.output_dir)
            tokenizer.save_pretrained(args.output_dir)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
