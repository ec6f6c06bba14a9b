"""Transformers' own decoding of a worker's models, as a process: what `specwire bench --compare hf` measures against.

    python -m specwire.lm.baseline TARGET.json [DRAFT.json]

It is fed one JSON object a line (messages, max_tokens, assisted) and answers with one (ids and seconds). Models are loaded as the
workers load them, in the same precision, eager and unchanged but for one thing: a draft with a reduced vocabulary gets a head over
the whole one, in which the tokens that it does not know are impossible, since assisted generation knows one vocabulary only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

IMPOSSIBLE = -1e9
"""Added to the scores of tokens that a draft does not know."""


class Models:
    """What the process does. Greedy, one request at a time."""

    def __init__(self, target: Mapping[str, Any], draft: Mapping[str, Any] | None) -> None:
        from transformers import AutoTokenizer

        from specwire.lm import checkpoint

        self.target, _ = _load(target)
        found = checkpoint.find(target["model"], target.get("gguf_file"), target.get("embeddings_from"))
        folder = found.tokenizer_folder()
        gguf = {"gguf_file": found.gguf_file} if folder is None else {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder or found.folder, **gguf)
        self.draft = None
        if draft is not None:
            self.draft, columns = _load(draft)
            if columns is not None:
                widen(self.draft, columns, self.target.config.vocab_size)

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Ids, when each came, and how long all took."""
        import torch

        begun = time.perf_counter()
        encoded = self.tokenizer.apply_chat_template(
            asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        arrivals: list[float] = []

        class Streamer:
            """Told of the prompt first, then of tokens as they are certain."""

            def put(self, value: Any) -> None:
                arrivals.extend([time.perf_counter() - begun] * value.numel())

            def end(self) -> None:
                pass

        prompt = encoded["input_ids"].shape[1]
        with torch.inference_mode():
            ids = self.target.generate(
                **encoded.to(self.target.device),
                max_new_tokens=asked["max_tokens"],
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                streamer=Streamer(),
                assistant_model=self.draft if asked["assisted"] else None,
            )[0, prompt:].tolist()
        total = time.perf_counter() - begun
        return {"ids": ids, "arrivals": arrivals[prompt:], "total_s": total}


def widen(model: Any, columns: Any, vocab_size: int) -> None:
    """Gives a model with a reduced vocabulary a head over the whole one, in place. `columns`: target id of each of its rows."""
    import torch

    head = model.get_output_embeddings()
    known = torch.from_numpy(columns)
    wide = torch.nn.Linear(head.in_features, vocab_size, bias=True, dtype=head.weight.dtype)
    with torch.no_grad():
        wide.weight.zero_()
        wide.bias.fill_(IMPOSSIBLE)
        wide.weight[known] = head.weight
        wide.bias[known] = 0.0 if head.bias is None else head.bias
    model.set_output_embeddings(wide.requires_grad_(False))
    model.config.vocab_size = vocab_size


def _load(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """A model on its device, and the target ids of its columns. As the workers load it, before they change anything in it."""
    import torch

    from specwire.lm import checkpoint, hf_model
    from specwire.lm.torch_load import fastest_precision, load_weights

    found = checkpoint.find(settings["model"], settings.get("gguf_file"), settings.get("embeddings_from"))
    device = torch.device(settings.get("device") or "cpu")
    precision = settings.get("precision") or "float32"
    dtype = getattr(torch, fastest_precision(device) if precision == "auto" else precision)
    model, columns = load_weights(settings["model"], found, hf_model.read_config(found), device, dtype)
    return model.to(device), columns


def main(arguments: list[str]) -> int:
    """Serves requests from standard input until it ends."""
    models = Models(json.loads(arguments[0]), json.loads(arguments[1]) if len(arguments) > 1 else None)
    out, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print must not be taken for an answer
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(models.answer(json.loads(line))), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
