"""Checks of a run's flags that need no torch. Programs make them before they import torch, which takes seconds.

`check_flags` makes the checks that need nothing but the flags. `check_paths` checks whether the files exist that flags
name. All other checks come after the import of torch, because they depend on the number and the kind of the devices, on
the checkpoint, or on contents of files.
"""

from __future__ import annotations

from pathlib import Path

from megazpp.base.files import errors_as
from megazpp.base.flags import check_existing, in_use
from megazpp.base.program import Problems
from megazpp.data.cache import check_cache_dir
from megazpp.data.config import parse_blend, paths_by_use
from megazpp.data.documents import missing_file
from megazpp.data.indexed_dataset import find_pair
from megazpp.data.text import resolve_text_paths
from megazpp.model.config import GPTConfig
from megazpp.parallel.config import ParallelConfig
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.topology.cluster_file import read_cluster


def check_flags(config: RunConfig) -> None:
    """Check a training run's flags for errors that do not depend on the cluster or on the contents of files.

    Raises:
        ValueError: flags are missing or contradict each other. The message names the flags and their values.
    """
    if config.missing:
        raise ValueError(f"required flags are missing: {', '.join(config.missing)}; add them")
    assert config.data.seq_length is not None
    check_model(config.model, config.parallel, config.data.seq_length)


def check_paths(parsed: ParsedRun, *, needs_load: bool = False, pairs: bool = True) -> bool:
    """Check that the inputs in flags exist, that output folders can be created, and that --cluster-file is right.

    Args:
        parsed: command line of the program.
        needs_load: True if the program cannot work without the checkpoint of --load.
        pairs: True if --data-path and similar flags name .bin/.idx pairs; False if they name files, as in
            post-training.

    Returns:
        False, because no flag asks for information only (see `answer_flags`).

    Raises:
        ValueError: an input does not exist, an output folder cannot be created, or the cluster file is wrong. The
            message has one line per flag and path.
    """
    problems, data, checkpoint = Problems(), parsed.config.data, parsed.config.checkpoint
    with problems:
        check_existing(parsed.parts)
    with problems:
        needs_load |= checkpoint.exit_on_missing_checkpoint or checkpoint.use_checkpoint_args
        # A job that is queued again resumes from --save, and no longer needs the folder of --load.
        paths = [Path(path).expanduser() for path in (checkpoint.load, checkpoint.save) if path is not None]
        if needs_load and not any(path.exists() for path in paths):
            raise ValueError(f"--load {checkpoint.load} has no checkpoint: it does not exist")
    with problems:
        if (cluster_file := parsed.config.cluster.cluster_file) is not None:
            read_cluster(cluster_file)
    folders = {"--save": checkpoint.save, "--run-dir": parsed.config.tracking.run_dir}
    for name, folder in {**folders, "--data-cache-path": data.data_cache_path}.items():
        with problems:
            if folder is not None:
                check_cache_dir(Path(folder).expanduser(), name)
    with problems:
        resolve_text_paths(data.text_path)
    for name, values in {"--data-path": data.data_path, **paths_by_use(data)}.items():
        for path in map(Path, parse_blend(values, flag_name=name)[0]):
            with problems, errors_as(f"{name} {path}"):
                if pairs:
                    find_pair(path.expanduser())
                elif not path.expanduser().is_file():
                    raise ValueError(missing_file(path))
    problems.raise_all()
    return False


def check_model(model: GPTConfig, parallel: ParallelConfig, seq_length: int) -> None:
    """Check that tensor and context parallelism divide the model's sizes, and that the model can process a sample.

    Args:
        model: config of the model.
        parallel: sizes of the parallel axes.
        seq_length: number of tokens per sample.

    Raises:
        ValueError: a size is not divisible, or a sample is too long. The message names the flags and their values.
    """
    # ---- check that the sizes of tensor and context parallelism divide the model's sizes
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    sizes = {"num_attention_heads": model.heads, "ffn_hidden_size": model.dense_ffn_size}
    sizes["moe_shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
    if model.group_query_attention:
        sizes["num_query_groups"] = model.num_query_groups
    for name, size in sizes.items():
        if size is not None and size % tp_size:
            raise ValueError(f"{in_use(model, name, size)} is not divisible by --tensor-model-parallel-size {tp_size}")
    if model.heads % (cp_size * tp_size):
        raise ValueError(
            f"--num-attention-heads {model.heads} is not divisible by --context-parallel-size {cp_size} x "
            f"--tensor-model-parallel-size {tp_size}: change one of them"
        )

    # ---- compare the length of a sample with the ranks that share it, and with the positions that the model supports
    split = tp_size if parallel.sequence_parallel else 1
    if seq_length % (cp_size * split):
        axes = [f"--context-parallel-size {cp_size}"] if cp_size > 1 else []
        axes += [f"--tensor-model-parallel-size {split}, which --sequence-parallel needs"] if split > 1 else []
        raise ValueError(f"--seq-length {seq_length} is not divisible by {' x '.join(axes)}: change one of them")
    longest, scaled = model.max_position_embeddings, ""
    if model.rope_type == "dynamic":
        if cp_size > 1:
            raise ValueError(
                f"--rope-type dynamic needs whole sequences, and a rank of --context-parallel-size {cp_size} has a "
                "part of each sequence: use another --rope-type, or --context-parallel-size 1"
            )
        longest = round((longest or 0) * model.rotary_scaling_factor)
        scaled = f" x --rotary-scaling-factor {model.rotary_scaling_factor:g}"
    if longest is None and model.positions == "learned_absolute":
        raise ValueError("--max-position-embeddings is missing, which learned position embeddings need: add it")
    if longest is not None and seq_length > longest:
        limit = f"--max-position-embeddings {model.max_position_embeddings}{scaled}"
        raise ValueError(f"--seq-length {seq_length} is longer than {limit}: change one of them")
