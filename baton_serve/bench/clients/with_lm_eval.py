"""lm-evaluation-harness against a server with `--enable-tokenizer-info-endpoint`, with tasks of its own:
`python baton_serve/bench/clients/with_lm_eval.py http://127.0.0.1:8000/v1 services/local/demo_model`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": "17 + 25 =", "choices": [" 42", " cheese made of radios"], "gold": 0},
    {"question": "The red radio belongs to", "choices": [" of of of", " Tom"], "gold": 1},
    {"question": "It was a rainy day in", "choices": [" November", " ,,,,"], "gold": 0},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[gold]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main(url: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.json"
        data.write_text(json.dumps(ROWS))
        for name, task in TASKS.items():
            stated = COMMON | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}} | task
            (Path(folder) / f"{name}.yaml").write_text(json.dumps(stated))
        manager = TaskManager(include_path=folder, include_defaults=False)

        def run(kind: str, path: str, tasks: list[str], **options: Any) -> dict[str, Any]:
            given = {"model": "baton-demo", "base_url": f"{url}/{path}", **options}
            chats = kind == "local-chat-completions"
            done = lm_eval.simple_evaluate(
                kind, model_args=given, tasks=tasks, task_manager=manager, apply_chat_template=chats
            )
            assert done is not None
            return {f"{task} {name}": value for task, found in done["results"].items() for name, value in found.items()}

        remote = run("local-completions", "completions", list(TASKS))
        batched = run(
            "local-completions",
            "completions",
            list(TASKS),
            tokenizer=tokenizer,
            batch_size=4,
            tokenizer_backend="huggingface",
            num_concurrent=2,
        )
        chats = run("local-chat-completions", "chat/completions", ["written"])
    assert remote["choice acc,none"] == 1.0, remote
    differing = [name for name in remote if "stderr" not in name and remote[name] != batched[name]]
    assert not differing, (differing, remote, batched)
    print("lm-eval:", {name: value for name, value in remote.items() if ",none" in name and "stderr" not in name})
    print("lm-eval, chats:", chats["written exact_match,none"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
