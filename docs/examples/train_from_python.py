"""Train from Python: compose a config, build a run, train some steps of the laptop experiment on the CPU, read its metrics.

    python docs/examples/train_from_python.py

It needs the packages of ringspan[train]. The run's folder and the tokenized text are in a temporary folder, which is removed at
the end. With a folder that all ranks see, the same calls train under torchrun.
"""

import json
import tempfile

from ringspan.trainer.config import compose
from ringspan.trainer.loop import train
from ringspan.trainer.run import Run


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ["experiment=laptop", "steps=10", "data.length=256", "parallel.device=cpu", "name=from-python"]
        options += ["evaluate.batches=1", "evaluate.sample=16", f"runs={folder}/runs", f"data.cache={folder}/cache"]
        composed = compose.load(options)  # a wrong option is a compose.ConfigError, which is a ValueError
        run = Run(composed)  # ranks, data, model, engine
        if train(run):  # False: a signal asked the run to stop early
            run.finish()  # held-out evaluation, a sample, the final report
        run.close()
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
        print(f"trained {len(steps)} steps: loss {steps[0]['loss']:.3f} at the first, {steps[-1]['loss']:.3f} at the last")


if __name__ == "__main__":
    main()
