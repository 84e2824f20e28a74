"""Convert a checkpoint of this toolkit (a folder or a .nemo archive) to a Hugging Face folder.

python convert_nemo_to_hf.py --nemo_checkpoint DIR --output_dir DIR
"""

import argparse
from pathlib import Path

from aligner.runtime.errors import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo_checkpoint", type=Path, required=True, help="folder or .nemo archive of a checkpoint")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write; must be new or empty")
    args = parser.parse_args()

    from aligner.models.convert import nemo_to_hf
    from aligner.parallel.startup import shutdown

    nemo_to_hf(args.nemo_checkpoint, args.output_dir, progress=print)
    shutdown()


if __name__ == "__main__":
    run_main(main)
