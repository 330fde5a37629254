"""DAGER's own search, which dager.py runs in DAGER's Python environment.

It starts in a folder that holds the model under the name that DAGER expects. Its first
line of output names the parameters whose gradients DAGER reads. Then, for each input
line of JSON (texts and a file of gradients), it answers with the result of DAGER's
`reconstruct` and its seconds. Two things differ from DAGER: the gradients are given,
and layers that the model lacks are left out. The hub's ROUGE metric is replaced by the
package rouge-score, which it calls.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import types
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


class Rouge:
    """The one number that DAGER uses of its metric, in the same form."""

    def compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        from rouge_score.rouge_scorer import RougeScorer

        score = RougeScorer(["rouge1"]).score(references[0], predictions[0])
        return {"rouge1": types.SimpleNamespace(mid=score["rouge1"])}


def stop(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    checkout, limit, *arguments = sys.argv[1:]
    answers = sys.stdout
    sys.path.insert(0, checkout)
    sys.argv = ["attack.py", *arguments]
    os.environ.setdefault("HF_TOKEN", "")
    signal.signal(signal.SIGALRM, stop)
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        import torch
        from safetensors.torch import load_file

        models = importlib.import_module("utils.models")
        absent = types.ModuleType("datasets")
        vars(absent).update(load_metric=None, load_dataset=None)
        sys.modules["datasets"] = absent
        attack = importlib.import_module("attack")
        wrapper = models.ModelWrapper(attack.args)
        names = [name for name, _ in wrapper.model.named_parameters()]
        wrapper.layer_ids = wrapper.layer_ids[: wrapper.model.config.num_hidden_layers]
        read = [names[number] for number in wrapper.layer_ids]
        print(json.dumps(read), file=answers, flush=True)
        usual = dict(vars(attack.args))
        for line in sys.stdin:
            item = json.loads(line)
            given = load_file(item["gradients"])
            gradients = [
                given.get(name, torch.zeros(1)) for name in names
            ]  # DAGER reads no others
            wrapper.compute_grads = lambda *_, given=gradients: given
            vars(attack.args).update(usual)
            attack.args.batch_size = attack.args.n_incorrect = len(item["texts"])
            vars(attack.args).update(item["settings"])
            labels = torch.zeros(
                1, len(item["texts"]), dtype=torch.long
            )  # only gradients need them
            started = time.perf_counter()
            found = ([], [])
            failure = ""
            signal.setitimer(signal.ITIMER_REAL, float(limit))
            try:
                sample = (item["texts"], labels)
                found = attack.reconstruct(
                    attack.args, attack.args.device, sample, Rouge(), wrapper
                )
            except TimeoutError:
                failure = f"stopped after {limit} s"
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds = time.perf_counter() - started
            answer = {"texts": found[0], "seconds": seconds, "failure": failure}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
