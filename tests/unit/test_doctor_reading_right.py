# ruff: noqa: E501 - lines as people write them
"""Of whole right scripts, in the style of those that people publish, one edit makes a wrong one: what it breaks is told.
That nothing is told without the edit, `test_doctor_reading_rules` sees to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.doctor.reading import read

SNIPPETS = Path(__file__).resolve().parents[1] / "doctor_scripts" / "snippets"

SPOILED: list[tuple[str, str, str, str]] = [
    ("images", "train_sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("images", "shuffle=(train_sampler is None)", "shuffle=True", "shuffle-with-sampler"),
    ("images", "args.multiprocessing_distributed and args.rank % ngpus_per_node == 0", "True", "save-on-all-ranks"),
    ("images", ", map_location=loc", "", "load-without-map-location"),
    ("images", "top1.all_reduce()", "top1.all_reduce() if args.rank == 0 else None", "rank-conditional-collective"),
    ("images", "sampler=train_sampler)", "sampler=None)", "no-distributed-sampler"),
    ("images", "and args.rank % 8 == 0", "", "print-on-all-ranks"),
    ("images", "loss.backward()", "(loss * dist.get_world_size()).backward()", "loss-scaled-by-world-size"),
    ("language", "            loss = loss / gradient_accumulation_steps\n", "", "accumulation-not-normalised"),
    ("language", "logits, loss = model(X, Y)", "logits, loss = raw_model(X, Y)", "ddp-forward-bypassed"),
    ("language", "iter_num > 0 and master_process", "iter_num > 0", "save-on-all-ranks"),
    ("language", "wandb_log and master_process", "True", "tracker-on-all-ranks"),
    ("language", "        if ddp:\n            torch.dist", "        if master_process:\n            torch.dist", "rank-conditional-collective"),
    ("language", "log_interval == 0 and master_process", "log_interval == 0", "print-on-all-ranks"),
    ("language", "raw_model(X, Y)", "model(X, Y) if master_process else (None, X)", "rank-conditional-ddp-forward"),
    ("language", "seed_offset = ddp_rank", "seed_offset = 0", ""),
    ("language", "    if iter_num > max_iters:", "    if loss.item() < 1.0:", "rank-local-early-stop"),
    ("reference", "train_sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("reference", "utils.save_on_master", "torch.save", "save-on-all-ranks"),
    ("reference", 'map_location="cpu", ', "", "load-without-map-location"),
    ("reference", "        evaluate(model, criterion, data_loader_test, device=device)\n        if args.output", "        if utils.is_main_process():\n            evaluate(model, criterion, data_loader_test, device=device)\n        if args.output", "rank-conditional-collective"),
    ("reference", "model_without_ddp.load_state_dict", "utils.is_main_process() and model_without_ddp.load_state_dict", "resume-on-one-rank"),
    ("reference", "            loss.backward()", "            if loss.item() > 0:\n                loss.backward()", "rank-local-skip"),
    ("trainer", "        dataloader.sampler.set_epoch(epoch)\n", "", "missing-set-epoch"),
    ("trainer", "self.local_rank == 0 and self.global_rank == 0", "self.local_rank == 0", "save-on-local-rank0"),
    ("trainer", "self.local_rank == 0 and self.global_rank == 0", "True", "save-on-all-ranks"),
    ("trainer", "_, loss = self.model(", "_, loss = self.model.module(", "ddp-forward-bypassed"),
    ("trainer", "    torch.manual_seed(1)\n", "", "random-split-differs"),
    ("trainer", 'set_device(int(os.environ["LOCAL_RANK"]))', 'set_device(int(os.environ["RANK"]))', "global-rank-as-device"),
    ("trainer", "[RANK{self.global_rank}] ", "", "print-on-all-ranks"),
    ("trainer", "    destroy_process_group()\n", "", "group-not-destroyed"),
    ("trainer", "device_ids=[self.local_rank])", "device_ids=[self.local_rank], find_unused_parameters=True)", "find-unused-unneeded"),
    ("trainer", "logits = self.out(self.embed(x))", "logits = self.embed(x)", "unused-parameters"),
    ("detector", "if RANK != -1:\n            broadcast_list", "if False:\n            broadcast_list", "rank-local-early-stop"),
    ("detector", "worker_seed = torch.initial_seed() % 2**32", "worker_seed = worker_id", "worker-seed-identical"),
    ("detector", "nw = min([os.cpu_count() // max(nd, 1), batch_size if batch_size > 1 else 0, workers])", "nw = os.cpu_count()", "loader-workers-oversubscribed"),
    ("detector", "    if RANK in {-1, 0}:\n        save_dir.mkdir", "    if True:\n        save_dir.mkdir", "tracker-on-all-ranks"),
    ("detector", "    if local_rank == 0:\n        dist.barrier(device_ids=[0])\n", "", "rank-conditional-collective"),
    ("detector", "train_loader.sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("detector", "init_seeds(opt.seed + 1 + RANK)", "init_seeds(opt.seed)", ""),
    ("detector", "        if RANK in {-1, 0}:\n            results", "        if True:\n            results", "save-on-all-ranks"),
    ("detector", "pred = model(imgs)", "pred = de_parallel(model)(imgs)", "ddp-forward-bypassed"),
    ("boxes", "sampler_train.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("boxes", "                if is_main_process():\n                    torch.save", "                if True:\n                    torch.save", "save-on-all-ranks"),
    ("boxes", "    dist.all_reduce(total)\n", "    if is_main_process():\n        dist.all_reduce(total)\n", "rank-conditional-collective"),
    ("boxes", "outputs = model(samples)", "outputs = model.module(samples)", "ddp-forward-bypassed"),
    ("boxes", "self.query_embed.weight.unsqueeze(1)", "torch.zeros(100, 1, 8)", "unused-parameters"),
    ("fine_tuning", "loss = outputs.loss / args.gradient_accumulation_steps", "loss = outputs.loss", "accumulation-not-normalised"),
    ("fine_tuning", "train_sampler.set_epoch(epoch)", "pass", "missing-set-epoch"),
    ("fine_tuning", "        if rank == 0:\n            model.module.save", "        if True:\n            model.module.save", "save-on-all-ranks"),
    ("fine_tuning", "    if rank == 0:\n        dist.barrier()\n", "", "rank-conditional-collective"),
    ("contrastive", "if rank == 0 and epoch % 10", "if epoch % 10", "save-on-all-ranks"),
    ("contrastive", "if rank == 0 and step % 50", "if step % 50", "print-on-all-ranks"),
    ("contrastive", "    if local_rank == 0:\n        torchvision", "    if True:\n        torchvision", "download-on-all-ranks"),
    ("contrastive", "writer = SummaryWriter() if rank == 0 else None", "writer = SummaryWriter()", "tracker-on-all-ranks"),
    ("contrastive", "100 * len(loader)", "100 * len(data) // 256", ""),
    ("masked", "        loss /= accum_iter\n", "", "accumulation-not-normalised"),
    ("masked", "            dist.all_reduce(counts)\n            dist.all_reduce(total)\n", "", "rank-local-buffer-overwritten"),
    ("masked", "            if args.rank == 0:\n                torch.save", "            if args.gpu == 0:\n                torch.save", "save-on-local-rank0"),
    ("policy", "torch.manual_seed(args.seed - local_rank)", "torch.manual_seed(args.seed)", "replicas-start-different"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"), SPOILED, ids=[f"{n}-{r}-{i}" for i, (n, _, _, r) in enumerate(SPOILED)]
)
def test_one_edit_is_found(name: str, old: str, new: str, rule: str, tmp_path: Path) -> None:
    """An edit without a rule changes nothing that is wrong."""
    folder = shutil.copytree(SNIPPETS / f"right_{name}", tmp_path / name)
    texts = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert any(old in text for text in texts.values())
    for path, text in texts.items():
        path.write_text(text.replace(old, new), encoding="utf-8")
    entry = next(path for path, text in texts.items() if text.startswith("# expect:"))
    found = read(entry).findings
    assert rule in {finding.id for finding in found} if rule else all(finding.level == "advice" for finding in found)
