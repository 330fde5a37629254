"""DAGER's own search, run in its own Python by dager.py: it is not part of Keyhole.

Started in a folder where the model lies under the name that DAGER expects. The first line that it
writes names the parameters whose gradients DAGER reads; then, for each line of JSON that it is
given (texts, their gradients in a file), it answers with what DAGER's `reconstruct` returned and
its seconds. Two things are not DAGER's: the gradients, which are given, and the numbers of its
layers, cut to those that the model has. Datasets and metrics of the hub are not loaded: the metric
is the package rouge-score, which that metric calls.
"""

from __future__ import annotations

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
    """The one number that DAGER takes of its metric, in the same place."""

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
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        import torch
        from safetensors.torch import load_file
        from utils.models import ModelWrapper  # type: ignore[import-not-found]

        absent = types.ModuleType("datasets")
        vars(absent).update(load_metric=None, load_dataset=None)
        sys.modules["datasets"] = absent
        import attack  # type: ignore[import-not-found]

        wrapper = ModelWrapper(attack.args)
        names = [name for name, _ in wrapper.model.named_parameters()]
        wrapper.layer_ids = wrapper.layer_ids[: wrapper.model.config.num_hidden_layers]
        read = [names[number] for number in wrapper.layer_ids]
        print(json.dumps(read), file=answers, flush=True)
        usual = dict(vars(attack.args))
        for line in sys.stdin:
            item = json.loads(line)
            given = load_file(item["gradients"])
            gradients = [given.get(name, torch.zeros(1)) for name in names]  # others are not read
            wrapper.compute_grads = lambda *_, given=gradients: given
            vars(attack.args).update(usual)
            attack.args.batch_size = attack.args.n_incorrect = len(item["texts"])
            vars(attack.args).update(item["settings"])
            labels = torch.zeros(1, len(item["texts"]), dtype=torch.long)  # for gradients alone
            started, found, failure = time.perf_counter(), ([], []), ""
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
