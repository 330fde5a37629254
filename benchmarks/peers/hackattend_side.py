"""HackAttend's released program, which hackattend.py runs in its own Python environment.

Its functions are called as in its run_hackattend.py, on batches of one example. Only
what needs its authors' files differs: token ids are given instead of texts, and weights
as safetensors instead of a pickle. For each example it prints a line of JSON: whether
the model was right, whether the answer flipped, the program's count of queries, its
seconds, and the units between tokens that the last masks close, as (layer, head, query,
key, choice).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    checkout, folder, share, dtype = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr
    os.environ["WANDB_MODE"] = "disabled"
    sys.path.insert(0, checkout)
    import attack
    import pandas
    import torch
    import utils
    import wandb
    from modelling import bert
    from safetensors.torch import load_file
    from transformers import BertConfig

    torch.set_num_threads(1)
    wandb.init(mode="disabled")
    config = BertConfig.from_pretrained(folder)
    victim = getattr(bert, config.architectures[0])(config)
    lacking = victim.load_state_dict(
        load_file(Path(folder) / "model.safetensors"), strict=False
    )
    assert all("position_ids" in name for name in lacking.missing_keys), lacking
    victim.to(getattr(torch, dtype)).eval()
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    settings = SimpleNamespace(
        aadv=True,
        grad_strat="reverse_grad",
        debug=False,
        top_percentage_in_layer=float(share),
        top_n_in_layer=0,
        attn_layer_mask=None,
        attn_head_mask=None,
        layer_tuple_size=(layers, layers),
        head_tuple_size=(heads, heads),
    )
    made = []
    write = attack.generate_pertubed_attention_mask

    def kept(*args, **named):
        result = write(*args, **named)
        made[:] = result[0]
        return result

    attack.generate_pertubed_attention_mask = kept
    inputs = load_file(Path(folder) / "inputs.safetensors")
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    for number in range(len(inputs["labels"])):
        batch = [inputs[name][number : number + 1] for name in names]
        shared = {
            "batch": batch,
            "args": settings,
            "device": torch.device("cpu"),
            "victim": victim,
        }
        started = time.perf_counter()
        right, _, _, _, scores = utils.query_model(
            model=victim, batch=batch, args=settings, device=shared["device"]
        )
        answer = {"right": bool(right), "flipped": False, "queries": 0, "closed": []}
        if right:
            chosen, _ = utils.rank_layers_and_heads(is_random_mask=False, **shared)
            asked = defaultdict(int)
            answer["flipped"] = attack.greedy_attack(
                chosen_layer=chosen,
                batch_i=number,
                original_attn_scores=scores,
                tokenizer=None,
                sa_matrix_pd=pandas.DataFrame(),
                success_attack=0,
                failed_attack=0,
                total_num_query=asked,
                attack_idx_list=[],
                evaluate_score_list=[],
                mask_percentage_list=[],
                attack_layer_dict={},
                attack_head_dict={},
                **shared,
            )
            answer["queries"] = asked[number]
            mask = batch[1].view(-1, batch[1].shape[-1]) > 0
            tokens = (mask[:, :, None] & mask[:, None, :])[:, None]
            answer["closed"] = [
                (layer, head, query, key, choice)
                for layer, opened in enumerate(made)
                for choice, head, query, key in ((opened == 0) & tokens)
                .nonzero()
                .tolist()
            ]
        answer["seconds"] = time.perf_counter() - started
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
