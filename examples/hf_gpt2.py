"""A model from transformers in a loop of your own: a tiny GPT-2, made from its configuration, nothing downloaded.

    python examples/hf_gpt2.py
    paceline launch -n 3 examples/hf_gpt2.py

Needs `pip install 'paceline[hf]'`. transformers returns a mean over the tokens; a step wants a sum and its weight, so
the loss times its token count goes to `step.backward`. For training on text of your own, without a loop, see
`paceline.tasks.CausalLM` and examples/causal_lm.yaml.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

import paceline

CONTEXT = 32


def make_data() -> TensorDataset:
    """This file, in bytes, cut into pieces."""
    with open(__file__, "rb") as file:  # noqa: PTH123 (read as people do)
        tokens_N = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    return TensorDataset(tokens_N[: len(tokens_N) // CONTEXT * CONTEXT].view(-1, CONTEXT))


def main() -> None:
    run = paceline.Run(paceline.Recipe(batch=16, micro_batch=4, lanes=4, epochs=6))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,  # bytes have no special tokens
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).to(run.device)
    model.loss_type = "ForCausalLM"  # as it says itself, with a warning, when nobody does
    model.train()  # from_config leaves it in eval mode, without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)

    def train_step(step: paceline.Step) -> None:
        for (tokens_BT,) in step:
            predicted = tokens_BT[:, 1:].numel()  # a token is predicted from those before it, the first is not
            mean = model(input_ids=tokens_BT, labels=tokens_BT).loss
            step.backward(mean * predicted, weight=predicted)
        step.update(optimizer, max_norm=1.0)

    for done in run.steps(make_data(), train_step):
        if done.step % 8 == 0:
            run.print(f"step {done.step}: loss {done.loss:.4f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
