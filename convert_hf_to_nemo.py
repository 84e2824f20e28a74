"""Convert a Hugging Face model (Llama, Qwen2, Qwen3, GPT-2; a local folder) to a checkpoint of this toolkit.

python convert_hf_to_nemo.py --hf_checkpoint DIR --output_dir DIR
"""

import argparse
from pathlib import Path

from aligner.runtime.errors import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf_checkpoint", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write; must be new or empty")
    args = parser.parse_args()

    from aligner.models.convert import hf_to_nemo
    from aligner.parallel.startup import shutdown

    hf_to_nemo(args.hf_checkpoint, args.output_dir, progress=print)
    shutdown()


if __name__ == "__main__":  # saving a checkpoint spawns a process that imports this file again
    run_main(main)
