"""Convert a checkpoint of this toolkit (a folder or a .nemo archive) for TensorRT-LLM.

python convert_nemo_to_trtllm.py --nemo_checkpoint DIR --output_dir DIR --dtype bfloat16 --tp_size 2 \\
    --max_batch_size 64 --max_input_len 1024 --max_output_len 1024

Writes a unified checkpoint (config.json, rank*.safetensors), build.json and build.sh (the shapes, and the trtllm-build command for
releases up to 1.3.0rc20), and hf/, a Hugging Face folder for newer releases. No GPU and no TensorRT-LLM are needed for it.
"""

import argparse
import shlex
from pathlib import Path

from aligner.runtime.bar import bar
from aligner.runtime.errors import run_main


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo_checkpoint", type=Path, required=True, help="folder or .nemo archive of a checkpoint")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tp_size", type=int, default=1, help="tensor-parallel ranks of TensorRT-LLM")
    parser.add_argument("--pp_size", type=int, default=1, help="pipeline-parallel ranks of TensorRT-LLM")
    parser.add_argument("--max_batch_size", type=int, required=True, help="sequences that the engine decodes at once")
    parser.add_argument("--max_input_len", type=int, required=True, help="longest prompt, in tokens")
    parser.add_argument("--max_output_len", type=int, required=True, help="longest response, in tokens")
    parser.add_argument(
        "--quantization", choices=["none", "int8", "int4"], default="none", help="of weights, when the engine is built"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()

    from aligner.models.checkpoint_folder import checkpoint_shape
    from aligner.parallel.startup import shutdown
    from aligner.trtllm.engine_build import EngineBuild
    from aligner.trtllm.export import nemo_to_trtllm, parameters
    from aligner.trtllm.layout import Grid

    build = EngineBuild(
        dtype=args.dtype,
        max_batch_size=args.max_batch_size,
        max_input_len=args.max_input_len,
        max_output_len=args.max_output_len,
        quantization=args.quantization,
    )
    grid = Grid(args.tp_size, args.pp_size)
    shape = checkpoint_shape(args.nemo_checkpoint)
    with bar("parameters", parameters(shape)) as advance:
        nemo_to_trtllm(args.nemo_checkpoint, args.output_dir, grid=grid, build=build, advance=advance)
    print(f"{args.output_dir}: config.json, {grid.world} rank*.safetensors, build.json, build.sh, hf/")
    print(f"to build an engine on a GPU: {shlex.quote(str(args.output_dir / 'build.sh'))}")
    shutdown()


if __name__ == "__main__":
    run_main(main)
