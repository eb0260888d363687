"""Tasks of lm-evaluation-harness from local files: multiple choice, rolling likelihood, generation; registered metrics alone, so
that nothing is fetched."""
import json
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "adapters" / "tasks"
MEAN = {"aggregation": "mean", "higher_is_better": True}


def task(name: str, **more) -> dict:
    return {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(FOLDER / f"{name}.json")}},
            "test_split": "test", **more}


def tasks(max_gen_toks: int = 16) -> list[dict]:
    return [task("choices", output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
                 doc_to_target="{{answer}}", target_delimiter="",
                 metric_list=[{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}]),
            task("documents", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
                 metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]),
            task("questions", output_type="generate_until", doc_to_text="{{question}}", doc_to_target="{{answer}}",
                 generation_kwargs={"until": ["\n"], "max_gen_toks": max_gen_toks, "do_sample": False},
                 metric_list=[{"metric": "exact_match", **MEAN}])]


def evaluated(lm, wanted: list[dict], **more) -> tuple[dict, dict]:
    """Scores by task and metric, and the answers of each document."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    found = simple_evaluate(lm, tasks=wanted, bootstrap_iters=0, task_manager=TaskManager(include_defaults=False), **more)
    return found["results"], {name: [(each["doc_id"], each["resps"]) for each in samples]
                              for name, samples in found["samples"].items()}


def float32_likelihoods() -> tuple[list[tuple[list[int], list[int]]], list[float]]:
    """Pairs of ids and their log-likelihoods: what the harness's `HFLM` asked for and got of the first two tasks with
    transformers 5.24.0 and torch 2.14.1, in float32 arithmetic on the dequantized weights of SmolLM2."""
    recorded = [json.loads(line) for line in (FOLDER / "transformers.json").read_text().splitlines()]
    return [(each["context"], each["continuation"]) for each in recorded], [each["logprob"] for each in recorded]
